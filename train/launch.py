"""Start training: in this process, in several of this machine, or as one of an outer launcher's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from eagle3.errors import RedraftError
from train.job import TrainJob, TrainResult
from train.loop import PAUSED, Loop
from train.orders import check_world, shared
from train.telling import GONE, told
from train.world import RENDEZVOUS, joined, launched


def process_count(setting: int) -> int:
    """Processes for `train.processes`: 0 means one per GPU, or one without a GPU."""
    return setting or max(1, torch.cuda.device_count())


def run_training(job: TrainJob) -> TrainResult:
    """Train to the end of the job, going on from its newest whole checkpoint if there is one.

    An outer launcher that has set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (torchrun, deepspeed with
    a hostfile, srun) is joined, over a shared run folder. Either each of its processes makes this call, or, under
    the front door, rank 0 does inside `train.orders.leading` and the others `follow`.

    Raises:
        RedraftError: one line on what went wrong; running the same job again goes on from the newest checkpoint.
    """
    check_world(job.train)
    count = process_count(job.train.processes)
    if launched() or count == 1:
        return train_here(job)
    return _train_in_workers(job, count)


def train_here(job: TrainJob) -> TrainResult:
    """Train as one process of the world that the environment describes (alone without one)."""
    with joined() as world, shared(job):
        return Loop(job, world).run()


def _train_in_workers(job: TrainJob, count: int) -> TrainResult:
    folder = Path(job.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    job.save(folder / "job.json")
    (folder / PAUSED).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="redraft-") as told_in:  # not beside the job: its disk may be full
        workers = _start_workers(folder / "job.json", count, told_in)
        try:
            codes = _wait(workers)
        finally:
            _end(workers)
        if any(codes):
            raise _failure(folder, told_in, codes)
    paused = folder / PAUSED
    return TrainResult.read(paused if paused.exists() else folder / "result.json")


def _start_workers(job_file: Path, count: int, told_in: str) -> list[subprocess.Popen[bytes]]:
    """Start the workers. Each holds the reading end of a pipe from here and leaves when it closes.

    They meet in a file of `told_in`: a master's port would be open to the whole network.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // count))
    meeting = str(Path(told_in) / "group")
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": str(count), RENDEZVOUS: meeting}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "train.worker", str(job_file), "--with-parent", f"--errors={told_in}"],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": threads},
            stdin=subprocess.PIPE,
        )
        for rank in range(count)
    ]


def _wait(workers: list[subprocess.Popen[bytes]]) -> list[int]:
    """Exit codes once all have ended well or a few seconds after one has not; None of the running becomes 0."""
    while True:
        codes = [worker.poll() for worker in workers]
        if any(codes):
            time.sleep(2.0)  # let the others, which usually fail for the same reason, say so too
            return [worker.poll() or 0 for worker in workers]
        if None not in codes:
            return [0] * len(workers)
        time.sleep(0.1)


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    """End whoever still runs: politely, then not."""
    for worker in workers:
        if worker.stdin:
            worker.stdin.close()
    for worker in workers:
        try:
            worker.wait(timeout=10)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _failure(folder: Path, told_in: str, codes: list[int]) -> RedraftError:
    """The error of the worker that failed first, or what its exit code tells; others only say that it is gone."""
    said = [told(told_in, rank) for rank in range(len(codes))]
    if (own := next((one for one in said if one and one.what != GONE), None)) is not None:
        return own
    silent = [rank for rank, code in enumerate(codes) if code and not said[rank]]
    if not silent:
        return next(filter(None, said))
    rank, code = silent[0], codes[silent[0]]
    why = f"signal {-code}" if code < 0 else f"exit code {code}"
    return RedraftError(
        "a training process ended early",
        where=f"{folder}, process {rank} of {len(codes)}",
        why=f"{why}; its own words stand above",
        mend="run the same command again to go on from the newest checkpoint",
    )
