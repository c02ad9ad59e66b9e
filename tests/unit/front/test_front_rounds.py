"""Sizes, and the plan of rounds: what it keeps to, what it costs, what it refuses."""

from __future__ import annotations

import random
from typing import Any

import pytest

from data_prep.rounds import RECORD_BYTES, RoundPlan, Sizes, parse_size, round_plan
from data_prep.units import plan_windows
from eagle3.errors import ConfigError, RedraftError
from train.batches import StepPlan, epoch_order
from train.config import TrainConfig

SIZES = Sizes(token=100, shard_tokens=400)


@pytest.mark.parametrize(
    ("text", "size"),
    [("2TB", 2 * 10**12), ("500GiB", 500 * 2**30), ("1.5 MB", 1_500_000), ("7B", 7), ("1KiB", 1024)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["2", "TB", "2tb", "2 T", "-1GB", "0GB", "1e3GB", "2TB ", "2,5TB", "1EB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="disk_budget"):
        parse_size(text)


def made(budget: int, *, records: int = 120, epochs: int = 1, batch_tokens: int = 200, seed: int = 0) -> Any:
    """(plan, lengths, held out, steps)."""
    chance = random.Random(seed)
    lengths = [chance.randint(5, 60) for _ in range(records)]
    held_out = [chance.randint(5, 60) for _ in range(6)]
    steps = StepPlan(records, TrainConfig(global_batch_size=8, epochs=epochs, seed=seed), 1, 0)
    windows = plan_windows(lengths, epoch_order(seed, 0, records).tolist(), batch_tokens, SIZES.shard_tokens)
    plan = round_plan(lengths, held_out, steps.global_batch, steps.total_steps, windows, budget, SIZES)
    return plan, lengths, held_out, steps


def simulate(plan: RoundPlan, lengths: list[int], steps: StepPlan) -> None:
    """Walk the rounds: every step finds its records, the budget is kept, and only the fresh are extracted."""
    held: dict[int, int] = {}
    stored, step = 0, 0
    for number, one in enumerate(plan.rounds):
        assert one.first == step < one.last
        held = {i: last for i, last in held.items() if last >= number}
        assert not set(held) & set(one.fresh)
        held |= one.fresh
        stored += sum(lengths[i] for i in one.fresh)
        assert set(held) == one.records == {i for s in range(one.first, one.last) for i in steps.global_batch(s)}
        assert all(last == number or i in plan.rounds[number + 1].records for i, last in held.items())
        own = sum(lengths[i] for i in held) * SIZES.token + len(held) * RECORD_BYTES
        assert own < one.peak_bytes <= plan.budget
        step = one.last
    assert step == steps.total_steps
    assert all(plan.rounds[plan.at(s)].first <= s < plan.rounds[plan.at(s)].last for s in range(step))
    assert plan.at(step) == len(plan.rounds) - 1


@pytest.mark.parametrize("budget", [200_000, 260_000, 330_000, 480_000])
@pytest.mark.parametrize("epochs", [1, 3])
def test_every_step_finds_its_records_within_the_budget(budget: int, epochs: int) -> None:
    plan, lengths, held_out, steps = made(budget, epochs=epochs)
    simulate(plan, lengths, steps)
    read = {i for s in range(steps.total_steps) for i in steps.global_batch(s)}
    fresh = sum(lengths[i] for one in plan.rounds for i in one.fresh)
    assert plan.stored_tokens == sum(held_out) + fresh
    assert plan.computed_tokens >= plan.stored_tokens
    if epochs == 1:
        assert fresh == sum(lengths[i] for i in read)  # nothing is stored twice
        window = SIZES.shard_tokens + max(lengths)
        assert plan.computed_tokens <= sum(lengths) + sum(held_out) + window * (len(plan.rounds) - 1)
    assert plan.peak_bytes <= budget


def test_more_budget_means_fewer_rounds_and_less_to_extract_again() -> None:
    plans = [made(budget, epochs=3)[0] for budget in (200_000, 300_000, 450_000)]
    assert [len(p.rounds) for p in plans] == sorted((len(p.rounds) for p in plans), reverse=True)
    assert plans[0].stored_tokens > plans[-1].stored_tokens


def test_records_alone_are_computed_no_oftener_than_stored() -> None:
    plan = made(300_000, epochs=3, batch_tokens=1)[0]
    assert len(plan.rounds) > 3 and plan.computed_tokens == plan.stored_tokens


def test_with_room_for_all_there_is_one_round() -> None:
    plan, lengths, held_out, _ = made(10**9, epochs=3)
    assert len(plan.rounds) == 1 and plan.whole_bytes < 10**9
    assert plan.stored_tokens == plan.whole_tokens == sum(lengths) + sum(held_out)


def test_a_budget_below_one_step_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(RedraftError, match=r"one training step.*step \d+ reads 8 conversations of \d+ tokens.*100,000"):
        made(100_000)


def test_records_that_should_have_stayed_are_extracted_again() -> None:
    plan = made(330_000, epochs=3)[0]
    number = next(n for n, one in enumerate(plan.rounds) if one.records - one.fresh.keys())
    one = plan.rounds[number]
    kept = one.records - one.fresh.keys()
    assert set(plan.wanted(number, [200, 201], kept)) == {*one.fresh, 200, 201}
    assert set(plan.wanted(number, [200, 201], set())) == {*one.records, 200, 201}
