"""Cut an extraction into units of work: a pure function of the records' lengths and the settings.

Records are taken in the order in which training reads them and cut into *windows* of several full batches. Within a
window they are batched by length, so that little is padded; the wider the window, the less. The batches are the same
whatever a store holds already, whoever captures them, and whichever of their records are wanted: a record is always
captured in the same company, and so with the same bits. Since windows follow the order of training, a stretch of
training steps needs whole windows, save at its two ends.

A *unit* is a run of consecutive batches, about a shard's worth of tokens. It becomes one shard; where records are of
several classes, one for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eagle3.atomic import sha256_json

Batches = list[list[int]]
WINDOW_BATCHES = 32  # full batches a window; what that leaves to pad: docs/benchmarks.md
SMALL = 16  # a batch more is worth a 16th of a full batch's padding


@dataclass(frozen=True)
class Unit:
    """A piece of work for one worker.

    Args:
        name: unique among the units of a plan; claims and shards are named after it.
        batches: whole batches to be run, as record indices.
        shards: name -> the records, of these batches, that it holds.
    """

    name: str
    batches: tuple[tuple[int, ...], ...]
    shards: Mapping[str, tuple[int, ...]]

    @property
    def records(self) -> list[int]:
        """Every record that the unit is to store."""
        return [index for members in self.shards.values() for index in members]


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> Batches:
    """Group record indices into batches of at most `batch_tokens` padded tokens, longest records first.

    Of all ways to cut the records, sorted by length, into such batches, the one with the fewest padded tokens is taken,
    where each batch counts as `batch_tokens / 16` tokens beside its own: many small batches would pad nothing, and
    leave a GPU idle. A record longer than `batch_tokens` makes a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    sizes = np.array([lengths[i] for i in order], dtype=np.int64)
    least = np.zeros(len(order) + 1, dtype=np.int64)  # cost of the first n records
    begin = [0] * (len(order) + 1)  # first record of the last batch of the first n
    for end in range(1, len(order) + 1):
        reach = max(1, batch_tokens // max(1, int(sizes[end - 1])))
        begins = np.arange(max(0, end - reach), end)
        padded = (end - begins) * sizes[begins]
        fits = (padded <= batch_tokens) | (begins == end - 1)
        cost = np.where(fits, least[begins] + padded + batch_tokens // SMALL, np.iinfo(np.int64).max)
        best = int(cost.argmin())
        least[end], begin[end] = cost[best], int(begins[best])
    batches: Batches = []
    end = len(order)
    while end:
        batches.append(order[begin[end] : end])
        end = begin[end]
    return batches[::-1]


def window_tokens(batch_tokens: int, shard_tokens: int, window_batches: int = WINDOW_BATCHES) -> int:
    """Tokens a window: `window_batches` full batches, and no less than a shard."""
    return max(shard_tokens, window_batches * batch_tokens)


def padded_tokens(windows: Sequence[Batches], lengths: Sequence[int]) -> int:
    """Tokens that the target computes for these batches, padding included."""
    return sum(len(batch) * max(lengths[i] for i in batch) for window in windows for batch in window)


def plan_windows(lengths: Sequence[int], order: Sequence[int], batch_tokens: int, window_tokens: int) -> list[Batches]:
    """Cut the records of `order` into windows of at least `window_tokens` tokens (the last may be smaller), batched."""
    windows: list[Batches] = []
    window: list[int] = []
    held = 0
    for place, index in enumerate(order, 1):
        window.append(index)
        held += lengths[index]
        if held >= window_tokens or place == len(order):
            batches = plan_batches([lengths[i] for i in window], batch_tokens)
            windows.append([[window[i] for i in batch] for batch in batches])
            window, held = [], 0
    return windows


def plan_units(windows: Sequence[Batches], lengths: Sequence[int], shard_tokens: int) -> list[Unit]:
    """Units for all records, in runs of at least `shard_tokens` tokens (the last may be smaller), one shard each."""
    runs = _runs(windows, lengths, None, shard_tokens)
    return [_unit(f"u{number:05d}", batches, None) for number, batches in enumerate(runs)]


def plan_wanted(
    windows: Sequence[Batches], lengths: Sequence[int], wanted: Mapping[int, int], shard_tokens: int, prefix: str
) -> list[Unit]:
    """Units for a part of the records: the batches that hold any of them, in runs of `shard_tokens` wanted tokens.

    Args:
        windows: as `plan_windows` gives them, of all records.
        lengths: tokens of each record.
        wanted: record -> class; a unit's records of one class make one shard, so that they can be freed together.
        shard_tokens: tokens after which a unit is closed.
        prefix: of the units' names.
    """
    units = []
    for number, batches in enumerate(_runs(windows, lengths, wanted, shard_tokens)):
        units.append(_unit(f"{prefix}{number:05d}", batches, wanted))
    return units


def _runs(
    windows: Sequence[Batches], lengths: Sequence[int], wanted: Mapping[int, int] | None, shard_tokens: int
) -> Iterator[Batches]:
    run: Batches = []
    held = 0
    for window in windows:
        for batch in window:
            tokens = sum(lengths[i] for i in batch if wanted is None or i in wanted)
            if not tokens:
                continue
            run.append(batch)
            held += tokens
            if held >= shard_tokens:
                yield run
                run, held = [], 0
    if run:
        yield run


def _unit(name: str, batches: Batches, wanted: Mapping[int, int] | None) -> Unit:
    members: dict[str, list[int]] = {}
    for batch in batches:
        for index in batch:
            if wanted is None:
                members.setdefault(name, []).append(index)
            elif index in wanted:
                members.setdefault(f"{name}-{wanted[index]:05d}", []).append(index)
    return Unit(name, tuple(map(tuple, batches)), {shard: tuple(held) for shard, held in members.items()})


def plan_key(units: Sequence[Unit], record_ids: Sequence[str]) -> str:
    """A short name for exactly this cut of these records; workers that share it share the work."""
    cut = [[unit.name, unit.batches, sorted(unit.shards.items())] for unit in units]
    return sha256_json([list(record_ids), cut])[:16]
