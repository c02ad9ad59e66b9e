"""Write a store: any number of writers, each with shards of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from data_prep.capture.sample import CapturedSample
from data_prep.store.lock import FileLock, LockHeldError, waiting_lock
from data_prep.store.manifest import StoreManifest
from data_prep.store.reader import check_own
from data_prep.store.seal import break_seal, write_seal
from data_prep.store.shard import Entry, Shard, write_shard
from eagle3.checked_json import with_checksum
from eagle3.errors import DataError, RedraftError
from eagle3.place import Place, create
from eagle3.shard_file import check_shards, find_shards

SHARD_NAME = re.compile(r"shard-(?P<worker>.+)-(?P<number>\d{5,})\.json")


def check_sample(sample: CapturedSample, manifest: StoreManifest, twice: bool = False) -> None:
    """Refuse a sample that does not hold what the manifest says; `twice`: its id was added before.

    Raises:
        DataError: naming the record and what is wrong with it.
    """
    problem = ""
    shape = (sample.tokens, manifest.wiring.hidden_size)
    names = [*(site.name for site in manifest.wiring.stored_sites), "final"]
    states = {**sample.sites, "final": sample.final}
    if twice:
        problem = "a record of this id is in the store already"
    elif sorted(states) != sorted(names):
        problem = f"it holds {', '.join(states)}; the store holds {', '.join(names)}"
    elif sample.teacher != manifest.wiring.teacher:
        problem = f"its teacher is {sample.teacher}; the store's is {manifest.wiring.teacher}"
    elif sample.loss_mask.shape != sample.input_ids.shape:
        problem = f"mask of shape {tuple(sample.loss_mask.shape)} for {sample.tokens} tokens"
    for name, state in states.items():
        if tuple(state.shape) != shape or state.dtype != getattr(torch, manifest.dtype):
            problem = problem or f"{name} is {tuple(state.shape)} {state.dtype}; expected {shape} {manifest.dtype}"
    if problem:
        raise DataError(
            "a sample does not fit the store",
            where=f"record {sample.record_id}",
            why=problem,
            mend="capture with the store's wiring and dtype, each record once",
        )


def cannot_write(store: Place, err: OSError) -> RedraftError:
    """The line for a full disk or a folder that cannot be written."""
    return RedraftError(
        "cannot write the store",
        where=str(err.filename or store),
        why=err.strerror or str(err),
        mend="free or add disk space (or correct store's folder) and run again: finished shards are kept",
    )


def join_store(store: Place, manifest: StoreManifest) -> None:
    """Make the store, or join it: the first of any number of writers makes its manifest, the others compare theirs.

    Raises:
        WiringError, RedraftError: the store exists with another identity.
    """
    told = with_checksum(manifest.to_dict())
    create(store / "manifest.json", json.dumps(told, indent=2, ensure_ascii=False) + "\n")
    manifest.check_same(StoreManifest.read(store), where=str(store))


class StoreWriter:
    """Appends samples to shards that only this worker writes.

    A shard is closed once it holds `shard_tokens` tokens and is written behind the caller's back, one at a time,
    while the next is filled: two shards' worth of memory at most. What is not yet written when the process dies is
    lost, and nothing else.

    Args:
        path: the store's folder, a local one; made when absent.
        manifest: the store's identity; an existing store must have the same.
        shard_tokens: tokens after which a shard is closed.
        worker: this writer's name, one living writer a name.

    Raises:
        WiringError, RedraftError: the store exists with another identity, or another process writes as `worker`.
        IntegrityError: a finished shard is truncated.
    """

    def __init__(self, path: Place, manifest: StoreManifest, shard_tokens: int, worker: str = "0") -> None:
        if not isinstance(path, Path):
            raise RedraftError(
                "this writer can write only into a local folder",
                where=str(path),
                why="it holds a lock, which other kinds of file system have not",
                mend="write into a local folder and copy it",
            )
        self.path, self.manifest, self.shard_tokens, self.worker = path, manifest, shard_tokens, worker
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", worker):
            raise RedraftError("bad worker name", why=f"found {worker!r}", mend="use letters, digits and . _ -")
        self.sites = [site.name for site in manifest.wiring.stored_sites]
        self._buffer: list[CapturedSample] = []
        self._buffered = 0  # tokens
        self._pending: Future[Shard] | None = None
        self._lock = self._take_lock()
        try:
            join_store(self.path, manifest)
            self._remove_leftovers()
            shards = find_shards(self.path)
            check_own(shards, manifest)
            check_shards(shards)
        except BaseException:
            self._lock.release()
            raise
        self._done: dict[str, Entry] = {entry.id: entry for shard in shards for entry in shard.records}
        self._ids = set(self._done)  # and everything appended since, written or not
        self._next = 1 + max((self._number(shard) for shard in shards), default=-1)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shard-writer")

    def _take_lock(self) -> FileLock:
        try:
            return FileLock(self.path / "locks" / f"{self.worker}.lock")
        except LockHeldError:
            raise RedraftError(
                "another process is writing this store under the same worker name",
                where=str(self.path),
                why=f"worker {self.worker!r} is alive",
                mend="wait for it to end, stop it, or give this one another worker name",
            ) from None
        except OSError as err:
            raise cannot_write(self.path, err) from err

    def _remove_leftovers(self) -> None:
        """Unfinished shards of a dead process of this name; holding the lock proves that it is dead."""
        for path in [
            *self.path.glob(f".shard-{self.worker}-*.tmp"),
            *self.path.glob(f"shard-{self.worker}-*.safetensors"),
        ]:
            sidecar = self.path / (path.name.removeprefix(".").split(".safetensors")[0].split(".json")[0] + ".json")
            match = SHARD_NAME.fullmatch(sidecar.name)
            if match and match["worker"] == self.worker and (path.suffix == ".tmp" or not sidecar.exists()):
                path.unlink(missing_ok=True)

    def _number(self, shard: Shard) -> int:
        match = SHARD_NAME.fullmatch(shard.path.name)
        return int(match["number"]) if match and match["worker"] == self.worker else -1

    def done_ids(self) -> set[str]:
        """Ids of the records in finished shards, of all workers, plus what this writer wrote since."""
        return set(self._done)

    def done(self) -> dict[str, Entry]:
        """The same records with their lengths and checksums."""
        return dict(self._done)

    def append(self, sample: CapturedSample) -> None:
        """Add a sample; it is on disk once its shard is full or `flush` returned.

        Raises:
            DataError: the sample does not hold what the manifest says, or its id was added before.
            RedraftError: an earlier shard could not be written.
        """
        check_sample(sample, self.manifest, twice=sample.record_id in self._ids)
        self._ids.add(sample.record_id)
        self._buffer.append(sample)
        self._buffered += sample.tokens
        if self._buffered >= self.shard_tokens:
            self._submit()

    def flush(self) -> None:
        """Write what is buffered as a shard and wait until it is on disk.

        Raises:
            RedraftError: the disk is full or the file cannot be written; earlier shards are kept.
        """
        if self._buffer:
            self._submit()
        self._settle()

    def _submit(self) -> None:
        self._settle()
        samples, self._buffer, self._buffered = self._buffer, [], 0
        path = self.path / f"shard-{self.worker}-{self._next:05d}.json"
        self._next += 1
        self._pending = self._pool.submit(self._write, path, samples)

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._done.update({entry.id: entry for entry in pending.result().records})

    def _write(self, path: Path, samples: Sequence[CapturedSample]) -> Shard:
        try:
            break_seal(self.path)
            manifest = self.manifest
            return write_shard(path, samples, self.sites, manifest.dtype, manifest.codec, manifest.key)
        except OSError as err:
            raise cannot_write(self.path, err) from err

    def finalize(self, expected: Collection[str] | None = None) -> bool:
        """Flush, and seal the store if it holds every `expected` record (None: whatever it holds).

        With several workers each calls this; the last to finish finds everything there and seals.

        Returns:
            Whether the store is sealed.
        """
        self.flush()
        shards = find_shards(self.path)
        held = {entry.id for shard in shards for entry in shard.records}
        if expected is not None and not held.issuperset(expected):
            return False
        with waiting_lock(self.path / "locks" / "store"):
            write_seal(self.path, shards)
        return True

    def close(self) -> None:
        """Let a write in progress end and release the worker's name. What is only buffered is dropped."""
        self._pool.shutdown(wait=True)
        self._lock.release()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
