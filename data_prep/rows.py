"""The prepared records as extraction reads them: columns of Arrow, never lists of Python integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as compute
import torch

from data_prep.store.shard import Entry, tokens_sha256
from eagle3.errors import DataError

Row = tuple[str, torch.Tensor, torch.Tensor]  # record id, input_ids [T] int64, loss_mask [T] bool
COLUMNS = ["record_id", "input_ids", "loss_mask"]
BLOCK = 4096  # records read at a time


class Rows:
    """The records of a `datasets.Dataset` with columns `record_id`, `input_ids`, `loss_mask`.

    Raises:
        DataError: a record id stands twice, or there is no record.
    """

    def __init__(self, prepared: Any) -> None:
        self._columns = prepared.select_columns(COLUMNS).with_format("arrow")  # made once: it takes milliseconds
        self.record_ids: list[str] = []
        self.lengths: list[int] = []
        for block in prepared.select_columns(COLUMNS[:2]).with_format("arrow").iter(BLOCK):
            self.record_ids += map(str, block["record_id"].to_pylist())
            self.lengths += compute.list_value_length(block["input_ids"]).to_pylist()
        self._check()

    def __len__(self) -> int:
        return len(self.record_ids)

    def _check(self) -> None:
        if not self.record_ids:
            why, mend = "the prepared set is empty", "check data.sources"
            raise DataError("there is nothing to extract", why=why, mend=mend)
        seen: set[str] = set()
        for name in self.record_ids:
            if name in seen:
                mend = "give each conversation its own id"
                raise DataError("a record id stands twice", where=f"record {name}", mend=mend)
            seen.add(name)

    def read(self, indices: Sequence[int]) -> list[Row]:
        """These records, in this order."""
        table = self._columns[list(indices)]
        names = map(str, table["record_id"].to_pylist())
        return list(zip(names, _split(table["input_ids"], np.int64), _split(table["loss_mask"], bool), strict=True))

    def check_done(self, done: Mapping[str, Entry], where: str) -> None:
        """A record counts as done only if the store captured these very tokens under its id.

        Args:
            done: the store's records.
            where: the store, for the error.

        Raises:
            DataError: the store holds other records, or other tokens.
        """
        mend = "extract into another store folder, or delete this one to extract anew"
        strange = sorted(set(done) - set(self.record_ids))
        if strange:
            raise DataError(
                "the store holds records that the prepared data has not",
                where=where,
                why=f"{len(strange)} of them, first {strange[0]}",
                mend=mend,
            )
        found = [i for i, name in enumerate(self.record_ids) if name in done]
        for first in range(0, len(found), BLOCK):
            for name, ids, mask in self.read(found[first : first + BLOCK]):
                if done[name].tokens_sha256 != tokens_sha256(ids, mask):
                    raise DataError(
                        "the store holds other tokens than the prepared data",
                        where=f"{where}, record {name}",
                        why="it was captured from another version of this record",
                        mend=mend,
                    )


def _split(column: Any, kind: type) -> Sequence[torch.Tensor]:
    """The lists of an Arrow column as tensors, all in one piece of memory."""
    flat = torch.from_numpy(compute.list_flatten(column).to_numpy().astype(kind))
    return flat.split(compute.list_value_length(column).to_pylist())
