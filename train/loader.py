"""Batches read ahead of training: several steps deep, within a bound of memory, in the order of the plan.

A micro-batch is laid out before anything of it is read: its rows get a place in one ring of memory, and every record's
states are decoded straight into their rows there, by worker processes if there are any (`train.decoders`). The ring is
all the memory that waiting batches take; a batch's place is used again once the next one has been asked for. Tokens and
masks, a few bytes a row, are read earlier and apart: a step's counts are needed before its first batch.

Which process decodes a record, how many do and how far ahead changes nothing but time: a batch's bytes are the same.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from eagle3.ttt import PackedBatch
from train.config import TrainConfig
from train.decoders import Decoders, Region
from train.job import RowShape, SampleSource
from train.uploads import Upload, Uploads

T = TypeVar("T")
Groups = list[list[int]]  # indices of the samples of each micro-batch of a step
ALIGNED = 64  # bytes at whose multiples tensors begin
LEAST = 3  # of the largest micro-batches: one in use, and wherever in the ring it lies, room for another beside it
SMALL = 1 << 30  # bytes of states that a thread decodes sooner than processes have started and been of use
MANY = 4  # workers chosen at most


class Ring:
    """Places in a piece of memory, taken and given back in the same order.

    Args:
        start, size: bytes of the memory.
    """

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size
        self._taken: deque[tuple[int, int]] = deque()

    @property
    def used(self) -> int:
        """Bytes taken."""
        return sum(size for _, size in self._taken)

    def take(self, size: int) -> int | None:
        """Where `size` bytes begin; None until enough is given back."""
        place = self._room(size)
        if place is None:
            return None
        self._taken.append((place, size))
        return self.start + place

    def _room(self, size: int) -> int | None:
        if not self._taken:
            return 0 if size <= self.size else None
        first, (last, length) = self._taken[0][0], self._taken[-1]
        end = last + length
        if end <= first:  # taken up to the end, and again from the start
            return end if end + size <= first else None
        if end + size <= self.size:
            return end
        return 0 if size <= first else None

    def give(self) -> None:
        """Give the oldest place back."""
        self._taken.popleft()


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def batch_bytes(rows: int, row: RowShape) -> int:
    """Bytes of the ring that a micro-batch takes."""
    return _aligned(rows * row.features * row.dtype.itemsize) + _aligned(rows * row.teacher * row.dtype.itemsize)


@dataclass
class _Micro:
    """A micro-batch on its way: its samples and their lengths, its tokens, and its states once they have a place."""

    group: list[int]
    lengths: list[int]
    tokens: Future[tuple[Tensor, Tensor]]
    features: Tensor | None = None
    teacher: Tensor | None = None
    fills: list[Future[None]] = field(default_factory=list)
    upload: Upload | None = None

    @property
    def ready(self) -> bool:
        """All of it is read, and well."""
        parts: list[Future[Any]] = [self.tokens, *self.fills]
        return self.features is not None and all(one.done() and one.exception() is None for one in parts)

    def packed(self) -> PackedBatch:
        """Once ready."""
        assert self.features is not None and self.teacher is not None
        ids, mask = self.tokens.result()
        return PackedBatch(self.features, ids, self.teacher, mask, self.lengths)


class Step:
    """The data of one step. Iterate once over its micro-batches; each is good until the next is asked for.

    `waited` counts the seconds that the caller has stood still for it.
    """

    def __init__(self, stream: Stream, micros: list[_Micro]) -> None:
        self._stream, self._micros, self.waited = stream, micros, 0.0

    @property
    def rows(self) -> int:
        """Rows in all."""
        return sum(sum(micro.lengths) for micro in self._micros)

    def outlines(self) -> list[PackedBatch]:
        """The micro-batches without states (of width 0), on the CPU: what counting needs."""
        return [self._outline(micro) for micro in self._micros]

    def _outline(self, micro: _Micro) -> PackedBatch:
        ids, mask = self._wait(micro.tokens)
        nothing = torch.empty(len(ids), 0)
        return PackedBatch(nothing, ids, nothing, mask, micro.lengths)

    def __iter__(self) -> Iterator[PackedBatch]:
        for micro in self._micros:
            self._stream.place()
            for fill in micro.fills:
                self._wait(fill)
            self._wait(micro.tokens)
            yield self._stream.hand_over(micro)
            self._stream.release(micro)

    def _wait(self, future: Future[T]) -> T:
        started = time.perf_counter()
        try:
            return future.result()
        finally:
            self.waited += time.perf_counter() - started


@dataclass(frozen=True)
class Split:
    """What is to be read.

    Args:
        source: the samples.
        groups: a step's micro-batches, as indices into the source; the same whenever it is asked.
        steps: the steps, in order.
    """

    source: SampleSource
    groups: Callable[[int], Groups]
    steps: range

    def sizes(self) -> tuple[int, int, int]:
        """Bytes of the largest micro-batch, of the largest step, and of all steps."""
        lengths, row, micro, step, whole = self.source.lengths, self.source.row, 0, 0, 0
        for number in self.steps:
            each = [batch_bytes(sum(lengths[i] for i in group), row) for group in self.groups(number)]
            micro, step, whole = max(micro, *each), max(step, sum(each)), whole + sum(each)
        return micro, step, whole


class Stream:
    """The steps of a split, in order, read ahead. The work is done in the loader's threads; this is the order of it.

    Args:
        loader: who reads.
        split: what.
        ring: where batches lie.
    """

    def __init__(self, loader: Loader, split: Split, ring: Ring) -> None:
        self._loader, self._split, self._ring = loader, split, ring
        self._numbers = iter(split.steps)
        self._steps: deque[Step] = deque()
        self._unplaced: deque[_Micro] = deque()
        self._alive: deque[_Micro] = deque()  # planned and not given back yet, in order

    def __iter__(self) -> Iterator[Step]:
        while self._plan():
            yield self._steps.popleft()

    def _plan(self) -> bool:
        """Keep `prefetch_steps` steps planned beyond the next; whether there is a next one."""
        while len(self._steps) <= self._loader.cfg.prefetch_steps:
            number = next(self._numbers, None)
            if number is None:
                break
            micros = [self._micro(group) for group in self._split.groups(number)]
            self._steps.append(Step(self, micros))
            self._unplaced.extend(micros)
            self._alive.extend(micros)
        self.place()
        return bool(self._steps)

    def _micro(self, group: list[int]) -> _Micro:
        lengths = [self._split.source.lengths[i] for i in group]
        return _Micro(group, lengths, self._loader.front.submit(_tokens, self._split.source, group))

    def place(self) -> None:
        """Give a place to as many micro-batches as there is room for, and have them read."""
        while self._unplaced and self._begin(self._unplaced[0]):
            self._unplaced.popleft()

    def _begin(self, micro: _Micro) -> bool:
        source, rows = self._split.source, sum(micro.lengths)
        at = self._ring.take(batch_bytes(rows, source.row))
        if at is None:
            return False
        row, region = source.row, self._loader.region
        micro.features = region.tensor(at, (rows, row.features), row.dtype)
        behind = at + _aligned(micro.features.numel() * row.dtype.itemsize)
        micro.teacher = region.tensor(behind, (rows, row.teacher), row.dtype)
        begin = 0
        for index, length in zip(micro.group, micro.lengths, strict=True):
            here = slice(begin, begin + length)
            begin += length
            self._loader.front.submit(source.advise, index)
            micro.fills.append(
                self._loader.pool.submit(
                    source.fill, index, micro.features[here], micro.teacher[here], self._loader.decoders
                )
            )
        return True

    def hand_over(self, micro: _Micro) -> PackedBatch:
        """The batch; on a GPU the copy of the following one begins, if it is there."""
        uploads = self._loader.uploads
        if uploads is None:
            return micro.packed()
        micro.upload = micro.upload or uploads.begin(micro.packed())
        following = self._alive[1] if len(self._alive) > 1 else None
        if following is not None and following.ready:
            following.upload = uploads.begin(following.packed())
        return micro.upload.take()

    def release(self, micro: _Micro) -> None:
        """Give the place of the oldest micro-batch back."""
        assert self._alive.popleft() is micro
        if micro.upload is not None:
            micro.upload.wait()
        micro.features = micro.teacher = micro.upload = None
        self._ring.give()


def _tokens(source: SampleSource, group: list[int]) -> tuple[Tensor, Tensor]:
    ids, masks = zip(*(source.tokens(index) for index in group), strict=True)
    return torch.cat(ids), torch.cat(masks)


class Loader:
    """Reads the splits of a training run ahead. Closed by `close`, after which nothing of it is left.

    Args:
        cfg: `prefetch_steps`, `prefetch_mib`, `loader_workers` and `processes` are used.
        device: where training runs.
        splits: what will be read, the training split first: it alone is read ahead as far as the settings allow.
    """

    def __init__(self, cfg: TrainConfig, device: torch.device, splits: Sequence[Split]) -> None:
        self.cfg, self.splits = cfg, splits
        sizes = [split.sizes() for split in splits]
        self.rings: list[Ring] = []
        for number, (micro, step, _) in enumerate(sizes):
            start = self.rings[-1].start + self.rings[-1].size if self.rings else 0
            wanted = 0 if number else min(cfg.prefetch_mib << 20, step * (cfg.prefetch_steps + 1))
            self.rings.append(Ring(start, max(LEAST * micro, wanted)))
        self.workers = choose_workers(cfg, [split.source for split in splits], sum(size for *_, size in sizes))
        self.region = Region(sum(ring.size for ring in self.rings), shared=self.workers > 0)
        self.uploads = Uploads(device, self.region) if device.type == "cuda" else None
        self.decoders = Decoders(self.workers, self.region, larger_than_memory([split.source for split in splits]))
        self.front = ThreadPoolExecutor(1, thread_name_prefix="tokens")
        self.pool = ThreadPoolExecutor(max(1, self.workers), thread_name_prefix="states")

    def stream(self, number: int) -> Stream:
        """Read a split from its first step on; one stream of a split at a time."""
        return Stream(self, self.splits[number], self.rings[number])

    def close(self) -> None:
        """Stop reading; what is asked for and not begun is dropped, the workers are ended."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.front.shutdown(wait=True, cancel_futures=True)
        self.decoders.end_workers()
        self.pool.shutdown(wait=True)
        self.decoders.close()
        for split in self.splits:
            split.source.close()
        if self.uploads is not None:
            self.uploads.close()
        self.region.close()


def choose_workers(cfg: TrainConfig, sources: Sequence[SampleSource], size: int) -> int:
    """Worker processes for `train.loader_workers`; -1 chooses.

    None where copying is all there is to do, which a thread does at some gigabytes a second, or where less than 1 GiB
    (of `size`) is to be read. Else a share of the processors: one where training itself runs on them, up to 4 beside
    a GPU.
    """
    if cfg.loader_workers >= 0:
        return cfg.loader_workers
    files = [source.files for source in sources]
    if size < SMALL or not any(one.encoded or one.remote for one in files):
        return 0
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or cfg.processes or max(1, torch.cuda.device_count())
    share = len(os.sched_getaffinity(0)) // local - 1
    return max(0, min(share, MANY if torch.cuda.is_available() else 1))


def larger_than_memory(sources: Sequence[SampleSource]) -> bool:
    """Whether the page cache cannot keep the files until they are read again: over half of this machine's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return any(not source.files.remote and source.files.bytes > memory // 2 for source in sources)
