"""A small store for the loader's tests, importable by child processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.capture.sample import CapturedSample
from data_prep.store import Store, StoreManifest
from data_prep.store.shared import SharedStore
from eagle3.wiring import Site, Wiring
from train.batches import StepPlan
from train.config import TrainConfig
from train.front.source import StoreSource
from train.loader import Loader, Split

H, V = 32, 50
RECORDS = 26


class Tokens:
    """The tokens of prepared records, as `train.front.source.Prepared` gives them."""

    def __init__(self, samples: list[CapturedSample]) -> None:
        self.record_ids = [sample.record_id for sample in samples]
        self.lengths = [sample.tokens for sample in samples]
        self._samples = samples

    def tokens(self, index: int) -> np.ndarray:
        """`input_ids` [T] int32."""
        return self._samples[index].input_ids.int().numpy()


def samples() -> list[CapturedSample]:
    """Random records of 2 to 30 tokens, always the same."""
    gen = torch.Generator().manual_seed(3)
    made = []
    for number in range(RECORDS):
        tokens = 2 + int(torch.randint(29, (1,), generator=gen))
        states = {name: torch.randn(tokens, H, generator=gen).bfloat16() for name in ("layer_3", "layer_1", "final")}
        ids = torch.randint(V, (tokens,), generator=gen)
        mask = torch.rand(tokens, generator=gen) > 0.4
        made.append(CapturedSample(f"r{number:02d}", ids, mask, states, states.pop("final"), "final"))
    return made


def wiring(embedding: bool = True) -> Wiring:
    """Layers 3 and 1, and the embedding between them."""
    sites = (Site(3), Site(0), Site(1)) if embedding else (Site(3), Site(1))
    return Wiring(sites, "final", "llama", 6, H)


def make_store(path: Path, codec: str) -> Path:
    """A sealed store of four shards."""
    manifest = StoreManifest(wiring(), {"name": "Tiny"}, "tok" * 8, "tpl" * 8, codec=codec)
    made = samples()
    store = SharedStore(path, manifest)
    for begin in range(0, RECORDS, 7):
        store.publish(f"s{begin}", made[begin : begin + 7])
    assert store.finish([sample.record_id for sample in made])
    return path


def table() -> torch.Tensor:
    """An embedding [V, H]."""
    return torch.randn(V, H, generator=torch.Generator().manual_seed(5))


def open_source(path: str | Path, embedding: bool = True) -> StoreSource:
    """All records of the store."""
    wanted = wiring(embedding)
    opened = Store.open(path, wiring=wanted, accept_other_wiring=True)
    return StoreSource(opened, Tokens(samples()), wanted, table() if embedding else None)


def open_loader(path: str | Path, **settings: Any) -> tuple[Loader, StepPlan, StoreSource]:
    """A loader over two epochs of 6 conversations in micro-batches of 2."""
    base = {"global_batch_size": 6, "micro_batch_size": 2, "epochs": 2, "loader_workers": 0}
    cfg, source = TrainConfig(**{**base, **settings}), open_source(path)
    plan = StepPlan(RECORDS, cfg, 1, 0)
    return Loader(cfg, torch.device("cpu"), [Split(source, plan.micro_batches, range(plan.total_steps))]), plan, source


if __name__ == "__main__":  # a training process that is killed: names its workers, takes one batch and stands still
    loader, *_ = open_loader(sys.argv[1], loader_workers=2)
    step = next(iter(next(iter(loader.stream(0)))))
    print(*loader.decoders.processes, step.rows, flush=True)
    time.sleep(600)
