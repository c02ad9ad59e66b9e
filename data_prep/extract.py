"""Fill a store from prepared conversations: resumable at the record, on one process or many.

Batches are planned over *all* records, whatever the store holds already. A record is therefore captured in the same
company, and so with the same bits, whether the run was interrupted or not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data_prep.budget import TOKEN_BYTES, check_space, state_bytes_per_token
from data_prep.capture.sample import CapturedSample
from data_prep.store import StoreManifest, StoreWriter
from data_prep.store.shard import Entry, tokens_sha256
from eagle3.errors import DataError, RedraftError


class Capture(Protocol):
    """A capture backend: `data_prep.capture.hf.HFCapture` or another that gives the same samples."""

    def run(self, batch: Sequence[Any]) -> list[CapturedSample]:
        """Capture (record_id, input_ids, loss_mask) triples, in order."""
        ...


@dataclass(frozen=True)
class Extracted:
    """What an extraction did: records and tokens captured now, records found done, and whether the store is whole."""

    records: int
    tokens: int
    found_done: int
    complete: bool


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group record indices into batches of at most `batch_tokens` padded tokens, longest records first.

    Longest first, so that a lack of memory shows in the first minute. A record longer than `batch_tokens` makes a
    batch of its own.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def extract(
    prepared: Any,
    capture: Capture | Callable[[], Capture],
    store_path: Path,
    manifest: StoreManifest,
    batch_tokens: int,
    shard_tokens: int,
    advance: Callable[[int], None] | None = None,
    *,
    rank: int = 0,
    world: int = 1,
) -> Extracted:
    """Capture every prepared record that the store does not hold yet.

    Args:
        prepared: a `datasets.Dataset` with columns `record_id`, `input_ids`, `loss_mask`.
        capture: the backend, or a function that makes it; the function is called only if there is work.
        store_path: the store's folder, made when absent.
        manifest: the store's identity.
        batch_tokens: padded tokens a forward pass.
        shard_tokens: tokens a shard.
        advance: called with the tokens of each record that is done, found or captured.
        rank, world: this process and how many share the work; rank r takes every world-th batch and writes as
            worker r. The number may change between runs.

    Raises:
        DataError: record ids repeat, or the store holds other records or other tokens under these ids.
        RedraftError: the store has another identity, another process writes as this worker, the disk is full.
        IntegrityError: a finished shard of the store is damaged.
    """
    record_ids, lengths = _catalogue(prepared)
    advance = advance or (lambda _tokens: None)
    records = tokens = 0
    with StoreWriter(store_path, manifest, shard_tokens, worker=str(rank)) as writer:
        done = writer.done()
        _check_done(prepared, record_ids, done, where=str(store_path))
        mine = plan_batches(lengths, batch_tokens)[rank::world]
        todo = [i for batch in mine for i in batch if record_ids[i] not in done]
        per_token = state_bytes_per_token(manifest.wiring, 4 if manifest.dtype == "float32" else 2) + TOKEN_BYTES
        check_space(store_path, per_token * sum(lengths[i] for i in todo))
        backend = None
        try:
            for batch in mine:
                missing = {record_ids[i] for i in batch if record_ids[i] not in done}
                if missing:
                    backend = backend or (capture if hasattr(capture, "run") else capture())
                    for sample in backend.run(_read(prepared, batch)):
                        if sample.record_id in missing:
                            writer.append(sample)
                            records, tokens = records + 1, tokens + sample.tokens
                advance(sum(lengths[i] for i in batch))
        except BaseException:
            with contextlib.suppress(RedraftError):
                writer.flush()  # what was captured so far is worth keeping
            raise
        complete = writer.finalize(expected=record_ids)
    return Extracted(records, tokens, sum(len(batch) for batch in mine) - len(todo), complete)


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
