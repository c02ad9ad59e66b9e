"""The toy training job on a real store; importable by worker processes through PYTHONPATH."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_toy import H, V, toy_job

from data_prep.capture.sample import CapturedSample
from data_prep.store import Store, StoreManifest
from data_prep.store.shared import SharedStore
from eagle3.wiring import Site, Wiring
from train.front.source import StoreSource
from train.job import TrainJob

WIRING = Wiring((Site(1), Site(2), Site(3)), "final", "llama", 6, H)
SPLITS = {"train": range(24), "val": range(24, 29)}


class Tokens:
    """The tokens of one split's records."""

    def __init__(self, samples: list[CapturedSample]) -> None:
        self.record_ids = [sample.record_id for sample in samples]
        self.lengths = [sample.tokens for sample in samples]
        self._samples = samples

    def tokens(self, index: int) -> np.ndarray:
        """`input_ids` [T] int32."""
        return self._samples[index].input_ids.int().numpy()


def records(split: str) -> list[CapturedSample]:
    """Random records of one split, always the same."""
    made = []
    for number in SPLITS[split]:
        gen, tokens = torch.Generator().manual_seed(number), 5 + (number * 5) % 9
        states = {f"layer_{k}": torch.randn(tokens, H, generator=gen).bfloat16() for k in (1, 2, 3)}
        final = torch.randn(tokens, H, generator=gen).bfloat16()
        ids, mask = torch.randint(V, (tokens,), generator=gen), torch.rand(tokens, generator=gen) < 0.6
        made.append(CapturedSample(f"r{number:02d}", ids, mask, states, final, "final"))
    return made


def make_store(path: Path, codec: str) -> Path:
    """A sealed store of both splits."""
    store = SharedStore(path, StoreManifest(WIRING, {"name": "Toy"}, "tok" * 8, codec=codec))
    both = [*records("train"), *records("val")]
    for begin in range(0, len(both), 8):
        store.publish(f"s{begin}", both[begin : begin + 8])
    assert store.finish([sample.record_id for sample in both])
    return path


def open_source(split: str, *, store: str) -> StoreSource:
    """The source factory."""
    return StoreSource(Store.open(store, wiring=WIRING), Tokens(records(split)), WIRING, None)


def job(folder: Path, store: Path, **settings: Any) -> TrainJob:
    """The toy job on that store."""
    made = toy_job(folder, **settings)
    made.source, made.source_args = "loader_job:open_source", {"store": str(store)}
    return made
