"""The extract stage's work: what is extracted in which order, by this process or by several of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.extract import Extracted, Part, Sharing, Writing, extract
from data_prep.prepare import load_prepared
from data_prep.store import StoreManifest
from data_prep.store.shard import Shard
from eagle3.atomic import write_json
from eagle3.errors import ConfigError, RedraftError
from eagle3.place import list_files
from train.batches import epoch_order
from train.front.capture import CaptureChoice
from train.front.console import console, progress_bar
from train.front.context import Run
from train.telling import told

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Work:
    """What is to be extracted into the run's store.

    Args:
        manifest: the store's identity.
        tokens: of all records asked for, for the progress bar.
        part: the records asked for; None = all.
    """

    manifest: StoreManifest
    tokens: int
    part: Part | None = None


def prepared_rows(run: Run) -> tuple[Any, list[list[int]]]:
    """All prepared records, training ones first, and the orders of their use: validation, then the first epoch's.

    Both splits are batched apart, so that the validation split can stay while training records come and go.
    """
    from datasets import concatenate_datasets

    splits = [load_prepared(run.prepared, split) for split in ("train", "val")]
    train, held_out = (len(split) for split in splits)
    orders = [list(range(train, train + held_out)), epoch_order(run.config.train.seed, 0, train).tolist()]
    return concatenate_datasets(splits), orders


def sharing(run: Run) -> Sharing:
    """How this run's workers share the work; claims lie in the store, or in the run folder where that is remote."""
    capture = run.config.capture
    local = isinstance(run.store, Path) and "://" not in run.config.paths.store
    folder = Path(capture.claims_dir) if capture.claims_dir else None if local else run.run_dir / "claims"
    return Sharing(folder, capture.claim_timeout_s, capture.wait)


def run_extraction(run: Run, work: Work) -> Extracted:
    """Extract, in this process or in `capture.processes` of them, and say what was done and by whom the rest is held.

    Raises:
        RedraftError: the extraction failed; what was published is kept.
    """
    console.print(f"      loading {run.config.target.name} (capture.backend={run.config.capture.backend})")
    with progress_bar("hidden states", work.tokens, "tokens") as advance:
        if run.config.capture.processes == 1:
            done = extract_here(run, work, advance)
        else:
            done = extract_in_processes(run, work, advance)
    console.print(f"      captured {done.tokens:,} tokens of {done.records:,} records; {done.found_done:,} were there")
    if not done.complete:
        console.print("      left to other workers: " + ("; ".join(held.words for held in done.others) or "some units"))
    return done


def extract_here(run: Run, work: Work, advance: Advance | None, log: str = "sglang.log") -> Extracted:
    """Extract as one worker."""
    rows, orders = prepared_rows(run)
    with CaptureChoice(run, log).open() as backend:
        return _extract(run, work, rows, orders, backend, advance)


def _extract(run: Run, work: Work, rows: Any, orders: list[list[int]], backend: Any, advance: Advance | None) -> Any:
    capture = run.config.capture
    return extract(
        rows,
        backend,
        run.store,
        work.manifest,
        capture.batch_tokens,
        run.config.store.shard_tokens,
        advance,
        window_batches=capture.window_batches,
        orders=orders,
        part=work.part,
        sharing=sharing(run),
        writing=Writing(capture.writers, capture.write_ahead_mib),
    )


# --------------------------------------------------------------------------------------- several workers of one command


def gpu_slices(processes: int, tp: int) -> list[str | None]:
    """Each worker's CUDA_VISIBLE_DEVICES: equal slices of what is visible here; None without GPUs.

    Raises:
        ConfigError: the GPUs cannot be shared evenly, or a share is smaller than `tp`.
    """
    import torch

    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    if not count:
        return [None] * processes
    gpus = [name.strip() for name in told.split(",")][:count] if told else [str(i) for i in range(count)]
    share = len(gpus) // processes
    if len(gpus) % processes or share < tp:
        raise ConfigError(
            "the workers cannot share the GPUs",
            where="capture.processes",
            why=f"{len(gpus)} GPUs for {processes} workers of {tp} each",
            mend="let capture.processes x capture.sglang.tp be the number of GPUs",
        )
    return [",".join(gpus[n * share : (n + 1) * share]) for n in range(processes)]


class _Child:
    """A worker process, started again when it dies."""

    def __init__(self, number: int, task: Path, told_in: str, gpus: str | None, restarts: int) -> None:
        self.number, self.task, self.told_in, self.gpus, self.restarts = number, task, told_in, gpus, restarts
        self.failure: RedraftError | None = None
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        words = [str(self.task), str(self.number), self.told_in]
        command = [sys.executable, "-m", "train.front.extract_worker", *words]
        gpus = {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus}
        return subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **gpus})

    def running(self) -> bool:
        """Whether it still works; one that died is started again, one that refused its input is not."""
        code = self.process.poll()
        if code is None:
            return True
        if code == 0:
            return False
        self.failure = told(self.told_in, self.number)
        if self.failure:
            return False
        why = f"signal {-code}" if code < 0 else f"exit code {code}"
        if self.restarts:
            self.restarts -= 1
            console.print(f"      extraction worker {self.number} ended early ({why}): started again", style="yellow")
            self.process = self._start()
            return True
        self.failure = RedraftError(
            "an extraction worker ended early",
            where=f"worker {self.number}",
            why=f"{why}, and it was started again as often as capture.restarts allows",
            mend="run the same command again: what is published is kept",
        )
        return False

    def end(self) -> None:
        """End it, if it still runs: its input closes, then it is killed."""
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def extract_in_processes(run: Run, work: Work, advance: Advance) -> Extracted:
    """Extract by `capture.processes` workers, each with its share of the GPUs, and wait for them."""
    capture = run.config.capture
    slices = gpu_slices(capture.processes, capture.sglang.tp if capture.backend == "sglang" else 1)
    watch = _Watch(run.store, advance)
    with _task_file(run, work) as task, tempfile.TemporaryDirectory(prefix="redraft-") as told_in:
        children = [_Child(n, task, told_in, gpus, capture.restarts) for n, gpus in enumerate(slices)]
        try:
            while any([child.running() for child in children]):  # a list: each is looked at
                watch.look()
                time.sleep(0.2)
        finally:
            for child in children:
                child.end()
    watch.look()
    failure = next((child.failure for child in children if child.failure), None)

    def rest() -> Any:
        raise failure or RedraftError(
            "extraction workers left work undone", mend="run the same command again", page="multi_node"
        )

    rows, orders = prepared_rows(run)
    done = _extract(run, work, rows, orders, rest, None)  # nothing is left to capture, or the workers' failure is told
    return Extracted(watch.records, watch.tokens, done.found_done - watch.records, done.complete, done.others)


class _Watch:
    """Tells of shards that appear in a store, and counts what they hold; those there at first are told, not counted."""

    def __init__(self, store: Any, advance: Advance) -> None:
        self.store, self.advance, self.records, self.tokens = store, advance, 0, 0
        self.seen: set[str] = set()
        self.look()
        self.records = self.tokens = 0

    def look(self) -> None:
        """Read the sidecars that are new."""
        for path in list_files(self.store, "shard-*.json"):
            if path.name not in self.seen:
                self.seen.add(path.name)
                shard = Shard.read(path)
                self.records += len(shard.records)
                self.tokens += shard.tokens
                self.advance(shard.tokens)


@contextmanager
def _task_file(run: Run, work: Work) -> Iterator[Path]:
    """What the workers are told, in a file of this process."""
    path = run.run_dir / "extract" / f"{socket.gethostname()}-{os.getpid()}.json"
    part = None if work.part is None else {"name": work.part.name, "wanted": sorted(work.part.wanted.items())}
    told = {"config": asdict(run.config), "run_dir": str(run.run_dir), "manifest": work.manifest.to_dict()}
    write_json(path, {**told, "part": part})
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
