"""Training samples for the training loop: prepared records, their stored states, standardized by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from data_prep.prepare import load_prepared
from data_prep.standardize import TrainingSample, standardize
from data_prep.store import Store
from eagle3.errors import DataError, IntegrityError
from eagle3.target_weights import TargetWeights
from eagle3.wiring import EMBEDDING, Wiring


class StoreSource:
    """The samples of one split, in the prepared data's order.

    Args:
        store: an opened store whose wiring, target and tokenizer were checked.
        records: record id -> token ids the prepared data has now.
        wiring: what the draft is trained on.
        embedding: the target's `[V, H]` embedding, needed when the wiring names it.
        partial: the store holds some of the records only, as in rounds; the others cannot be read.

    Raises:
        DataError: a record is prepared but not in the store.
    """

    def __init__(
        self,
        store: Store,
        records: dict[str, list[int]],
        wiring: Wiring,
        embedding: torch.Tensor | None,
        partial: bool = False,
    ) -> None:
        positions = {record_id: index for index, record_id in enumerate(store.record_ids)}
        missing = [record_id for record_id in records if record_id not in positions]
        if missing and not partial:
            raise DataError(
                "prepared records have no hidden states",
                where=str(store.path),
                why=f"{len(missing)} of {len(records)} are missing, first {missing[0]!r}",
                mend="run the extract stage",
            )
        self.store, self.records, self.wiring, self.embedding = store, records, wiring, embedding
        self.record_ids = list(records)
        self.positions = [positions.get(record_id, -1) for record_id in self.record_ids]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def lengths(self) -> list[int]:
        """Rows of each sample: one fewer than its tokens."""
        return [len(self.records[record_id]) - 1 for record_id in self.record_ids]

    def get(self, index: int) -> TrainingSample:
        """Read and standardize one sample.

        Raises:
            DataError: the store does not hold it.
            IntegrityError: the stored tokens are not the prepared ones.
        """
        if self.positions[index] < 0:
            where = f"{self.store.path}, record {self.record_ids[index]!r}"
            raise DataError("a record's hidden states are not there", where=where, mend="run the extract stage")
        captured = self.store[self.positions[index]]
        expected = self.records[self.record_ids[index]]
        if captured.input_ids.tolist() != list(expected):
            raise IntegrityError(
                "the store holds another text under this record's name",
                where=f"{self.store.path}, record {captured.record_id!r}",
                why="its tokens are not the prepared ones",
                mend="delete the store, or set paths.store to a new folder, and run the extract stage",
            )
        return standardize(captured, self.wiring, self.embedding)


def open_source(
    split: str,
    *,
    prepared: str,
    store: str,
    target: str,
    wiring: dict[str, Any],
    identity: dict[str, Any],
    tokenizer_hash: str,
    accept_other_wiring: bool,
    partial: bool = False,
) -> StoreSource:
    """Open the samples of `split` ("train" or "val"); every argument is JSON-able, so that workers can call it."""
    wanted = Wiring.from_dict(wiring)
    opened = Store.open(
        store,
        wiring=wanted,
        target=identity,
        tokenizer_hash=tokenizer_hash,
        accept_other_wiring=accept_other_wiring,
        unfinished=partial,
    )
    rows = load_prepared(Path(prepared), split)
    records = dict(zip(rows["record_id"], rows["input_ids"], strict=True))
    embedding = TargetWeights(Path(target)).embedding() if EMBEDDING in wanted.aux else None
    return StoreSource(opened, records, wanted, embedding, partial)
