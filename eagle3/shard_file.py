"""One shard of a hidden-state store, as readers see it: its sidecar, and records read from its data file.

The data file is plain safetensors, whatever the codec. A record's bytes in each tensor are its rows, or, where rows
have no fixed size, the piece whose length its entry gives. Only these bytes are read. The format is described in
docs/formats.md; `eagle3.state_read` reads the same bytes straight into a batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from eagle3.checked_json import read_checked, with_checksum
from eagle3.errors import IntegrityError
from eagle3.inside import is_inside
from eagle3.place import Place, exists, list_files
from eagle3.state_codec import CODECS, ITEMSIZE, Bytes, Part

FORMAT = "redraft-shard"
OLD, VERSION = 1, 2  # 1: raw, and the data file has the sidecar's name
IDS, MASK = "input_ids", "loss_mask"
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
READERS = 16  # sidecars or headers read at a time from a remote file system
NAMED = 5  # records that a message names
Spans = tuple[tuple[int, int], ...]  # first byte and end of each part


def mend_of(store: Place | str) -> str:
    """What mends the store in folder `store`, for a message."""
    command = f"python -m data_prep.store mend {shlex.quote(str(store))}"
    return f"run {command}, then the extract stage again: only the records of the shards it names are captured anew"


def hasher(kind: str) -> Any:
    """What computes a checksum of `kind`: `update(bytes)`, then `hexdigest()`."""
    return xxhash.xxh3_128() if kind == "xxh3" else hashlib.sha256()


def damaged(path: str, why: str) -> IntegrityError:
    """The line for the data file `path` whose bytes are not those that were written."""
    return IntegrityError("a shard is damaged", where=path, why=why, mend=mend_of(path.rpartition("/")[0]))


def unreadable(path: str, why: str) -> IntegrityError:
    """The line for the data file `path` that cannot be read, or ends too early."""
    return IntegrityError("a shard cannot be read", where=path, why=why, mend=mend_of(path.rpartition("/")[0]))


@dataclass(frozen=True)
class Entry:
    """One record of a shard: rows `start` to `start + tokens` of each tensor.

    `supervised` counts the tokens that a draft can learn (mask on, position 2 or later). `tokens_sha256` is over ids
    and mask, `sha256` and `xxh3` over all the record's bytes: each state's parts in turn, then ids and mask. Readers
    compare `xxh3` (128 bits), which takes a small part of the time; shards of before have none. `sizes` has the lengths
    of its pieces of tensors that have no rows.
    """

    id: str
    start: int
    tokens: int
    supervised: int
    tokens_sha256: str
    sha256: str
    sizes: dict[str, int] = field(default_factory=dict)
    xxh3: str = ""

    def __post_init__(self) -> None:
        counts = (self.start, self.tokens, self.supervised, *self.sizes.values())
        texts = (self.id, self.tokens_sha256, self.sha256, self.xxh3)
        if not all(type(one) is int and one >= 0 for one in counts) or not all(isinstance(one, str) for one in texts):
            raise TypeError(f"a record that is none: {str(self)[:100]}")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the data file: safetensors' dtype and shape, and where its bytes lie."""

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class RecordPlace:
    """Where a record lies and how its states are kept: all that is needed to read it and to see that it is whole.

    Args:
        path: the data file.
        record: its id.
        codec, dtype, width: how a state is kept, and what it is when read: [tokens, width].
        tokens: rows.
        states: for each state, in the order they were written in, where its parts lie.
        tail: where ids and mask lie.
        checksum: over all of these bytes, in this order.
        kind: of the checksum, `xxh3` or `sha256`.
    """

    path: str
    record: str
    codec: str
    dtype: str
    width: int
    tokens: int
    states: dict[str, Spans]
    tail: Spans
    checksum: str
    kind: str


@dataclass(frozen=True)
class Shard:
    """A finished shard as its sidecar tells it; `path` is the sidecar's, `data_name` the data file's, beside it.

    `codec`, `dtype` and `width` say how states are kept and what they are when read; a shard of version 1 has raw
    states, whose dtype and width only the data file's header tells. `store` is the hash of the store's manifest; shards
    of before have none.
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
    store: str = ""

    def __post_init__(self) -> None:
        counts = (self.bytes, self.header_bytes, self.tokens, self.width)
        if not all(type(one) is int and one >= 0 for one in counts) or not 8 < self.header_bytes <= self.bytes:
            raise TypeError(f"bytes, header_bytes, tokens or width is none: {counts}")
        if not is_inside(self.data_name) or "/" in self.data_name:
            raise TypeError(f"data_name {self.data_name!r} is no name of a file beside it")
        if not self.data_name.startswith(self.path.name.removesuffix("json")):
            raise TypeError(f"data_name {self.data_name!r} is another shard's")

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
        try:
            raw = read_checked(path, mend=mend_of(path.parent))
        except IntegrityError as err:
            why = f"{err.why}; {_holds(_ids_in(path))}" if exists(path) else err.why
            raise IntegrityError(err.what, where=err.where, why=why, mend=err.mend) from None
        try:
            if raw["format"] != FORMAT or raw["version"] not in (OLD, VERSION):
                raise KeyError(f"format {raw['format']!r} version {raw['version']!r}")
            names = ["bytes", "header_bytes", "header_sha256", "tokens"]
            fields = {name: raw[name] for name in names}
            fields["records"] = tuple(Entry(**entry) for entry in raw["records"])
            if raw["version"] == OLD:
                return cls(path, data_name=path.with_suffix(".safetensors").name, **fields)
            # the first shards of version 2 were raw and did not say so
            fields |= {name: raw[name] for name in ("codec", "dtype", "width", "store") if name in raw}
            shard = cls(path, data_name=raw["data_name"], **fields)
            if shard.codec not in CODECS:
                raise KeyError(f"codec {shard.codec!r}")
            return shard
        except (KeyError, TypeError, AttributeError) as err:
            mend = mend_of(path.parent)
            raise IntegrityError("not a shard's sidecar", where=str(path), why=str(err), mend=mend) from None

    def to_dict(self) -> dict[str, Any]:
        """The sidecar's content, with its checksum; `read` reads it back."""
        return with_checksum(
            {"format": FORMAT, "version": VERSION, **{k: v for k, v in asdict(self).items() if k != "path"}}
        )

    @property
    def holds(self) -> str:
        """Names the records, for a message."""
        return _holds([entry.id for entry in self.records])

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
            raise IntegrityError(what, where=str(self.data), why=why + self.holds, mend=mend_of(self.path.parent))
        (header,) = read_ranges(self.data, [(0, self.header_bytes)])
        if hashlib.sha256(header.data).hexdigest() != self.header_sha256:
            mend = mend_of(self.path.parent)
            raise IntegrityError("a shard's header is damaged", where=str(self.data), why=self.holds, mend=mend)

    def verify(self) -> None:
        """Read every byte and compare with the checksums.

        Raises:
            IntegrityError: naming the shard and every damaged record.
        """
        self.check()
        file = ShardFile(self)
        bad = [entry.id for index, entry in enumerate(self.records) if file.differs(index)]
        if bad:
            why = f"checksums differ for {len(bad)} of {len(self.records)} records: {_listed(bad)}"
            raise damaged(str(self.data), why)


def _holds(names: Sequence[str]) -> str:
    return f"it holds {len(names)} records: {_listed(names)}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _ids_in(path: Place) -> list[str]:
    """Ids that a damaged sidecar still shows."""
    found = re.findall(rb'"id": ("(?:[^"\\\\]|\\\\.)*")', path.read_bytes())
    ids = []
    for text in found:
        with contextlib.suppress(ValueError):
            ids.append(str(json.loads(text)))
    return ids


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
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, OSError) as err:
            raise unreadable(str(shard.data), f"{err}; {shard.holds}") from None
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
        """First byte and end of record `index` in tensor `name`.

        Raises:
            KeyError: there is no such tensor.
            ValueError: it would lie outside the data.
        """
        entry, tensor = self.shard.records[index], self.tensors[name]
        if name in entry.sizes:
            begin = self._starts[name][index]
            end = begin + entry.sizes[name]
        else:
            row = int(np.prod(tensor.shape[1:])) * ITEMSIZE[tensor.code]
            begin, end = tensor.begin + entry.start * row, tensor.begin + (entry.start + entry.tokens) * row
        if not self.shard.header_bytes <= begin <= end <= self.shard.bytes:
            raise ValueError(f"{name} would lie outside the file")
        return begin, end

    def place(self, index: int) -> RecordPlace:
        """Where record `index` lies.

        Raises:
            IntegrityError: the shard's header does not tell.
        """
        shard, entry = self.shard, self.shard.records[index]
        try:
            states = {
                name: tuple(self.span(index, f"{name}{part.suffix}") for part in self.parts)
                for name in self.state_names
            }
            tail = (self.span(index, IDS), self.span(index, MASK))
        except (KeyError, ValueError) as err:
            raise unreadable(str(shard.data), f"{err}; record {entry.id}") from None
        kept = (shard.codec, self.dtype, self.width)
        sums = (entry.xxh3, "xxh3") if entry.xxh3 else (entry.sha256, "sha256")
        return RecordPlace(str(shard.data), entry.id, *kept, entry.tokens, states, tail, *sums)

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """`input_ids` [T] int64 and `loss_mask` [T] bool of a record, which are those that were written.

        Raises:
            IntegrityError: the file cannot be read, or is damaged.
        """
        ids, mask = self._pieces(index, self.place(index).tail)
        if digest([ids, mask]) != self.shard.records[index].tokens_sha256:
            raise self._damaged(index)
        return _ids(ids), _mask(mask)

    def record(self, index: int, names: Sequence[str]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """`input_ids` [T] int64, `loss_mask` [T] bool and the named states, each [T, H], of a record.

        All of the record is read and compared with its checksum.

        Raises:
            IntegrityError: the file cannot be read, or is damaged, or has no such state.
        """
        place = self.place(index)
        pieces = self._record_pieces(place, index)
        if digest([piece for one in pieces.values() for piece in one], place.kind) != place.checksum:
            raise self._damaged(index)
        states = {}
        for name in names:
            try:
                states[name] = self._codec.decode(pieces[name], self.dtype, self.width)
                if len(states[name]) != place.tokens:
                    raise ValueError(f"{len(states[name])} rows")
            except (ValueError, RuntimeError, KeyError) as err:
                raise damaged(place.path, f"{name} of record {place.record}: {err}") from None
        ids, mask = pieces[IDS]
        return _ids(ids), _mask(mask), states

    def _record_pieces(self, place: RecordPlace, index: int) -> dict[str, list[Bytes]]:
        """Each state's parts, and ids and mask together, in the order of the checksum."""
        spans = {**place.states, IDS: place.tail}
        found = iter(self._pieces(index, [span for one in spans.values() for span in one]))
        return {name: [next(found) for _ in one] for name, one in spans.items()}

    def _damaged(self, index: int) -> IntegrityError:
        return damaged(str(self.shard.data), f"checksums differ for record {self.shard.records[index].id}")

    def checksums(self, index: int) -> dict[str, str]:
        """A record's checksums by their names in its entry, computed from its bytes."""
        pieces = self._record_pieces(self.place(index), index)
        all_of_it = [piece for one in pieces.values() for piece in one]
        sums = {kind: digest(all_of_it, kind) for kind in ("sha256", "xxh3")}
        return {"tokens_sha256": digest(pieces[IDS]), **sums}

    def differs(self, index: int) -> bool:
        """Whether any checksum of a record's entry is not that of its bytes."""
        entry = self.shard.records[index]
        found = self.checksums(index)
        return any(getattr(entry, name) != found[name] for name in found if name != "xxh3" or entry.xxh3)

    def _pieces(self, index: int, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
        try:
            return read_ranges(self.shard.data, spans)
        except (OSError, ValueError) as err:
            raise unreadable(str(self.shard.data), f"{err}; record {self.shard.records[index].id}") from None


def _ids(data: Bytes) -> Tensor:
    return torch.from_numpy(np.array(data).view(np.int32).astype(np.int64))


def _mask(data: Bytes) -> Tensor:
    return torch.from_numpy(np.array(data)).bool()


def digest(pieces: Sequence[Bytes], kind: str = "sha256") -> str:
    """Checksum of the pieces, one after another."""
    sums = hasher(kind)
    for piece in pieces:
        sums.update(np.ascontiguousarray(piece).data)
    return str(sums.hexdigest())


def read_ranges(path: Place, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
    """Bytes `begin` to `end` of a file, for each span; from a remote file system all at once.

    Raises:
        OSError: the file cannot be read, or ends before a span does.
    """
    if isinstance(path, Path):
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            found = [_piece(handle, begin, min(end, size)) for begin, end in spans]
    else:
        begins, ends = zip(*spans, strict=True)
        found = path.fs.cat_ranges([path.path] * len(spans), list(begins), list(ends), on_error="raise")
    for data, (begin, end) in zip(found, spans, strict=True):
        if len(data) != end - begin:
            raise OSError(f"bytes {begin} to {end} are not there")
    return [np.frombuffer(data, np.uint8) for data in found]


def _piece(handle: Any, begin: int, end: int) -> bytes:
    handle.seek(begin)
    data: bytes = handle.read(max(end - begin, 0))
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
