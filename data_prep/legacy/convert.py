"""Write a diagnosed set into a store, record by record, and compute the teacher's state where it is missing.

Wherever the target runs, its aux states are computed along with the missing one and compared with the set's: states
that do not agree are of another target, another text or another site, and their record is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from data_prep.budget import check_space
from data_prep.capture.finite import all_finite
from data_prep.capture.hf import HFCapture
from data_prep.capture.sample import CapturedSample
from data_prep.legacy.formats import LegacyFile, LegacyRecord
from data_prep.legacy.plan import Plan
from data_prep.store import StoreManifest, StoreWriter
from eagle3.errors import DataError, IntegrityError, RedraftError, WiringError
from eagle3.site_match import MAX_ERROR, MIN_COSINE, match_slots

BAD = (DataError, IntegrityError, WiringError)


@dataclass
class Converted:
    """What a conversion did.

    Args:
        records, tokens: written now.
        found_done: records that the store held already.
        bad: one line for each file left out.
        last_masked: records whose last token is not to be learnt.
        complete: the store is sealed.
    """

    records: int = 0
    tokens: int = 0
    found_done: int = 0
    bad: list[str] = field(default_factory=list)
    last_masked: int = 0
    complete: bool = False


class Converter:
    """Converts the files of one set.

    Args:
        plan: which slot goes where.
        read: reads a file.
        embedding: the target's [V, H]; where the set holds the embedding, every record's is checked against it.
        capture: runs the target for `plan.wiring`; needed when the plan needs it, and when every record is verified.
        batch_tokens: padded tokens a run of the target.
        skip_bad: leave out files that are unreadable or refused, and go on.
    """

    def __init__(
        self,
        plan: Plan,
        read: Callable[[LegacyFile], LegacyRecord],
        embedding: Tensor,
        capture: HFCapture | None,
        batch_tokens: int = 4096,
        skip_bad: bool = False,
    ) -> None:
        if plan.needs_target and capture is None:
            raise ValueError("the plan needs the target")
        self.plan, self.read, self.embedding, self.capture = plan, read, embedding, capture
        self.batch_tokens, self.skip_bad = batch_tokens, skip_bad

    def run(
        self,
        files: Sequence[LegacyFile],
        slots: int,
        store: Path,
        manifest: StoreManifest,
        shard_tokens: int = 16384,
        advance: Callable[[int], None] | None = None,
    ) -> Converted:
        """Convert every file whose record the store does not hold yet.

        Args:
            files: the set.
            slots: slots of each file, as diagnosed.
            store: the store's folder, made when absent.
            manifest: its identity.
            shard_tokens: tokens a shard.
            advance: called with 1 after each file.

        Raises:
            DataError, IntegrityError, WiringError: a bad file, unless `skip_bad`; what was converted before is kept.
            RedraftError: the store has another identity, or the disk is full.
        """
        done = Converted()
        self.dtype = getattr(torch, manifest.dtype)
        advance = advance or (lambda _n: None)
        with StoreWriter(store, manifest, shard_tokens) as writer:
            held = writer.done_ids()
            todo = [file for file in files if file.record_id not in held]
            done.found_done = len(files) - len(todo)
            advance(done.found_done)
            check_space(store, self._bytes_needed(todo, slots))
            try:
                for batch in self._batches(todo, slots, done, advance):
                    for sample in self._samples(batch, done):
                        writer.append(sample)
                        done.records, done.tokens = done.records + 1, done.tokens + sample.tokens
                        done.last_masked += not bool(sample.loss_mask[-1])
                    advance(len(batch))
            except BaseException:
                with contextlib.suppress(RedraftError):
                    writer.flush()  # what was converted so far is worth keeping
                raise
            if not done.records and not done.found_done:
                raise DataError("nothing could be converted", why=done.bad[0], mend="see the other lines")
            done.complete = writer.finalize()
        return done

    def _bytes_needed(self, files: Sequence[LegacyFile], slots: int) -> int:
        """From the files' sizes: of `slots` tensors the wiring's sites and the teacher are kept or added."""
        kept = len(self.plan.slots) + 1
        return int(sum(file.path.stat().st_size for file in files) * kept / slots)

    def _batches(
        self, files: Sequence[LegacyFile], slots: int, done: Converted, advance: Callable[[int], None]
    ) -> Iterator[list[LegacyRecord]]:
        """Checked records, grouped in the set's order by padded tokens; one at a time where no target runs."""
        batch: list[LegacyRecord] = []
        longest = 0
        for file in files:
            try:
                record = self.read(file)
                self._check(record, slots)
            except BAD as err:
                if batch:
                    yield batch  # what is sound so far is kept, should this error end the run
                batch, longest = [], 0
                self._refuse(err, done)
                advance(1)
                continue
            longest = max(longest, len(record.input_ids))
            if batch and (len(batch) + 1) * longest > self.batch_tokens:
                yield batch
                batch, longest = [], len(record.input_ids)
            batch.append(record)
            if self.capture is None:
                yield batch
                batch, longest = [], 0
        if batch:
            yield batch

    def _refuse(self, err: RedraftError, done: Converted) -> None:
        if not self.skip_bad:
            mend = f"{err.mend}; or --skip-bad to go on without such files".removeprefix("; or ")
            mend = mend if "--skip-bad" not in err.mend else err.mend
            raise type(err)(err.what, where=err.where, why=err.why, mend=mend) from None
        done.bad.append(str(err))

    def _check(self, record: LegacyRecord, slots: int) -> None:
        where = str(record.path)
        if len(record.slots) != slots:
            why = f"{len(record.slots)} slots, the set has {slots}"
            raise WiringError("a file of another kind", where=where, why=why, mend="keep each extraction apart")
        if record.loss_mask is None:
            mend = "give --rows the dataset that the samples were made from"
            raise DataError("a sample without a loss mask", where=where, mend=mend)
        if int(record.input_ids.min()) < 0 or int(record.input_ids.max()) >= len(self.embedding):
            why = f"ids up to {int(record.input_ids.max())}; the target has {len(self.embedding)}"
            raise DataError("tokens outside the target's vocabulary", where=where, why=why, mend="name its own target")
        if self.plan.embedding_slot is not None:
            slot = record.slots[self.plan.embedding_slot]
            self._compare(record, slot.label, slot.state, "embedding", self.embedding[record.input_ids])

    def _compare(self, record: LegacyRecord, label: str, state: Tensor, site: str, expected: Tensor) -> None:
        """Refuse a record whose state is not what the target has at that site."""
        (match,) = match_slots(state, {site: expected}, expected.shape[1])
        if match.cosine > MIN_COSINE and match.error < MAX_ERROR:
            return
        raise WiringError(
            "a sample's states are not this target's",
            where=str(record.path),
            why=f"its {label} against the target's {site}: cosine {match.cosine:.5f}, error {match.error:.4f}",
            mend="extract this conversation anew, or find the target and the text that the file was made from",
        )

    def _samples(self, batch: list[LegacyRecord], done: Converted) -> Iterator[CapturedSample]:
        computed: list[CapturedSample | None] = [None] * len(batch)
        if self.capture is not None:
            computed = list(self.capture.run([(r.record_id, r.input_ids, r.loss_mask) for r in batch]))  # type: ignore[misc]
        for record, now in zip(batch, computed, strict=True):
            try:
                yield self._sample(record, now)
            except BAD as err:
                self._refuse(err, done)

    def _sample(self, record: LegacyRecord, now: CapturedSample | None) -> CapturedSample:
        sites = {name: record.slots[slot].state for name, slot in self.plan.slots.items()}
        if now is not None:
            for name, state in sites.items():
                self._compare(record, record.slots[self.plan.slots[name]].label, state, name, now.sites[name])
        if self.plan.teacher_slot is None:
            assert now is not None
            final = now.final
        else:
            slot = record.slots[self.plan.teacher_slot]
            final = slot.state
            if now is not None:
                self._compare(record, slot.label, final, self.plan.wiring.teacher, now.final)
        assert record.loss_mask is not None
        kept = {name: self._stored(record, name, state) for name, state in sites.items()}
        teacher = self._stored(record, self.plan.wiring.teacher, final)
        return CapturedSample(
            record.record_id, record.input_ids, record.loss_mask, kept, teacher, self.plan.wiring.teacher
        )

    def _stored(self, record: LegacyRecord, name: str, state: Tensor) -> Tensor:
        """A copy in the store's dtype, free of the file's memory."""
        out = state.to(self.dtype, copy=True).contiguous()
        if not all_finite(out):
            why = f"{name} does not fit into {self.dtype}"
            mend = "convert with --dtype bfloat16 or float32"
            raise DataError("states overflow the store's dtype", where=str(record.path), why=why, mend=mend)
        return out
