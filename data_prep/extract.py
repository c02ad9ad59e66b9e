"""Fill a store from prepared conversations: resumable at the record, by one worker or many at once.

The work is cut into units (`data_prep.units`), a function of the prepared set and the settings alone. Any number of
workers on any number of nodes run the same call on a shared file system; each claims a unit, captures it, publishes it
as a shard, and claims the next. A worker that dies leaves a claim that goes stale and is taken over; one that is only
slow loses to whoever published first. So no record is lost, and none is stored twice.

Batches are planned over *all* records, whatever the store holds already. A record is therefore captured in the same
company, and so with the same bits, whether the run was interrupted or not, and by however many workers.

The target never waits for what follows it, as long as that keeps up: a batch is begun before the one before is copied
out and checked (`Capture.begin`), and units are encoded and written by threads (`data_prep.behind`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from data_prep.behind import Behind
from data_prep.budget import check_space, state_bytes_per_token
from data_prep.capture.sample import CapturedSample
from data_prep.claims import Claims, Held, clear
from data_prep.rows import Row, Rows
from data_prep.store import StoreManifest
from data_prep.store.encoders import Encoders
from data_prep.store.shared import SharedStore
from data_prep.units import WINDOW_BATCHES, Unit, plan_key, plan_units, plan_wanted, plan_windows, window_tokens
from eagle3.place import Place

__all__ = ["Capture", "Extracted", "Part", "Sharing", "Writing", "begin", "extract"]

TOKEN_BYTES = 9  # id and mask of a token in memory
Finish = Callable[[], list[CapturedSample]]


class Capture(Protocol):
    """A capture backend: `data_prep.capture.hf.HFCapture` or another that gives the same samples.

    One that can have a batch under way while the one before is copied out has `begin(batch)` as well, which gives a
    function that waits for the batch and returns its samples. Of two batches begun, the first is finished first, and
    no third is begun before.
    """

    def run(self, batch: Sequence[Row]) -> list[CapturedSample]:
        """Capture (record_id, input_ids, loss_mask) triples, in order."""
        ...


def begin(backend: Any, batch: Sequence[Row]) -> Finish:
    """Begin a batch, or capture it at once where the backend knows no `begin`."""
    if hasattr(backend, "begin"):
        finish: Finish = backend.begin(batch)
        return finish
    samples = backend.run(batch)
    return lambda: samples


@dataclass(frozen=True)
class Writing:
    """How captured states are written while the next are captured.

    Args:
        threads: shards written at a time.
        ahead_mib: captured states that may wait to be written, in MiB; never less than two shards, of which one is
            filled while the other is written.
    """

    threads: int = 2
    ahead_mib: int = 4096

    @property
    def encoders(self) -> int:
        """Threads that encode for all shards: half of the cores, for the other half feeds the target."""
        return max(self.threads, min(16, (os.cpu_count() or 1) // 2))


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
    window_batches: int = WINDOW_BATCHES,
    orders: Sequence[Sequence[int]] | None = None,
    part: Part | None = None,
    sharing: Sharing | None = None,
    writing: Writing | None = None,
) -> Extracted:
    """Capture every prepared record that the store does not hold yet, sharing the work with whoever calls this too.

    Args:
        prepared: a `datasets.Dataset` with columns `record_id`, `input_ids`, `loss_mask`.
        capture: the backend, or a function that makes it; the function is called only if there is work.
        store_path: the store's folder, made when absent.
        manifest: the store's identity.
        batch_tokens: padded tokens a forward pass.
        shard_tokens: tokens a shard.
        advance: called with the tokens of records that are done, found or captured.
        window_batches: full batches among whose records those of like length are put together (`data_prep.units`).
        orders: the records' indices in the order of their use, in groups that share no batch; None = as they stand.
        part: capture only these records, and leave the store unsealed; None = all.
        sharing: where claims are and how long they hold.
        writing: threads and memory that writing may take.

    Raises:
        DataError: record ids repeat, or the store holds other records or other tokens under these ids.
        RedraftError: the store has another identity, the disk is full.
        IntegrityError: a finished shard of the store is damaged.
    """
    rows = Rows(prepared)
    width = window_tokens(batch_tokens, shard_tokens, window_batches)
    windows = [
        window
        for order in (orders if orders is not None else [range(len(rows))])
        for window in plan_windows(rows.lengths, order, batch_tokens, width)
    ]
    if part is None:
        units = plan_units(windows, rows.lengths, shard_tokens)
    else:
        units = plan_wanted(windows, rows.lengths, part.wanted, shard_tokens, f"{part.name}-u")
    sharing = sharing or Sharing()
    store = SharedStore(store_path, manifest)
    rows.check_done(store.done, where=str(store_path))
    folder = (sharing.claims or Path(str(store_path)) / "claims") / plan_key(units, rows.record_ids)
    worker = _Worker(rows, store, advance or (lambda _tokens: None))
    left = worker.drop_done(units)
    missing = sum(rows.lengths[i] for unit in left for i in unit.records if rows.record_ids[i] not in store.done)
    if isinstance(store_path, Path):
        check_space(store_path, manifest.token_bytes * missing)
    others: tuple[Held, ...] = ()
    if left:
        store.open_to_growth()
        others = worker.work(left, capture, folder, sharing, writing or Writing())
    complete = not others and (part is not None or store.finish(rows.record_ids))
    if complete:
        store.tidy()
        clear(folder)
    asked = sum(len(unit.records) for unit in units)
    return Extracted(worker.records, worker.tokens, asked - worker.records, complete, others)


@dataclass
class _Job:
    """A claimed unit on its way.

    Args:
        unit: the unit.
        place: the ids of its records that the store lacks -> the shards they go to.
        samples: shard -> what is captured so far.
        left: batches not captured yet.
        size: bytes reserved for it.
    """

    unit: Unit
    place: dict[str, str]
    samples: dict[str, list[CapturedSample]]
    left: int
    size: int = 0


class _Worker:
    """One worker's share: batch after batch is captured, unit after unit handed to the writers."""

    def __init__(self, rows: Rows, store: SharedStore, advance: Callable[[int], None]) -> None:
        self.rows, self.store, self.advance = rows, store, advance
        self.records = self.tokens = 0
        self._guard = threading.Lock()
        wiring, dtype = store.manifest.wiring, getattr(torch, store.manifest.dtype)
        self.token_bytes = state_bytes_per_token(wiring, dtype.itemsize) + TOKEN_BYTES
        self._told: set[int] = set()  # records that `advance` was told of

    def drop_done(self, units: Sequence[Unit]) -> list[Unit]:
        """The units that are not all in the store; whatever is there is told to `advance`."""
        left = []
        for unit in units:
            self._tell(i for i in unit.records if not self._lacks(i))
            if any(map(self._lacks, unit.records)):
                left.append(unit)
        return left

    def work(
        self,
        units: list[Unit],
        capture: Capture | Callable[[], Capture],
        folder: Path,
        sharing: Sharing,
        writing: Writing,
    ) -> tuple[Held, ...]:
        """Work until every unit is published, or only others' are left and `sharing` says to leave; who holds those."""
        shards = {unit.name: list(unit.shards) for unit in units}
        largest = max(sum(self.rows.lengths[i] for i in unit.records) for unit in units) * self.token_bytes
        limit = max(writing.ahead_mib << 20, 2 * largest)

        def dead(unit: str) -> None:
            self.store.sweep(shards[unit])

        with (
            Claims(folder, sharing.timeout_s, dead) as claims,
            Encoders(writing.encoders) as encoders,
            Behind(writing.threads, limit) as behind,
        ):
            flow = _Flow(capture, lambda job: self._hand_on(job, claims, behind, encoders))
            while True:
                busy = False
                for unit in units:
                    if self._finished(unit) or not claims.take(unit.name):
                        continue
                    if self._finished(unit):  # by an owner who published it before it gave it up
                        claims.release(unit.name)
                        continue
                    busy = True
                    self._capture(unit, flow, behind)
                flow.end()
                behind.settle()
                units = self.drop_done(units)
                if not units or (not busy and not sharing.wait):
                    return tuple(claims.others()) if units else ()
                if not busy:
                    time.sleep(sharing.poll_s)

    def _lacks(self, index: int) -> bool:
        return self.rows.record_ids[index] not in self.store.done

    def _finished(self, unit: Unit) -> bool:
        """Whether the store holds all of a unit, as far as its shards' names tell."""
        self.store.refresh(unit.shards)
        return not any(map(self._lacks, unit.records))

    def _capture(self, unit: Unit, flow: _Flow, behind: Behind) -> None:
        """Begin the unit's batches one after the other, but for those none of whose records is missing."""
        ids = self.rows.record_ids
        place = {ids[i]: name for name, members in unit.shards.items() for i in members if self._lacks(i)}
        batches = [batch for batch in unit.batches if any(ids[i] in place for i in batch)]
        job = _Job(unit, place, {name: [] for name in unit.shards}, len(batches))
        for batch in batches:
            wanted = [i for i in batch if ids[i] in place]
            size = sum(self.rows.lengths[i] for i in wanted) * self.token_bytes
            behind.reserve(size)
            job.size += size
            flow.push(job, self.rows.read(batch))
            self._tell(wanted)

    def _hand_on(self, job: _Job, claims: Claims, behind: Behind, encoders: Encoders) -> None:
        behind.start(lambda: self._publish(job, claims, encoders), job.size)

    def _publish(self, job: _Job, claims: Claims, encoders: Encoders) -> None:
        for name in list(job.samples):
            held = job.samples.pop(name)
            if held:
                self.store.publish(name, held, encoders)
                self._count(len(held), sum(sample.tokens for sample in held))
        claims.release(job.unit.name)

    def _count(self, records: int, tokens: int) -> None:
        with self._guard:
            self.records += records
            self.tokens += tokens

    def _tell(self, indices: Iterable[int]) -> None:
        fresh = [i for i in indices if i not in self._told]
        self._told.update(fresh)
        if fresh:
            self.advance(sum(self.rows.lengths[i] for i in fresh))


class _Flow:
    """Batches on their way through the backend: one is under way while the samples of the one before are taken.

    Args:
        capture: the backend, or what makes it, which is called at the first batch.
        hand_on: called with a job whose last batch is captured.
    """

    def __init__(self, capture: Capture | Callable[[], Capture], hand_on: Callable[[_Job], None]) -> None:
        self._make: Any = (lambda: capture) if hasattr(capture, "run") else capture
        self._backend: Any = None
        self._hand_on = hand_on
        self._under_way: tuple[_Job, int, Finish] | None = None

    def push(self, job: _Job, batch: list[Row]) -> None:
        """Begin a batch of `job`, then finish the one before."""
        self._backend = self._backend or self._make()
        try:
            finish = begin(self._backend, batch)
        except BaseException:
            self.end()  # what was captured before a failure is kept
            raise
        before, self._under_way = self._under_way, (job, len(batch), finish)
        self._finish(before)

    def end(self) -> None:
        """Finish what is under way."""
        before, self._under_way = self._under_way, None
        self._finish(before)

    def _finish(self, under_way: tuple[_Job, int, Finish] | None) -> None:
        if under_way is None:
            return
        job, size, finish = under_way
        wanted = [sample for sample in finish() if sample.record_id in job.place]
        for sample in wanted:
            job.samples[job.place[sample.record_id]].append(sample if len(wanted) == size else sample.alone())
        job.left -= 1
        if not job.left:
            self._hand_on(job)
