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
from eagle3.state_codec import CODECS, Bytes

OPEN_FILES = 64  # data files kept open
PIECES = 1024  # pieces of memory that the kernel fills in one call, at most


@dataclass
class Spent:
    """Seconds spent reading files and decoding; of them, seconds of a processor; bytes of states made."""

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

    def read(self, place: StatePlace, out: Tensor, first: int = 0) -> None:
        """Write rows `first` to `first + R` of a state into `out` [R, H], whose rows may lie apart.

        Raises:
            IntegrityError: the file cannot be read, or what it holds is no such state; names shard, state and record.
        """
        started = time.thread_time()
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
        self.spent.cpu += time.thread_time() - started
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
        """Straight into `out`, whose rows may lie apart: no copy is made but the kernel's."""
        ((begin, end),) = place.spans
        row = place.width * out.element_size()
        if end - begin != place.tokens * row or len(out) + first > place.tokens:
            raise ValueError(f"{end - begin} bytes for {place.tokens} rows of {row}")
        rows = out.view(torch.uint8).numpy()  # [R, bytes of a row]
        pieces = [rows.reshape(-1)] if out.is_contiguous() else list(rows)
        _fill(self._open(place.path), pieces, begin + first * row)

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
            _fill(file, [piece], begin)
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


def _fill(file: int, pieces: Sequence[Bytes], begin: int) -> None:
    """Read from `begin` on until all pieces are full, hundreds of them a call."""
    for at in range(0, len(pieces), PIECES):
        left = list(pieces[at : at + PIECES])
        while left:
            got = os.preadv(file, left, begin)  # type: ignore[arg-type]  # arrays are buffers
            if not got:
                raise OSError(f"it ends before byte {begin + 1}")
            begin, left = begin + got, _beyond(left, got)


def _beyond(pieces: list[Bytes], count: int) -> list[Bytes]:
    """What is left to fill after the first `count` bytes."""
    for number, piece in enumerate(pieces):
        if count < len(piece):
            return [piece[count:], *pieces[number + 1 :]]
        count -= len(piece)
    return []
