"""Whole runs: training by one and by two processes of the real launcher, and extraction of more and more records."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.extract import random_records, random_target
from benchmarks.fill_store import FillStore
from benchmarks.growth.axes import BASE, shape_of
from benchmarks.growth.fits import fit
from benchmarks.growth.job import random_job
from benchmarks.growth.measure import time_in_turns
from benchmarks.step import Case
from data_prep.capture.hf import HFCapture
from eagle3.wiring import Wiring
from train.launch import run_training
from train.memory import trained_parameters
from train.metrics import read_metrics
from train.world import environment

WARM_UP = 2  # optimizer steps that are not counted: DeepSpeed allocates its buffers in the first


def measure_processes(
    rounds: int, folder: Path, case: Case | None = None, batch: int = 8, steps: int = 6
) -> dict[str, Any]:
    """Throughput of the same job by one and by two processes, in turns.

    One thread a process, so that two processes have twice the processor. The global batch is the same: one process
    takes it in two micro-batches, two take one each.

    Args:
        rounds: pairs of runs.
        folder: where the runs are made and removed.
        case: the step; `documents` samples a micro-batch.
        batch: samples of an optimizer step.
        steps: optimizer steps, the first two of which are not counted.

    Returns:
        seconds of a step of each run, how many times as fast two processes are, in median and in each round; what the
        sum of the gradients carries.
    """
    case = case or replace(BASE, length=256, documents=4)
    found: dict[int, list[float]] = {1: [], 2: []}
    for number in range(rounds):
        for processes, kept in found.items():
            with tempfile.TemporaryDirectory(prefix=".growth-", dir=folder) as place:
                kept.append(_step_seconds(Path(place), case, batch, steps, processes))
            print(f"processes: {processes}, round {number + 1}: {kept[-1]:.2f} s a step", flush=True)
    ratios = [one / two for one, two in zip(found[1], found[2], strict=True)]
    count = sum(trained_parameters(shape_of(case)).values())
    return {
        "case": asdict(case),
        "samples": batch,
        "seconds_a_step": found,
        "times_as_fast": median(found[1]) / median(found[2]),
        "rounds": ratios,
        "gradient_bytes": count * 4,
    }


def _step_seconds(folder: Path, case: Case, batch: int, steps: int, processes: int) -> float:
    job = random_job(folder / "run", asdict(case), batch, steps, processes)
    with environment({"OMP_NUM_THREADS": "1"}):
        result = run_training(job)
    rows = [row for row in read_metrics(Path(result.metrics)) if row["kind"] == "train"]
    return median(row["seconds"] for row in rows[WARM_UP:])


def measure_extraction(
    rounds: int, folder: Path, documents: tuple[int, ...] = (4, 8, 16, 32), hidden: int = 256, length: int = 256
) -> dict[str, Any]:
    """Seconds of extraction over more and more conversations, in turns; their growth with the tokens.

    Args:
        rounds: timed rounds.
        folder: where the stores are made and removed.
        documents: conversations of each point, ascending.
        hidden: width of the random Llama of 4 layers.
        length: tokens of the longest conversations.
    """
    wiring = Wiring.native("llama", 8, hidden)
    capture = HFCapture.from_model(random_target(hidden, 8, 1024), wiring)
    points: list[tuple[list[float], Any]] = []
    tokens = []
    with tempfile.TemporaryDirectory(prefix=".growth-", dir=folder) as place:
        for count in documents:
            records = random_records(count, length, 1024)
            tokens.append(sum(map(len, records["input_ids"])))
            fill = FillStore("raw", capture, records, Path(place) / str(count), 4 * length, 8 * length)
            points.append(([], _fresh(fill)))
        time_in_turns(points, rounds)
    seconds = [median(kept) for kept, _ in points]
    return {
        "axis": "extraction",
        "label": "tokens extracted",
        "side": "redraft",
        "documents": documents,
        "values": tokens,
        "rounds": [kept for kept, _ in points],
        "seconds": seconds,
        "time": fit(tokens, seconds).to_dict(),
        "needed_flops": tokens,
        "theory": fit(tokens, tokens).to_dict(),
    }


def _fresh(fill: FillStore) -> Any:
    """The call with the last store removed first; removing a few megabytes takes no time that counts."""

    def run() -> None:
        if fill.path.exists():
            fill.clear()
        fill()

    return run
