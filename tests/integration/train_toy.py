"""A tiny draft, teacher and data for training tests; importable by worker processes through PYTHONPATH."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.in_memory import InMemorySource, Sample
from eagle3.draft import DraftShape, Eagle3Draft
from train.config import TrackConfig, TrainConfig
from train.job import TrainJob
from train.losses import TeacherHead
from train.model import TrainParts

H, V, VD, AUX = 16, 40, 24, 3
FITTED = "train_toy:fitted_parts"  # another model for a job
TIMES = ("seconds", "data_wait")  # fields of a metrics row that no two runs share
SHAPE = DraftShape(
    hidden_size=H,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=V,
    draft_vocab_size=VD,
    num_aux=AUX,
    rms_norm_eps=1e-6,
    rope={"rope_theta": 10000.0, "rope_scaling": None},
    max_position_embeddings=64,
)


class Source(InMemorySource):
    """Random samples of unequal lengths and unequal numbers of supervised rows."""

    def __init__(
        self,
        count: int,
        seed: int,
        poison: int | None = None,
        wait: float = 0.0,
        fail_after: int = 0,
        term_after: int = 0,
    ) -> None:
        super().__init__([4 + (i * 5) % 9 for i in range(count)], AUX, H)
        self.count, self.seed, self.poison, self.wait = count, seed, poison, wait
        self.fail_after, self.term_after, self.reads = fail_after, term_after, 0

    def get(self, index: int) -> Sample:
        """Sample `index`, always the same; `poison` has a state that is not a number."""
        time.sleep(self.wait)
        self.reads += 1
        if self.reads == self.term_after:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.reads == self.fail_after:
            raise RuntimeError("the disk is gone")
        gen, n = torch.Generator().manual_seed(self.seed * 1000 + index), self.lengths[index]
        tokens = torch.randint(0, V, (n,), generator=gen)
        features = torch.randn(n, AUX * H, generator=gen)
        if index == self.poison:
            features[1] = float("nan")
        mask = torch.rand(n, generator=gen) < 0.3 + 0.07 * (index % 10)
        teacher = torch.randn(n, H, generator=gen) + features[:, :H].nan_to_num()
        return Sample(f"r{index}", features, tokens, teacher, mask)

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and mask of sample `index`; trouble befalls its states only."""
        calm = Source(self.count, self.seed).get(index)
        return calm.token_ids, calm.loss_mask


def open_source(split: str, *, count: int = 24, **trouble: Any) -> Source:
    """The toy's source factory; `trouble` befalls the training split only."""
    return Source(count, 1, **trouble) if split == "train" else Source(5, 2)


def build_parts(seed: int = 0) -> TrainParts:
    """The toy's model factory."""
    torch.manual_seed(seed)
    draft = Eagle3Draft(SHAPE)
    kept = torch.randperm(V)[:VD].sort().values
    draft.d2t.copy_(kept - torch.arange(VD))
    draft.t2d.zero_()[kept] = True
    return TrainParts(draft, TeacherHead(torch.rand(H) + 0.5, torch.randn(V, H), 1e-6))


def fitted_parts() -> TrainParts:
    """The same with a start that is still to be fitted."""
    return replace(build_parts(), fit_rows=40)


def toy_job(folder: Path, *, source: dict[str, Any] | None = None, **settings: Any) -> TrainJob:
    """A job of 6 steps of 8 conversations in micro-batches of 2."""
    base: dict[str, Any] = {
        "ttt_steps": 3,
        "max_steps": 6,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "lr": 1e-2,
        "warmup_ratio": 0.3,
        "save_every": 2,
        "head_chunk": 8,
        "dtype": "float32",
    }
    return TrainJob(
        run_dir=str(folder),
        train=TrainConfig(**{**base, **settings}),
        track=TrackConfig(wandb="disabled"),
        wiring={"aux": ["layer_1", "layer_2", "layer_3"]},
        source="train_toy:open_source",
        source_args=source or {},
        model="train_toy:build_parts",
        model_args={},
        identity={"store": "toy"},
    )


def worker_environment() -> dict[str, str]:
    """Environment in which a worker process can import this file."""
    here = str(Path(__file__).parent)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH")))), "OMP_NUM_THREADS": "1"}
