"""One case of the benchmark, in a process of its own: steps of a fixed length that ask for their data."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.loader.stores import Listed, Shape, evict
from data_prep.store import Store
from eagle3.ttt import PackedBatch
from train.batches import StepPlan, read_micro_batches
from train.config import TrainConfig
from train.front.source import StoreSource
from train.loader import Loader, Split

PLAIN = -1  # in place of a number of workers: the plain way, one step ahead in a thread


@dataclass(frozen=True)
class Case:
    """What is driven.

    Args:
        store: its folder.
        kind: what it is made of.
        shape: of its records.
        documents: records a step.
        workers: `train.loader_workers`, or `PLAIN`.
        steps: how many are counted.
        step_seconds: of each.
        burn: keep a processor busy meanwhile, as a process that launches kernels and waits for a GPU does.
        prefetch_steps, prefetch_mib: as in `train`.

    Before those that count, as many steps go by as it takes to start workers and to use the ring's memory once.
    """

    store: str
    kind: str
    shape: Shape
    documents: int
    workers: int
    steps: int
    step_seconds: float
    burn: bool
    prefetch_steps: int
    prefetch_mib: int

    @property
    def uncounted(self) -> int:
        """Steps before those that count."""
        return self.prefetch_steps + 2

    @property
    def all_steps(self) -> int:
        """Steps in all."""
        return self.uncounted + self.steps

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Case:
        """From `asdict`."""
        return cls(**{**told, "shape": Shape(**told["shape"])})


class PlainWay:
    """Each record copied out, joined and packed, one step ahead, in one thread."""

    def __init__(self, source: StoreSource, plan: StepPlan, steps: int) -> None:
        self._source, self._plan, self._steps = source, plan, steps
        self._pool = ThreadPoolExecutor(1)

    def _read(self, step: int) -> Future[list[PackedBatch]]:
        return self._pool.submit(read_micro_batches, self._source, self._plan.micro_batches(step))

    def __iter__(self) -> Iterator[tuple[float, list[PackedBatch]]]:
        """Seconds waited, and the batches, of each step."""
        coming = self._read(0)
        for step in range(self._steps):
            started = time.perf_counter()
            batches = coming.result()
            waited = time.perf_counter() - started
            coming = self._read(min(step + 1, self._steps - 1))
            yield waited, batches


def run(case: Case) -> dict[str, Any]:
    """Seconds waited at each step, what the loader spent, and the memory it took."""
    torch.set_num_threads(1)
    store = Store.open(case.store, wiring=case.shape.wiring, unfinished=True)
    source = StoreSource(store, Listed(store.record_ids, case.shape.tokens), case.shape.wiring, None)
    batch = case.documents
    cfg = TrainConfig(
        global_batch_size=batch,
        micro_batch_size=batch,
        max_steps=case.all_steps,
        loader_workers=max(case.workers, 0),
        prefetch_steps=case.prefetch_steps,
        prefetch_mib=case.prefetch_mib,
    )
    plan = StepPlan(len(source), cfg, 1, 0)
    evict(Path(case.store))
    before = resident(os.getpid())
    figures = _plain(case, source, plan) if case.workers == PLAIN else _loaded(case, cfg, source, plan)
    own, theirs = figures.pop("resident") - before, figures.pop("resident_workers")
    memory = {"own_bytes": own, "ring_bytes": figures.pop("ring", 0), "worker_bytes": theirs}
    return {"case": asdict(case), **summary(figures, case), **memory}


def _plain(case: Case, source: StoreSource, plan: StepPlan) -> dict[str, Any]:
    waits, seconds = [], []
    for waited, _ in PlainWay(source, plan, case.all_steps):
        started = time.perf_counter()
        stand_in(case)
        waits.append(waited)
        seconds.append(waited + time.perf_counter() - started)
    return {"waits": waits, "seconds": seconds, "resident": resident(os.getpid()), "resident_workers": []}


def _loaded(case: Case, cfg: TrainConfig, source: StoreSource, plan: StepPlan) -> dict[str, Any]:
    loader = Loader(cfg, torch.device("cpu"), [Split(source, plan.micro_batches, range(case.all_steps))])
    waits, seconds = [], []
    before: dict[str, float] = {}
    for number, step in enumerate(loader.stream(0)):
        if number == case.uncounted:
            before = dict(vars(loader.decoders.spent))
        started = time.perf_counter()
        for _ in step:
            stand_in(case)
        waits.append(step.waited)
        seconds.append(time.perf_counter() - started)
    own = resident(os.getpid())
    spent = {name: value - before[name] for name, value in vars(loader.decoders.spent).items()}
    theirs = [resident(pid) for pid in loader.decoders.processes]
    loader.close()
    return {
        "waits": waits,
        "seconds": seconds,
        "spent": spent,
        "ring": loader.region.size,
        "resident": own,
        "resident_workers": theirs,
    }


def stand_in(case: Case) -> None:
    """Take the time of a step; a processor is kept busy in products that hold no lock of Python's."""
    end = time.perf_counter() + case.step_seconds
    if not case.burn:
        time.sleep(case.step_seconds)
        return
    a = torch.ones(128, 128)
    while time.perf_counter() < end:
        a @ a


def resident(pid: int) -> int:
    """Bytes of a process in memory, mapped files and what it shares apart."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def summary(figures: dict[str, Any], case: Case) -> dict[str, Any]:
    """The figures of a table's line."""
    waits, seconds = figures["waits"][case.uncounted :], figures["seconds"][case.uncounted :]
    size = case.documents * (case.shape.tokens - 1) * case.shape.record_bytes // case.shape.tokens
    spent = figures.get("spent")
    return {
        **figures,
        "share": sum(waits) / sum(seconds),
        "median": statistics.median(waits),
        "p99": statistics.quantiles(waits, n=100, method="inclusive")[98],
        "max": max(waits),
        "bytes_per_s": len(waits) * size / sum(seconds),
        "worker_bytes_per_s": spent["bytes"] / (spent["read"] + spent["decode"]) if spent else None,
        "cpu_bytes_per_s": spent["bytes"] / spent["cpu"] if spent else None,
    }
