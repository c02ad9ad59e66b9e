"""One shard of a hidden-state store, as readers see it: its sidecar, and records read from its data file.

The data file is plain safetensors, whatever the codec. A record's bytes in each tensor are its rows, or, where rows
have no fixed size, the piece whose length its entry gives. Only these bytes are read. The format is described in
docs/formats.md; `eagle3.state_read` reads the same bytes straight into a batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3.atomic import read_json
from eagle3.errors import IntegrityError
from eagle3.place import Place, list_files
from eagle3.state_codec import CODECS, ITEMSIZE, Bytes, Part

FORMAT = "redraft-shard"
OLD, VERSION = 1, 2  # 1: raw, and the data file has the sidecar's name
MEND = "delete this shard's two files and run the extract stage again: only its records are captured anew"
IDS, MASK = "input_ids", "loss_mask"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
READERS = 16  # sidecars or headers read at a time from a remote file system


@dataclass(frozen=True)
class Entry:
    """One record of a shard: rows `start` to `start + tokens` of each tensor.

    `supervised` counts the tokens that a draft can learn (mask on, position 2 or later). `tokens_sha256` is over ids
    and mask, `sha256` over all the record's bytes: each state's parts in turn, then ids and mask. `sizes` has the
    lengths of its pieces of tensors that have no rows.
    """

    id: str
    start: int
    tokens: int
    supervised: int
    tokens_sha256: str
    sha256: str
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the data file: safetensors' dtype and shape, and where its bytes lie."""

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class StatePlace:
    """Where one state of one record lies, and how it is kept: all that is needed to read it.

    Args:
        path: the data file.
        spans: first byte and end of each of its parts.
        codec, dtype, width: how it is kept, and what it is when read: [tokens, width].
        tokens: its rows.
        whose: names state and record, for a message.
    """

    path: str
    spans: tuple[tuple[int, int], ...]
    codec: str
    dtype: str
    width: int
    tokens: int
    whose: str


@dataclass(frozen=True)
class Shard:
    """A finished shard as its sidecar tells it; `path` is the sidecar's, `data_name` the data file's, beside it.

    `codec`, `dtype` and `width` say how states are kept and what they are when read; a shard of version 1 has raw
    states, whose dtype and width only the data file's header tells.
    """

    path: Place
    bytes: int
    header_bytes: int
    header_sha256: str
    tokens: int
    records: tuple[Entry, ...]
    data_name: str
    codec: str = "raw"
    dtype: str = ""
    width: int = 0

    @property
    def data(self) -> Place:
        """The safetensors file."""
        return self.path.parent / self.data_name

    @classmethod
    def read(cls, path: Place) -> Shard:
        """Read a sidecar.

        Raises:
            IntegrityError: it is not readable or not a sidecar of this version.
        """
        raw = read_json(path, mend=MEND)
        try:
            if raw["format"] != FORMAT or raw["version"] not in (OLD, VERSION):
                raise KeyError(f"format {raw['format']!r} version {raw['version']!r}")
            names = ["bytes", "header_bytes", "header_sha256", "tokens"]
            fields = {name: raw[name] for name in names}
            fields["records"] = tuple(Entry(**entry) for entry in raw["records"])
            if raw["version"] == OLD:
                return cls(path, data_name=path.with_suffix(".safetensors").name, **fields)
            # the first shards of version 2 were raw and did not say so
            fields |= {name: raw[name] for name in ("codec", "dtype", "width") if name in raw}
            shard = cls(path, data_name=raw["data_name"], **fields)
            if shard.codec not in CODECS:
                raise KeyError(f"codec {shard.codec!r}")
            return shard
        except (KeyError, TypeError) as err:
            raise IntegrityError("not a shard's sidecar", where=str(path), why=str(err), mend=MEND) from None

    def to_dict(self) -> dict[str, Any]:
        """The sidecar's content; `read` reads it back."""
        return {"format": FORMAT, "version": VERSION, **{k: v for k, v in asdict(self).items() if k != "path"}}

    @property
    def holds(self) -> str:
        """Names the records, for a message."""
        names = [entry.id for entry in self.records]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return f"it holds {len(names)} records: {', '.join(names[:5])}{more}"

    def check(self) -> None:
        """Compare the data file's size and header with the sidecar; cheap, reads only the header.

        Raises:
            IntegrityError: the file is missing, cut short, or has another header; names the shard and its records.
        """
        try:
            size = self.data.stat().st_size
        except FileNotFoundError:
            size = -1
        if size != self.bytes:
            what = "a shard's data file is missing" if size < 0 else "a shard is truncated"
            if size > self.bytes:
                what = "a shard has another size than was written"
            why = "" if size < 0 else f"{size} bytes where {self.bytes} were written; "
            raise IntegrityError(what, where=str(self.data), why=why + self.holds, mend=MEND)
        (header,) = read_ranges(self.data, [(0, self.header_bytes)])
        if hashlib.sha256(header.data).hexdigest() != self.header_sha256:
            raise IntegrityError("a shard's header is damaged", where=str(self.data), why=self.holds, mend=MEND)

    def verify(self) -> None:
        """Read every byte and compare with the checksums.

        Raises:
            IntegrityError: naming the shard and every damaged record.
        """
        self.check()
        file = ShardFile(self)
        bad = [entry.id for index, entry in enumerate(self.records) if file.checksums(index) != _said(entry)]
        if bad:
            why = f"checksums differ for {len(bad)} of {len(self.records)} records: {', '.join(bad[:5])}"
            raise IntegrityError("a shard is damaged", where=str(self.data), why=why, mend=MEND)


def _said(entry: Entry) -> tuple[str, str]:
    return entry.tokens_sha256, entry.sha256


class ShardFile:
    """A shard's data file, read by record. What is read is a copy, independent of the file.

    Args:
        shard: its sidecar.

    Raises:
        IntegrityError: the header is not readable.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        try:
            (header,) = read_ranges(shard.data, [(0, shard.header_bytes)])
            self.tensors = {
                name: StoredTensor(
                    info["dtype"], tuple(info["shape"]), *(shard.header_bytes + x for x in info["data_offsets"])
                )
                for name, info in json.loads(header[8:].tobytes()).items()
            }
            self.dtype = shard.dtype or DTYPES[self.tensors["final"].code]
            self.width = shard.width or self.tensors["final"].shape[1]
        except (ValueError, KeyError, OSError) as err:
            raise self._unreadable(err, shard.holds) from None
        self._codec = CODECS[shard.codec]

    @cached_property
    def parts(self) -> list[Part]:
        """The tensors that hold one state."""
        return self._codec.parts(self.dtype, self.width)

    @property
    def state_names(self) -> list[str]:
        """Names of the states, sites and then `final`, in the order they were written in."""
        return [name for name in self.tensors if name not in (IDS, MASK) and "." not in name]  # parts have a suffix

    @cached_property
    def _starts(self) -> dict[str, list[int]]:
        """For each tensor without rows: where each record's piece begins."""
        names = list(self.shard.records[0].sizes) if self.shard.records else []
        starts = {}
        for name in names:
            sizes = [entry.sizes[name] for entry in self.shard.records]
            starts[name] = list(accumulate(sizes, initial=self.tensors[name].begin))
        return starts

    def span(self, index: int, name: str) -> tuple[int, int]:
        """First byte and end of record `index` in tensor `name`."""
        entry, tensor = self.shard.records[index], self.tensors[name]
        if name in entry.sizes:
            begin = self._starts[name][index]
            return begin, begin + entry.sizes[name]
        row = int(np.prod(tensor.shape[1:])) * ITEMSIZE[tensor.code]
        return tensor.begin + entry.start * row, tensor.begin + (entry.start + entry.tokens) * row

    def place(self, index: int, name: str) -> StatePlace:
        """Where state `name` of record `index` lies.

        Raises:
            IntegrityError: the shard has no such state.
        """
        entry = self.shard.records[index]
        whose = f"{name} of record {entry.id}"
        try:
            spans = tuple(self.span(index, f"{name}{part.suffix}") for part in self.parts)
        except KeyError as err:
            raise self._unreadable(err, whose) from None
        return StatePlace(str(self.shard.data), spans, self.shard.codec, self.dtype, self.width, entry.tokens, whose)

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """`input_ids` [T] int64 and `loss_mask` [T] bool of a record."""
        ids, mask = self._pieces(index, [IDS, MASK])
        return _ids(ids), _mask(mask)

    def record(self, index: int, names: Sequence[str]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """`input_ids` [T] int64, `loss_mask` [T] bool and the named states, each [T, H], of a record.

        Raises:
            IntegrityError: the file cannot be read, or what it holds is no state of this codec.
        """
        wanted = [f"{name}{part.suffix}" for name in names for part in self.parts]
        ids, mask, *rest = self._pieces(index, [IDS, MASK, *wanted])
        step = len(self.parts)
        states = {}
        for place, name in enumerate(names):
            try:
                pieces = rest[place * step : (place + 1) * step]
                states[name] = self._codec.decode(pieces, self.dtype, self.width)
                if len(states[name]) != self.shard.records[index].tokens:
                    raise ValueError(f"{len(states[name])} rows")
            except (ValueError, RuntimeError) as err:
                why = f"{name} of record {self.shard.records[index].id}: {err}"
                raise IntegrityError("a shard is damaged", where=str(self.shard.data), why=why, mend=MEND) from None
        return _ids(ids), _mask(mask), states

    def checksums(self, index: int) -> tuple[str, str]:
        """SHA-256 of a record's ids and mask; and of all its bytes: each state's parts in turn, ids, mask."""
        wanted = [f"{name}{part.suffix}" for name in self.state_names for part in self.parts]
        pieces = self._pieces(index, [*wanted, IDS, MASK])
        return digest(pieces[-2:]), digest(pieces)

    def _pieces(self, index: int, names: Sequence[str]) -> list[Bytes]:
        try:
            return read_ranges(self.shard.data, [self.span(index, name) for name in names])
        except (OSError, ValueError, KeyError) as err:
            raise self._unreadable(err, f"record {self.shard.records[index].id}") from None

    def _unreadable(self, err: Exception, whose: str) -> IntegrityError:
        why = f"{err}; {whose}"
        mend = "run the extract stage again"
        return IntegrityError("a shard cannot be read", where=str(self.shard.data), why=why, mend=mend)


def _ids(data: Bytes) -> Tensor:
    return torch.from_numpy(np.array(data).view(np.int32).astype(np.int64))


def _mask(data: Bytes) -> Tensor:
    return torch.from_numpy(np.array(data)).bool()


def digest(pieces: Sequence[Bytes]) -> str:
    """SHA-256 of the pieces, one after another."""
    sha = hashlib.sha256()
    for piece in pieces:
        sha.update(np.ascontiguousarray(piece).data)
    return sha.hexdigest()


def read_ranges(path: Place, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
    """Bytes `begin` to `end` of a file, for each span; from a remote file system all at once.

    Raises:
        OSError: the file cannot be read, or ends before a span does.
    """
    if isinstance(path, Path):
        with open(path, "rb") as handle:
            found = [_piece(handle, *span) for span in spans]
    else:
        begins, ends = zip(*spans, strict=True)
        found = path.fs.cat_ranges([path.path] * len(spans), list(begins), list(ends), on_error="raise")
    for data, (begin, end) in zip(found, spans, strict=True):
        if len(data) != end - begin:
            raise OSError(f"bytes {begin} to {end} are not there")
    return [np.frombuffer(data, np.uint8) for data in found]


def _piece(handle: Any, begin: int, end: int) -> bytes:
    handle.seek(begin)
    data: bytes = handle.read(end - begin)
    return data


def find_shards(store: Place) -> list[Shard]:
    """Read the sidecars of all finished shards, by name.

    Raises:
        IntegrityError: a sidecar is not readable.
    """
    return list(_each(Shard.read, list_files(store, "shard-*.json"), store))


def check_shards(shards: Sequence[Shard]) -> None:
    """`Shard.check` of each, several at a time where the file system is remote.

    Raises:
        IntegrityError: the first that is not whole.
    """
    if shards:
        list(_each(Shard.check, shards, shards[0].path))


def _each(run: Any, items: Sequence[Any], place: Place) -> Iterator[Any]:
    if isinstance(place, Path):
        yield from map(run, items)
        return
    with ThreadPoolExecutor(READERS) as pool:
        yield from pool.map(run, items)
