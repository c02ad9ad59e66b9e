"""A training job on random samples, for timing the real launcher; workers import this file by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.step import Case, random_draft, random_teacher
from train.config import TrackConfig, TrainConfig
from train.decoders import Decoders
from train.job import RowShape, SourceFiles, TrainJob
from train.model import TrainParts


@dataclass
class Sample:
    """A training sample."""

    record_id: str
    features: Tensor
    token_ids: Tensor
    teacher: Tensor
    loss_mask: Tensor


class RandomSource:
    """Samples of one length, random but always the same, their second half supervised.

    Args:
        count: samples.
        length, hidden, vocab: rows, width and vocabulary.
    """

    def __init__(self, count: int, length: int, hidden: int, vocab: int) -> None:
        self.hidden, self.vocab = hidden, vocab
        self.lengths = [length] * count
        self.row, self.files = RowShape(3 * hidden, hidden, torch.float32), SourceFiles()

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, index: int) -> Sample:
        """Sample `index`."""
        gen, n = torch.Generator().manual_seed(index), self.lengths[index]
        mask = torch.arange(n) >= n // 2
        tokens = torch.randint(0, self.vocab, (n,), generator=gen)
        states = torch.randn(n, 4 * self.hidden, generator=gen)
        return Sample(f"r{index}", states[:, self.hidden :], tokens, states[:, : self.hidden], mask)

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and mask of sample `index`."""
        sample = self.get(index)
        return sample.token_ids, sample.loss_mask

    def fill(self, index: int, features: Tensor, teacher: Tensor, decoders: Decoders) -> None:
        """States of sample `index`."""
        sample = self.get(index)
        features.copy_(sample.features)
        teacher.copy_(sample.teacher)

    def advise(self, index: int) -> None:
        """There is no disk."""

    def close(self) -> None:
        """Nothing is open."""


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
