"""Read a stored record's states straight into the rows of a batch, and see that every byte of it is as written.

The bytes are hashed in the record's order as they are read, and decoded while they are in the processor's cache, so
that checking costs no further pass over the memory. Local files are read by position, not mapped: a file cut short is
an error that can be told, what was read can be given back to the page cache, and a read tells the kernel at once how
much it wants.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle3.place import Place, store_place
from eagle3.shard_file import RecordPlace, Spans, damaged, hasher, read_ranges, unreadable
from eagle3.state_codec import CODECS, Bytes

OPEN_FILES = 64  # data files kept open
BLOCK = 1 << 20  # bytes of a raw state read at a time: they stay in the cache until they are hashed and copied

Want = tuple[str, Tensor, int]  # a state, the rows [R, H] of a batch to write, the state's row to begin with


@dataclass
class Spent:
    """Seconds spent reading files, and checking and decoding; of them, seconds of a processor; bytes of states made."""

    read: float = 0.0
    decode: float = 0.0
    cpu: float = 0.0
    bytes: int = 0

    def add(self, other: Spent) -> None:
        """Add another's."""
        self.read += other.read
        self.decode += other.decode
        self.cpu += other.cpu
        self.bytes += other.bytes


class StateReader:
    """Reads states; keeps files open and a buffer for encoded bytes. One thread at a time.

    Args:
        forget: drop what was read from the page cache, for a store that the memory cannot hold anyway.
    """

    def __init__(self, forget: bool = False) -> None:
        self.forget, self.spent = forget, Spent()
        self._files: OrderedDict[str, int] = OrderedDict()
        self._buffer = np.empty(0, np.uint8)

    def read(self, place: RecordPlace, wants: Sequence[Want]) -> None:
        """Write rows `first` to `first + R` of each wanted state into its `out`, whose rows may lie apart.

        What was written counts only once this returns: the checksum is known last.

        Raises:
            IntegrityError: the file cannot be read, or what it holds is not what was written; names shard and record.
        """
        started = time.thread_time()
        try:
            self._read(place, wants)
        except OSError as err:
            raise unreadable(place.path, f"{err}; record {place.record}") from None
        self.spent.cpu += time.thread_time() - started
        self.spent.bytes += sum(out.numel() * out.element_size() for _, out, _ in wants)

    def _read(self, place: RecordPlace, wants: Sequence[Want]) -> None:
        path, sums = store_place(place.path), hasher(place.kind)
        lacking = [name for name, *_ in wants if name not in place.states]
        if lacking:
            raise damaged(place.path, f"no {lacking[0]} of record {place.record}")
        for name, spans in place.states.items():
            here = [(out, first) for want, out, first in wants if want == name]
            for row, pieces in self._blocks(place, path, spans):
                started = time.perf_counter()
                for piece in pieces:
                    sums.update(piece.data)
                try:
                    for out, first in here:
                        _decode(place, pieces, row, out, first)
                except (ValueError, RuntimeError) as err:
                    raise damaged(place.path, f"{name} of record {place.record}: {err}") from None
                self.spent.decode += time.perf_counter() - started
        for piece in self._pieces(place.path, path, place.tail):
            sums.update(piece.data)
        self._let_go(place)
        if sums.hexdigest() != place.checksum:
            raise damaged(place.path, f"checksums differ for record {place.record}")

    def _blocks(self, place: RecordPlace, path: Place, spans: Spans) -> Iterator[tuple[int, list[Bytes]]]:
        """A state's parts, whole; or a raw one, whose rows stand for themselves, in blocks, each with its first row."""
        step = (spans[0][1] - spans[0][0]) or 1
        if place.codec == "raw" and isinstance(path, Path):
            row = CODECS["raw"].parts(place.dtype, place.width)[0].row_bytes
            step = max(1, BLOCK // row) * row
            ((begin, end),) = spans
            for at in range(begin, end, step):
                yield (at - begin) // row, self._pieces(place.path, path, ((at, min(at + step, end)),))
            return
        yield 0, self._pieces(place.path, path, spans)

    def _room(self, size: int) -> Bytes:
        if len(self._buffer) < size:
            self._buffer = np.empty(size, np.uint8)
        return self._buffer[:size]

    def _pieces(self, name: str, path: Place, spans: Spans) -> list[Bytes]:
        started = time.perf_counter()
        if not isinstance(path, Path):
            found = read_ranges(path, spans)
        else:
            room = self._room(sum(end - begin for begin, end in spans))
            found, at, file = [], 0, self._open(name)
            for begin, end in spans:
                piece = room[at : at + end - begin]
                _fill(file, piece, begin)
                found.append(piece)
                at += end - begin
        self.spent.read += time.perf_counter() - started
        return found

    def _open(self, path: str) -> int:
        if path in self._files:
            self._files.move_to_end(path)
        else:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if len(self._files) > OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
        return self._files[path]

    def advise(self, place: RecordPlace) -> None:
        """Ask the kernel to read a record soon; a file that cannot be opened is left to `read`, which tells."""
        if hasattr(os, "posix_fadvise") and isinstance(store_place(place.path), Path):
            try:
                file = self._open(place.path)
                for begin, end in _all(place):
                    os.posix_fadvise(file, begin, end - begin, os.POSIX_FADV_WILLNEED)
            except OSError:
                return

    def _let_go(self, place: RecordPlace) -> None:
        if self.forget and place.path in self._files and hasattr(os, "posix_fadvise"):
            for begin, end in _all(place):
                os.posix_fadvise(self._files[place.path], begin, end - begin, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def _all(place: RecordPlace) -> Spans:
    return (*(span for spans in place.states.values() for span in spans), *place.tail)


def _decode(place: RecordPlace, pieces: list[Bytes], row: int, out: Tensor, first: int) -> None:
    """Write what `pieces`, a state's rows from `row` on, hold of its rows `first` to `first + R`.

    Raises:
        ValueError, RuntimeError: they are not what the codec gives, or `out` is of another kind.
    """
    if out.dtype != getattr(torch, place.dtype) or out.shape[1] != place.width:
        raise ValueError(f"{place.dtype} of width {place.width} where {out.dtype} of {out.shape[1]} is expected")
    codec = CODECS[place.codec]
    rows = codec.rows(pieces, place.dtype, place.width)
    if first + len(out) > place.tokens or (row == 0 and place.codec != "raw" and rows != place.tokens):
        raise ValueError(f"{rows} rows for {place.tokens} tokens, of which {len(out)} from {first} on are wanted")
    begin, end = max(first, row), min(first + len(out), row + rows)
    if begin < end:
        codec.decode_into(pieces, out[begin - first : end - first], begin - row)


def _fill(file: int, piece: Bytes, begin: int) -> None:
    """Read from `begin` on until `piece` is full."""
    left = memoryview(piece)  # type: ignore[arg-type]  # arrays are buffers
    while left:
        got = os.preadv(file, [left], begin)
        if not got:
            raise OSError(f"it ends before byte {begin + 1}")
        begin, left = begin + got, left[got:]
