"""Training samples for the training loop: prepared records, their stored states, standardized by name.

`StoreSource.get` is the plain way, through `standardize`; `tokens` and `fill` give the same rows in place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset

from data_prep.prepare import load_prepared
from data_prep.standardize import FIRST_TAUGHT, TrainingSample, check_length, embedded, shifted, standardize
from data_prep.store import Store
from eagle3.errors import DataError, IntegrityError
from eagle3.state_read import StateReader, Want
from eagle3.target_weights import TargetWeights
from eagle3.wiring import EMBEDDING, Wiring
from train.decoders import Decoders
from train.job import RowShape, SourceFiles


class Prepared:
    """The records of one split and their tokens, left in the files they are mapped from.

    Args:
        rows: what `load_prepared` gives.
    """

    def __init__(self, rows: Dataset) -> None:
        self.record_ids = [str(name) for name in rows["record_id"]]
        self._tokens = rows.select_columns(["input_ids"]).with_format("arrow")
        blocks = self._tokens.iter(4096)
        self.lengths = [n for block in blocks for n in pc.list_value_length(block["input_ids"]).to_pylist()]

    def tokens(self, index: int) -> np.ndarray:
        """`input_ids` [T] int32 of a record."""
        found: np.ndarray = self._tokens[index]["input_ids"][0].values.to_numpy()
        return found


class PreparedTokens(Protocol):
    """What `StoreSource` needs of the prepared records."""

    record_ids: list[str]
    lengths: list[int]

    def tokens(self, index: int) -> np.ndarray:
        """`input_ids` [T] int32 of a record."""


class StoreSource:
    """The samples of one split, in the prepared data's order.

    Args:
        store: an opened store whose wiring, target and tokenizer were checked.
        prepared: the records, and the tokens they have now.
        wiring: what the draft is trained on.
        embedding: the target's `[V, H]` embedding, needed when the wiring names it.
        partial: the store holds some of the records only, as in rounds; the others cannot be read.

    Raises:
        DataError: a record is prepared but not in the store.
    """

    def __init__(
        self,
        store: Store,
        prepared: PreparedTokens,
        wiring: Wiring,
        embedding: torch.Tensor | None,
        partial: bool = False,
    ) -> None:
        positions = {record_id: index for index, record_id in enumerate(store.record_ids)}
        self.record_ids = prepared.record_ids
        missing = [record_id for record_id in self.record_ids if record_id not in positions]
        if missing and not partial:
            raise DataError(
                "prepared records have no hidden states",
                where=str(store.path),
                why=f"{len(missing)} of {len(self.record_ids)} are missing, first {missing[0]!r}",
                mend="run the extract stage",
            )
        self.store, self.prepared, self.wiring, self.embedding = store, prepared, wiring, embedding
        self.positions = [positions.get(record_id, -1) for record_id in self.record_ids]
        self.lengths = [tokens - 1 for tokens in prepared.lengths]  # rows: one fewer than tokens
        width = wiring.hidden_size
        self.row = RowShape(len(wiring.aux) * width, width, getattr(torch, store.manifest.dtype))
        self.files = SourceFiles(
            encoded=store.manifest.codec != "raw",
            remote=not isinstance(store.path, Path),
            bytes=sum(shard.bytes for shard in store.shards),
        )
        self._advice = StateReader()

    def __len__(self) -> int:
        return len(self.positions)

    def get(self, index: int) -> TrainingSample:
        """Read and standardize one sample.

        Raises:
            DataError: the store does not hold it.
            IntegrityError: the stored tokens are not the prepared ones.
        """
        captured = self.store[self._position(index)]
        self._check_tokens(index, captured.input_ids)
        return standardize(captured, self.wiring, self.embedding)

    def _position(self, index: int) -> int:
        if self.positions[index] < 0:
            where = f"{self.store.path}, record {self.record_ids[index]!r}"
            raise DataError("a record's hidden states are not there", where=where, mend="run the extract stage")
        return self.positions[index]

    def _check_tokens(self, index: int, input_ids: torch.Tensor) -> None:
        if not np.array_equal(input_ids.numpy(), self.prepared.tokens(index)):
            raise IntegrityError(
                "the store holds another text under this record's name",
                where=f"{self.store.path}, record {self.record_ids[index]!r}",
                why="its tokens are not the prepared ones",
                mend="delete the store, or set paths.store to a new folder, and run the extract stage",
            )

    def tokens(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`token_ids` [N] int64 and `loss_mask` [N] bool of one sample; raises as `get` does."""
        input_ids, loss_mask = self.store.tokens_and_mask(self._position(index))
        self._check_tokens(index, input_ids)
        check_length(self.record_ids[index], len(input_ids))
        return shifted(input_ids, loss_mask)

    def advise(self, index: int) -> None:
        """Have the disk begin to read a sample's states."""
        if not self.files.remote and self.positions[index] >= 0:
            self._advice.advise(self.store.place(self.positions[index]))

    def fill(self, index: int, features: torch.Tensor, teacher: torch.Tensor, decoders: Decoders) -> None:
        """Write the states of one sample, `features` [N, A*H] and `teacher` [N, H], each state straight to its place.

        Raises:
            WiringError, IntegrityError: as `get`.
        """
        slots = features.unflatten(1, (len(self.wiring.aux), self.wiring.hidden_size))  # [N, A, H]
        sites = [(slot, site) for slot, site in enumerate(self.wiring.aux) if site != EMBEDDING]
        wants: list[Want] = [
            *((site.name, slots[:, slot], 0) for slot, site in sites),
            ("final", teacher, FIRST_TAUGHT),
        ]
        decoders.read(self.store.place(self._position(index)), wants)
        if EMBEDDING in self.wiring.aux:
            assert self.embedding is not None
            input_ids = torch.from_numpy(self.prepared.tokens(index).astype(np.int64))
            rows = embedded(self.record_ids[index], input_ids, self.embedding)[:-1]
            slots[:, self.wiring.aux.index(EMBEDDING)] = rows

    def close(self) -> None:
        """Close the files that `advise` has opened."""
        self._advice.close()


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
    records = Prepared(load_prepared(Path(prepared), split))
    embedding = TargetWeights(Path(target)).embedding() if EMBEDDING in wanted.aux else None
    return StoreSource(opened, records, wanted, embedding, partial)
