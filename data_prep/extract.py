"""Fill a store from prepared conversations: resumable at the record, by one worker or many at once.

The work is cut into units (`data_prep.units`), a function of the prepared set and the settings alone. Any number of
workers on any number of nodes run the same call on a shared file system; each claims a unit, captures it, publishes it
as a shard, and claims the next. A worker that dies leaves a claim that goes stale and is taken over; one that is only
slow loses to whoever published first. So no record is lost, and none is stored twice.

Batches are planned over *all* records, whatever the store holds already. A record is therefore captured in the same
company, and so with the same bits, whether the run was interrupted or not, and by however many workers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data_prep.budget import check_space
from data_prep.capture.sample import CapturedSample
from data_prep.claims import Claims, Held, clear
from data_prep.store import StoreManifest
from data_prep.store.shard import Entry, tokens_sha256
from data_prep.store.shared import SharedStore
from data_prep.units import Unit, plan_batches, plan_key, plan_units, plan_wanted, plan_windows
from eagle3.errors import DataError, RedraftError
from eagle3.place import Place

__all__ = ["Capture", "Extracted", "Part", "Sharing", "extract", "plan_batches"]


class Capture(Protocol):
    """A capture backend: `data_prep.capture.hf.HFCapture` or another that gives the same samples."""

    def run(self, batch: Sequence[Any]) -> list[CapturedSample]:
        """Capture (record_id, input_ids, loss_mask) triples, in order."""
        ...


@dataclass(frozen=True)
class Sharing:
    """How workers share an extraction.

    Args:
        claims: folder of claims, on a POSIX file system that all workers see; None = `claims` in the store.
        timeout_s: seconds without a sign of life after which a claim is stale.
        wait: when only units of other workers are left, wait for them (and take over what goes stale), or leave.
        poll_s: seconds between looks at what others do.
    """

    claims: Path | None = None
    timeout_s: float = 300.0
    wait: bool = True
    poll_s: float = 2.0


@dataclass(frozen=True)
class Part:
    """A part of the records, for a store that is filled and freed in rounds.

    Args:
        name: of the part; its units are named after it.
        wanted: record index -> class; records of one class share shards, so that they can be freed together.
    """

    name: str
    wanted: Mapping[int, int]


@dataclass(frozen=True)
class Extracted:
    """What a worker did: records and tokens captured, records found done, whether everything asked for is there.

    `found_done` counts records that were there at first, or that others did meanwhile. When not everything is there,
    `others` says who holds what.
    """

    records: int
    tokens: int
    found_done: int
    complete: bool
    others: tuple[Held, ...] = field(default=())


def extract(
    prepared: Any,
    capture: Capture | Callable[[], Capture],
    store_path: Place,
    manifest: StoreManifest,
    batch_tokens: int,
    shard_tokens: int,
    advance: Callable[[int], None] | None = None,
    *,
    orders: Sequence[Sequence[int]] | None = None,
    part: Part | None = None,
    sharing: Sharing | None = None,
) -> Extracted:
    """Capture every prepared record that the store does not hold yet, sharing the work with whoever calls this too.

    Args:
        prepared: a `datasets.Dataset` with columns `record_id`, `input_ids`, `loss_mask`.
        capture: the backend, or a function that makes it; the function is called only if there is work.
        store_path: the store's folder, made when absent.
        manifest: the store's identity.
        batch_tokens: padded tokens a forward pass.
        shard_tokens: tokens a shard, which is also what a worker's death can cost.
        advance: called with the tokens of records that are done, found or captured.
        orders: the records' indices in the order of their use, in groups that share no batch; None = as they stand.
        part: capture only these records, and leave the store unsealed; None = all.
        sharing: where claims are and how long they hold.

    Raises:
        DataError: record ids repeat, or the store holds other records or other tokens under these ids.
        RedraftError: the store has another identity, the disk is full.
        IntegrityError: a finished shard of the store is damaged.
    """
    record_ids, lengths = _catalogue(prepared)
    windows = [
        window
        for order in (orders if orders is not None else [range(len(lengths))])
        for window in plan_windows(lengths, order, batch_tokens, shard_tokens)
    ]
    if part is None:
        units = plan_units(windows)
    else:
        units = plan_wanted(windows, lengths, part.wanted, shard_tokens, f"{part.name}-u")
    sharing = sharing or Sharing()
    store = SharedStore(store_path, manifest)
    _check_done(prepared, record_ids, store.done, where=str(store_path))
    folder = (sharing.claims or Path(str(store_path)) / "claims") / plan_key(units, record_ids)
    worker = _Worker(prepared, record_ids, lengths, store, advance or (lambda _tokens: None))
    left = worker.drop_done(units)
    missing = sum(lengths[i] for unit in left for i in unit.records if record_ids[i] not in store.done)
    if isinstance(store_path, Path):
        check_space(store_path, manifest.token_bytes * missing)
    others: tuple[Held, ...] = ()
    if left:
        store.open_to_growth()
        others = worker.work(left, capture, folder, sharing)
    complete = not others and (part is not None or store.finish(record_ids))
    if complete:
        store.tidy()
        clear(folder)
    asked = sum(len(unit.records) for unit in units)
    return Extracted(worker.records, worker.tokens, asked - worker.records, complete, others)


class _Worker:
    """One worker's share: units captured one after the other, the last one written while the next is captured."""

    def __init__(
        self,
        prepared: Any,
        record_ids: Sequence[str],
        lengths: Sequence[int],
        store: SharedStore,
        advance: Callable[[int], None],
    ) -> None:
        self.prepared, self.record_ids, self.lengths, self.store = prepared, record_ids, lengths, store
        self.advance = advance
        self.records = self.tokens = 0
        self._told: set[int] = set()  # records that `advance` was told of

    def drop_done(self, units: Sequence[Unit]) -> list[Unit]:
        """The units that are not all in the store; whatever is there is told to `advance`."""
        left = []
        for unit in units:
            self._tell(i for i in unit.records if self.record_ids[i] in self.store.done)
            if any(self.record_ids[i] not in self.store.done for i in unit.records):
                left.append(unit)
        return left

    def work(
        self, units: list[Unit], capture: Capture | Callable[[], Capture], folder: Path, sharing: Sharing
    ) -> tuple[Held, ...]:
        """Work until every unit is published, or only others' are left and `sharing` says to leave; who holds those."""
        shards = {unit.name: list(unit.shards) for unit in units}
        make = (lambda: capture) if hasattr(capture, "run") else capture
        backend: Any = None

        def dead(unit: str) -> None:
            self.store.sweep(shards[unit])

        with Claims(folder, sharing.timeout_s, dead) as claims, _Behind() as behind:
            while True:
                busy = False
                for unit in units:
                    if self._finished(unit) or not claims.take(unit.name):
                        continue
                    if self._finished(unit):  # by an owner who published it before it gave it up
                        claims.release(unit.name)
                        continue
                    backend, busy = backend or make(), True
                    samples = self._capture(unit, backend)
                    behind.settle()
                    behind.start(lambda unit=unit, samples=samples: self._publish(unit, samples, claims))  # type: ignore[misc]
                behind.settle()
                units = self.drop_done(units)
                if not units or (not busy and not sharing.wait):
                    return tuple(claims.others()) if units else ()
                if not busy:
                    time.sleep(sharing.poll_s)

    def _finished(self, unit: Unit) -> bool:
        """Whether the store holds all of a unit, as far as its shards' names tell."""
        self.store.refresh(unit.shards)
        return all(self.record_ids[i] in self.store.done for i in unit.records)

    def _capture(self, unit: Unit, backend: Capture) -> dict[str, list[CapturedSample]]:
        """Shard name -> its samples; batches none of whose records is missing are not run."""
        place = {i: name for name, members in unit.shards.items() for i in members}
        missing = {self.record_ids[i]: i for i in place if self.record_ids[i] not in self.store.done}
        samples: dict[str, list[CapturedSample]] = {name: [] for name in unit.shards}
        for batch in unit.batches:
            if not any(self.record_ids[i] in missing for i in batch):
                continue
            for sample in backend.run(_read(self.prepared, list(batch))):
                index = missing.get(sample.record_id)
                if index is not None:
                    samples[place[index]].append(sample)
            self._tell(i for i in batch if self.record_ids[i] in missing)
        return {name: held for name, held in samples.items() if held}

    def _publish(self, unit: Unit, samples: Mapping[str, Sequence[CapturedSample]], claims: Claims) -> None:
        for name, held in samples.items():
            self.store.publish(name, held)
            self.records += len(held)
            self.tokens += sum(sample.tokens for sample in held)
        claims.release(unit.name)

    def _tell(self, indices: Iterator[int]) -> None:
        fresh = [i for i in indices if i not in self._told]
        self._told.update(fresh)
        if fresh:
            self.advance(sum(self.lengths[i] for i in fresh))


class _Behind:
    """One piece of work behind the caller's back; leaving the block waits for it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shard-writer")
        self._pending: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin; the work before must be settled."""
        self._pending = self._pool.submit(work)

    def settle(self) -> None:
        """Wait for the work; its exception is raised here."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> _Behind:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RedraftError):
            self.settle()
        self._pool.shutdown(wait=True)


def _catalogue(prepared: Any) -> tuple[list[str], list[int]]:
    """Record ids and lengths, without turning the tokens into Python lists."""
    record_ids: list[str] = []
    lengths: list[int] = []
    for block in prepared.select_columns(["record_id", "input_ids"]).with_format("arrow").iter(4096):
        record_ids += block["record_id"].to_pylist()
        lengths += [len(ids) for ids in block["input_ids"]]
    if len(set(record_ids)) != len(record_ids):
        seen: set[str] = set()
        double = next(r for r in record_ids if r in seen or seen.add(r))  # type: ignore[func-returns-value]
        raise DataError("a record id stands twice", where=f"record {double}", mend="give each conversation its own id")
    if not record_ids:
        raise DataError("there is nothing to extract", why="the prepared set is empty", mend="check data.sources")
    return record_ids, lengths


def _read(prepared: Any, batch: list[int]) -> list[tuple[str, list[int], list[int]]]:
    rows = prepared[batch]
    return list(zip(rows["record_id"], rows["input_ids"], rows["loss_mask"], strict=True))


def _check_done(prepared: Any, record_ids: list[str], done: dict[str, Entry], where: str) -> None:
    """A record counts as done only if the store captured these very tokens under its id."""
    if not done:
        return
    mend = "extract into another store folder, or delete this one to extract anew"
    strange = sorted(set(done) - set(record_ids))
    if strange:
        raise DataError(
            "the store holds records that the prepared data has not",
            where=where,
            why=f"{len(strange)} of them, first {strange[0]}",
            mend=mend,
        )
    columns = prepared.select_columns(["record_id", "input_ids", "loss_mask"]).with_format("numpy")
    for block in columns.iter(512):
        for record_id, ids, mask in zip(block["record_id"], block["input_ids"], block["loss_mask"], strict=True):
            entry = done.get(str(record_id))
            if entry and entry.tokens_sha256 != tokens_sha256(np.asarray(ids), np.asarray(mask)):
                raise DataError(
                    "the store holds other tokens than the prepared data",
                    where=f"{where}, record {record_id}",
                    why="it was captured from another version of this record",
                    mend=mend,
                )
