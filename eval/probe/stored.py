"""Read a few records of a hidden-state store, by its documented format (docs/formats.md).

The probe judges stores, so it reads the files as they are and does not go through the code that wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3.atomic import read_json
from eagle3.errors import DataError, IntegrityError
from eagle3.wiring import Wiring

FORMAT, VERSIONS = "redraft-store", (1, 2)
_NOT_STATES = ("input_ids", "loss_mask")


@dataclass(frozen=True)
class StoredRecord:
    """One conversation of a store.

    Args:
        record_id: its name.
        input_ids: [T] int64.
        loss_mask: [T] bool, unshifted.
        states: name in the store -> [T, H], as stored; the teacher is named `final` whatever it is.
    """

    record_id: str
    input_ids: Tensor
    loss_mask: Tensor
    states: dict[str, Tensor]


class StoreReader:
    """A store's manifest and its records.

    Args:
        path: the store's folder; it may be unfinished.

    Raises:
        IntegrityError: there is no store of this version, or it holds no record.
        WiringError: its wiring is not readable.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        where = str(self.path / "manifest.json")
        self.manifest: dict[str, Any] = read_json(self.path / "manifest.json", mend="give the folder of a store")
        kind = (self.manifest.get("format"), self.manifest.get("version"))
        if kind[0] != FORMAT or kind[1] not in VERSIONS or "wiring" not in self.manifest:
            raise IntegrityError(
                "not a hidden-state store of this version",
                where=where,
                why=f"found format {kind[0]!r} version {kind[1]!r}",
                mend="give a store that this version wrote, or convert it first",
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
        ids = sorted(key for key, (_, entry) in self._places.items() if entry["tokens"] >= min_tokens)
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

    def _find(self) -> dict[str, tuple[Path, dict[str, Any]]]:
        places: dict[str, tuple[Path, dict[str, Any]]] = {}
        for sidecar in sorted(self.path.glob("shard-*.json")):
            shard = read_json(sidecar, mend="run the extract stage again")
            data = sidecar.parent / shard.get("data_name", f"{sidecar.stem}.safetensors")
            for entry in shard["records"]:
                places.setdefault(entry["id"], (data, entry))
        return places

    def _read(self, record_id: str, max_tokens: int) -> StoredRecord:
        file, entry = self._places[record_id]
        start = entry["start"]
        end = start + min(entry["tokens"], max_tokens)
        try:
            with safe_open(file, framework="pt") as handle:
                rows = {name: handle.get_slice(name)[start:end] for name in handle.keys()}  # noqa: SIM118
            ids, mask = rows["input_ids"].to(torch.int64), rows["loss_mask"].bool()
        except (SafetensorError, OSError, KeyError) as err:
            raise IntegrityError(
                "a shard cannot be read", where=str(file), why=str(err), mend="run the extract stage again"
            ) from None
        states = {name: state for name, state in rows.items() if name not in _NOT_STATES}
        return StoredRecord(record_id, ids, mask, states)
