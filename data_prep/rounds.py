"""Rounds: extract a part of the hidden states, train on it, free it, go on; for a disk that cannot hold them all.

`round_plan` cuts the training steps into consecutive ranges whose distinct records, with the validation split, fit a
budget of bytes. It is a pure function, so a plan can be shown before anything runs and is the same when a run goes on.
See docs/rounds.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

from data_prep.units import Batches, plan_wanted
from eagle3.errors import ConfigError, RedraftError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
RECORD_BYTES = 1024  # of a sidecar, at most: a record's entry, with an id of up to 600 bytes
SHARD_BYTES = 8192  # of a shard's two headers, at most
STORE_BYTES = 65536  # manifest, markers, claims
FOREVER = 99999  # class of the validation split's records, which stay; another's is the last round that keeps it


def parse_size(text: str, name: str = "disk_budget") -> int:
    """Bytes of `"2TB"` or `"500GiB"`; decimal units are powers of ten, binary ones (`KiB` ...) powers of two.

    Raises:
        ConfigError: anything else; `name` is the field it names.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B|B)", text)
    size = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if size <= 0:
        raise ConfigError(
            "not a size", where=name, why=f"found {text!r}", mend=f"write a number and one of {', '.join(UNITS)}: 2TB"
        )
    return size


@dataclass(frozen=True)
class Sizes:
    """Upper bounds of what a store's parts take on disk, in bytes.

    Args:
        token: of states, id and mask of one token, at the codec's upper bound.
        shard_tokens: tokens after which a shard is closed.
    """

    token: int
    shard_tokens: int

    def records(self, lengths: Sequence[int]) -> int:
        """Of records of these lengths, shards' headers apart."""
        return sum(lengths) * self.token + len(lengths) * RECORD_BYTES

    def whole(self, lengths: Sequence[int]) -> int:
        """Of a store of records of these lengths."""
        shards = sum(lengths) // self.shard_tokens + 2
        return self.records(lengths) + shards * SHARD_BYTES + STORE_BYTES


@dataclass(frozen=True)
class Round:
    """One round.

    Args:
        first: first training step; last: one past the last.
        records: the training records that its steps read.
        fresh: those of them that the round before did not hold, each with the last round that keeps it.
        peak_bytes: upper bound of the store's size in this round, validation split included.
    """

    first: int
    last: int
    records: frozenset[int]
    fresh: Mapping[int, int]
    peak_bytes: int


@dataclass(frozen=True)
class RoundPlan:
    """The rounds of a training run, and what they cost.

    Args:
        rounds: in order.
        budget: bytes.
        whole_bytes: upper bound of a store that holds everything at once.
        whole_tokens: tokens of all records, each extracted once.
        stored_tokens: tokens that the rounds write in all, the validation split included.
        computed_tokens: tokens that the target computes for them: a record is captured in the same batch as always,
            so a batch that a round needs in part is computed whole.
    """

    rounds: tuple[Round, ...]
    budget: int
    whole_bytes: int
    whole_tokens: int
    stored_tokens: int
    computed_tokens: int

    @property
    def peak_bytes(self) -> int:
        """Upper bound of the store's size at any time."""
        return max(one.peak_bytes for one in self.rounds)

    def wanted(self, number: int, held_out: Sequence[int], held: Container[int]) -> dict[int, int]:
        """What is to be extracted for a round: record -> class, for `data_prep.extract.Part`.

        Args:
            number: of the round.
            held_out: row indices of the validation split.
            held: row indices that the store holds; a record that should have stayed and has not is extracted again.
        """
        one = self.rounds[number]
        kept = one.records - one.fresh.keys()
        again = {} if all(i in held for i in kept) else {i: number for i in kept}
        return {**{i: FOREVER for i in held_out}, **again, **one.fresh}

    def at(self, step: int) -> int:
        """The round to be in when `step` steps are done: the first that has more to do, or the last."""
        return next((n for n, one in enumerate(self.rounds) if step < one.last), len(self.rounds) - 1)


def round_plan(
    lengths: Sequence[int],
    held_out: Sequence[int],
    batch: Callable[[int], Sequence[int]],
    total_steps: int,
    windows: Sequence[Batches],
    budget: int,
    sizes: Sizes,
) -> RoundPlan:
    """Cut the steps into as few rounds as the budget allows, each as long as it can be.

    Args:
        lengths: tokens of each training record.
        held_out: tokens of each validation record; these are extracted once and stay.
        batch: step -> the training records that it reads, as indices into `lengths`.
        total_steps: optimizer steps.
        windows: `data_prep.units.plan_windows` of the training records; for the cost.
        budget: bytes.
        sizes: upper bounds.

    Raises:
        RedraftError: a single step's records do not fit the budget; the arithmetic is told.
    """
    capacity = budget
    while True:
        ranges = _ranges(lengths, held_out, batch, total_steps, budget, capacity, sizes)
        rounds = _rounds(ranges, lengths, held_out, windows, sizes)
        excess = max(one.peak_bytes for one in rounds) - budget
        if excess <= 0:
            break
        capacity -= excess  # headers of many small shards
    computed = sum(held_out) + sum(_computed(one.fresh, lengths, windows) for one in rounds)
    return RoundPlan(
        rounds=tuple(rounds),
        budget=budget,
        whole_bytes=sizes.whole([*lengths, *held_out]),
        whole_tokens=sum(lengths) + sum(held_out),
        stored_tokens=sum(held_out) + sum(lengths[i] for one in rounds for i in one.fresh),
        computed_tokens=computed,
    )


@dataclass
class _Range:
    first: int
    last: int
    records: set[int] = field(default_factory=set)


def _ranges(
    lengths: Sequence[int],
    held_out: Sequence[int],
    batch: Callable[[int], Sequence[int]],
    total_steps: int,
    budget: int,
    capacity: int,
    sizes: Sizes,
) -> list[_Range]:
    """Consecutive ranges of steps, each taking as many as fit."""
    ranges = [_Range(0, 0)]
    base = sizes.whole(held_out)
    used = base
    for step in range(total_steps):
        needed = set(batch(step))
        now = ranges[-1]
        more = sizes.records([lengths[i] for i in needed - now.records])
        if used + more > capacity and now.last > now.first:
            now = _Range(step, step)
            ranges.append(now)
            used, more = base, sizes.records([lengths[i] for i in needed])
        if used + more > capacity:
            raise _too_small(step, [lengths[i] for i in needed], held_out, budget, sizes)
        now.records |= needed
        now.last, used = step + 1, used + more
    return ranges


def _too_small(step: int, needed: Sequence[int], held_out: Sequence[int], budget: int, sizes: Sizes) -> RedraftError:
    own, kept = sizes.records(needed), sizes.whole(held_out)
    return RedraftError(
        "the disk budget cannot hold one training step",
        where="disk_budget",
        why=f"step {step + 1} reads {len(needed)} conversations of {sum(needed):,} tokens, up to {own:,} bytes "
        f"({sizes.token:,} a token); the validation split of {sum(held_out):,} tokens stays, with headers up to "
        f"{kept:,}; with the headers of the step's own shards that is more than {budget:,}",
        mend="raise disk_budget, or lower train.global_batch_size, data.max_length or data.val_fraction",
        page="rounds",
    )


def _rounds(
    ranges: Sequence[_Range],
    lengths: Sequence[int],
    held_out: Sequence[int],
    windows: Sequence[Batches],
    sizes: Sizes,
) -> list[Round]:
    stays: list[dict[int, int]] = [{} for _ in ranges]  # round -> record -> last round that keeps it
    for number in range(len(ranges) - 1, -1, -1):
        later = stays[number + 1] if number + 1 < len(ranges) else {}
        stays[number] = {i: later.get(i, number) for i in ranges[number].records}
    rounds: list[Round] = []
    shards: list[tuple[int, int]] = []  # (last round, shards) of what the store holds
    base = sizes.whole(held_out)
    for number, one in enumerate(ranges):
        before = ranges[number - 1].records if number else set()
        fresh = {i: stays[number][i] for i in sorted(one.records - before)}
        shards = [(last, count) for last, count in shards if last >= number]
        for unit in plan_wanted(windows, lengths, fresh, sizes.shard_tokens, ""):
            shards += [(int(name.rpartition("-")[2]), 1) for name in unit.shards]
        own = sizes.records([lengths[i] for i in one.records]) + SHARD_BYTES * sum(count for _, count in shards)
        rounds.append(Round(one.first, one.last, frozenset(one.records), fresh, base + own))
    return rounds


def _computed(wanted: Mapping[int, int], lengths: Sequence[int], windows: Sequence[Batches]) -> int:
    """Tokens of the batches that hold any of these records."""
    return sum(
        sum(lengths[i] for i in batch) for window in windows for batch in window if any(i in wanted for i in batch)
    )
