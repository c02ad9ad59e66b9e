"""A training job on random samples, for timing the real launcher; workers import this file by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.in_memory import InMemorySource, Sample
from benchmarks.step import Case, random_draft, random_teacher
from train.config import TrackConfig, TrainConfig
from train.job import TrainJob
from train.model import TrainParts


class RandomSource(InMemorySource):
    """Samples of one length, random but always the same, their second half supervised.

    Args:
        count: samples.
        length, hidden, vocab: rows, width and vocabulary.
    """

    def __init__(self, count: int, length: int, hidden: int, vocab: int) -> None:
        super().__init__([length] * count, 3, hidden)
        self.hidden, self.vocab = hidden, vocab

    def get(self, index: int) -> Sample:
        """Sample `index`."""
        gen, n = torch.Generator().manual_seed(index), self.lengths[index]
        mask = torch.arange(n) >= n // 2
        tokens = torch.randint(0, self.vocab, (n,), generator=gen)
        states = torch.randn(n, 4 * self.hidden, generator=gen)
        return Sample(f"r{index}", states[:, self.hidden :], tokens, states[:, : self.hidden], mask)


def open_source(split: str, **sizes: int) -> RandomSource | None:
    """The source factory of the job; nothing is held out."""
    return RandomSource(**sizes) if split == "train" else None


def build_parts(**case: Any) -> TrainParts:
    """The model factory of the job."""
    sizes = Case(**case)
    torch.manual_seed(sizes.seed)
    draft = random_draft(sizes)
    return TrainParts(draft, random_teacher(sizes, draft))


def random_job(folder: Path, case: dict[str, Any], batch: int, steps: int, processes: int) -> TrainJob:
    """A job of `steps` optimizer steps over `batch` samples each.

    Args:
        folder: of the run.
        case: fields of `benchmarks.step.Case`; `length` rows a sample, `documents` samples a micro-batch.
        batch: samples of a step, over all processes.
        steps: optimizer steps.
        processes: that the launcher starts.
    """
    return TrainJob(
        run_dir=str(folder),
        train=TrainConfig(
            ttt_steps=case["steps"],
            max_steps=steps,
            global_batch_size=batch,
            micro_batch_size=case["documents"],
            processes=processes,
            dtype=case["dtype"],
            save_every=steps + 1,
        ),
        track=TrackConfig(wandb="disabled"),
        wiring={"aux": ["layer_1", "layer_2", "layer_3"]},
        source="benchmarks.growth.job:open_source",
        source_args={
            "count": batch * steps,
            "length": case["length"],
            "hidden": case["hidden"],
            "vocab": case["vocab"],
        },
        model="benchmarks.growth.job:build_parts",
        model_args=case,
        identity={"store": "random"},
    )
