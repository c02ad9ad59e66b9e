"""Read one stored state straight into the rows of a batch: no copy of it is made on the way but the decoder's own.

Local files are read by position, not mapped: a file cut short is an error that can be told, what was read can be given
back to the page cache, and a read tells the kernel at once how much it wants.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eagle3.errors import IntegrityError
from eagle3.place import Place, store_place
from eagle3.shard_file import MEND, StatePlace, read_ranges
from eagle3.state_codec import CODECS, Bytes, numbers_of, to_bytes

OPEN_FILES = 64  # data files kept open
DIRECT_BYTES = 1 << 18  # of raw rows copied at a time: they stay in the processor's cache in between


@dataclass
class Spent:
    """Seconds spent, and bytes made: reading files, decoding, of states as they are trained on."""

    read: float = 0.0
    decode: float = 0.0
    bytes: int = 0

    def add(self, other: Spent) -> None:
        """Add another's."""
        self.read += other.read
        self.decode += other.decode
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

    def read(self, place: StatePlace, out: Tensor, first: int = 0) -> None:
        """Write rows `first` to `first + R` of a state into `out` [R, H], whose rows may lie apart.

        Raises:
            IntegrityError: the file cannot be read, or what it holds is no such state; names shard, state and record.
        """
        try:
            self._read(place, out, first)
        except OSError as err:
            mend = "run the extract stage again"
            raise IntegrityError(
                "a shard cannot be read", where=place.path, why=f"{err}; {place.whose}", mend=mend
            ) from None
        except (ValueError, RuntimeError) as err:
            why = f"{place.whose}: {err}"
            raise IntegrityError("a shard is damaged", where=place.path, why=why, mend=MEND) from None
        self.spent.bytes += out.numel() * out.element_size()

    def _read(self, place: StatePlace, out: Tensor, first: int) -> None:
        if out.dtype != getattr(torch, place.dtype) or out.shape[1] != place.width:
            raise ValueError(f"{place.dtype} of width {place.width} where {out.dtype} of {out.shape[1]} is expected")
        started = time.perf_counter()
        path = store_place(place.path)
        if place.codec == "raw" and isinstance(path, Path):
            self._read_raw(place, out, first)
            self.spent.read += time.perf_counter() - started
            self._let_go(place)
            return
        pieces = self._pieces(place, path)
        read = time.perf_counter()
        codec = CODECS[place.codec]
        rows = codec.rows(pieces, place.dtype, place.width)
        if rows != place.tokens:
            raise ValueError(f"{rows} rows")
        codec.decode_into(pieces, out, first)
        self.spent.read += read - started
        self.spent.decode += time.perf_counter() - read
        self._let_go(place)

    def _read_raw(self, place: StatePlace, out: Tensor, first: int) -> None:
        """Straight into `out` where its rows lie together, else a few rows at a time."""
        ((begin, end),) = place.spans
        row = place.width * out.element_size()
        if end - begin != place.tokens * row or len(out) + first > place.tokens:
            raise ValueError(f"{end - begin} bytes for {place.tokens} rows of {row}")
        file, begin = self._open(place.path), begin + first * row
        if out.is_contiguous():
            _fill(file, to_bytes(out), begin)
            return
        step = max(1, DIRECT_BYTES // row)
        for at in range(0, len(out), step):
            rows = out[at : at + step]
            piece = self._room(rows.numel() * rows.element_size())
            _fill(file, piece, begin + at * row)
            rows.copy_(numbers_of(piece, out.dtype).view(rows.shape))

    def _room(self, size: int) -> Bytes:
        if len(self._buffer) < size:
            self._buffer = np.empty(size, np.uint8)
        return self._buffer[:size]

    def _pieces(self, place: StatePlace, path: Place) -> list[Bytes]:
        if not isinstance(path, Path):
            return read_ranges(path, place.spans)
        room = self._room(sum(end - begin for begin, end in place.spans))
        pieces, at, file = [], 0, self._open(place.path)
        for begin, end in place.spans:
            piece = room[at : at + end - begin]
            _fill(file, piece, begin)
            pieces.append(piece)
            at += end - begin
        return pieces

    def _open(self, path: str) -> int:
        if path in self._files:
            self._files.move_to_end(path)
        else:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if len(self._files) > OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
        return self._files[path]

    def advise(self, places: Sequence[StatePlace]) -> None:
        """Ask the kernel to read these states soon; a file that cannot be opened is left to `read`, which tells."""
        for place in places:
            if hasattr(os, "posix_fadvise") and isinstance(store_place(place.path), Path):
                try:
                    file = self._open(place.path)
                    for begin, end in place.spans:
                        os.posix_fadvise(file, begin, end - begin, os.POSIX_FADV_WILLNEED)
                except OSError:
                    return

    def _let_go(self, place: StatePlace) -> None:
        if self.forget and place.path in self._files and hasattr(os, "posix_fadvise"):
            for begin, end in place.spans:
                os.posix_fadvise(self._files[place.path], begin, end - begin, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def _fill(file: int, piece: Bytes, begin: int) -> None:
    """Read exactly `len(piece)` bytes from `begin`."""
    view, done = memoryview(piece.data), 0
    while done < len(piece):
        got = os.preadv(file, [view[done:]], begin + done)
        if not got:
            raise OSError(f"bytes {begin} to {begin + len(piece)} are not there")
        done += got
