"""Read a few records of a hidden-state store, finished or not, by its documented format (docs/formats.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.checked_json import read_checked
from eagle3.errors import DataError, IntegrityError
from eagle3.place import Place, store_place
from eagle3.shard_file import Shard, ShardFile, find_shards
from eagle3.state_codec import CODECS, ROUNDING
from eagle3.wiring import Wiring

FORMAT, VERSIONS = "redraft-store", (1, 2)


@dataclass(frozen=True)
class StoredRecord:
    """One conversation of a store.

    Args:
        record_id: its name.
        input_ids: [T] int64.
        loss_mask: [T] bool, unshifted.
        states: name in the store -> [T, H], decoded; the teacher is named `final` whatever it is.
    """

    record_id: str
    input_ids: Tensor
    loss_mask: Tensor
    states: dict[str, Tensor]


class StoreReader:
    """A store's manifest and its records.

    Args:
        path: the store's folder, or its URL; it may be unfinished.

    Raises:
        IntegrityError: there is no store of this version, or it holds no record.
        WiringError: its wiring is not readable.
    """

    def __init__(self, path: str | Place) -> None:
        self.path = store_place(path)
        where = str(self.path / "manifest.json")
        self.manifest: dict[str, Any] = read_checked(self.path / "manifest.json", mend="give the folder of a store")
        kind = (self.manifest.get("format"), self.manifest.get("version"))
        if kind[0] != FORMAT or kind[1] not in VERSIONS or "wiring" not in self.manifest:
            raise IntegrityError(
                "not a hidden-state store of this version",
                where=where,
                why=f"found format {kind[0]!r} version {kind[1]!r}",
                mend="give a store that this version wrote, or convert it first",
                page="formats",
            )
        self.wiring = Wiring.from_dict(self.manifest["wiring"])
        self._places = self._find()
        if not self._places:
            raise IntegrityError("the store holds no record", where=str(self.path), mend="run the extract stage")

    def __len__(self) -> int:
        return len(self._places)

    def spread(self, count: int, max_tokens: int, min_tokens: int = 1) -> Iterator[StoredRecord]:
        """Up to `count` records spread evenly over the store in id order, each cut to `max_tokens`.

        A causal target's states of a prefix do not depend on what follows, so a cut record is as good as a whole one.

        Raises:
            DataError: no record has `min_tokens`.
            IntegrityError: a shard cannot be read.
        """
        ids = sorted(key for key, (shard, place) in self._places.items() if shard.records[place].tokens >= min_tokens)
        if not ids:
            raise DataError(
                "no record of the store is long enough",
                where=str(self.path),
                why=f"none has {min_tokens} tokens",
                mend="give a store of longer conversations",
            )
        count = min(count, len(ids))
        for place in range(count):
            yield self._read(ids[place * len(ids) // count], max_tokens)

    def as_kept(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """States [T, H] float32 as this store would give them back, had it kept them.

        A codec that rounds to 8 bits leaves an error as large as the step between two layers may be. The same rounding
        of both sides takes it out of their comparison.
        """
        codec, dtype = self.manifest.get("codec", "raw"), self.manifest["dtype"]
        if codec not in ROUNDING:
            return dict(states)
        kind = getattr(torch, dtype)
        return {
            name: CODECS[codec].decode(CODECS[codec].encode(state.to(kind)), dtype, state.shape[1]).float()
            for name, state in states.items()
        }

    def _find(self) -> dict[str, tuple[Shard, int]]:
        """Record id -> its shard and its place there; of two copies the first counts."""
        places: dict[str, tuple[Shard, int]] = {}
        for shard in find_shards(self.path):
            for place, entry in enumerate(shard.records):
                places.setdefault(entry.id, (shard, place))
        return places

    def _read(self, record_id: str, max_tokens: int) -> StoredRecord:
        shard, place = self._places[record_id]
        file = ShardFile(shard)
        ids, mask, states = file.record(place, file.state_names)
        cut = {name: state[:max_tokens] for name, state in states.items()}
        return StoredRecord(record_id, ids[:max_tokens], mask[:max_tokens], cut)
