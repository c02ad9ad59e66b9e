"""The planner's batches: the fewest padded tokens that a count of batches is worth, whatever the window."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
import torch
from datasets import Dataset

from data_prep.rows import Rows
from data_prep.units import SMALL, padded_tokens, plan_batches, plan_units, plan_windows, window_tokens
from eagle3.errors import DataError


def cost(batches: list[list[int]], lengths: list[int], batch_tokens: int) -> int:
    return padded_tokens([batches], lengths) + len(batches) * (batch_tokens // SMALL)


def cheapest(lengths: list[int], batch_tokens: int) -> int:
    """Of every way to cut the sorted records, by trying them all."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    costs = []
    for count in range(len(order)):
        for cuts in combinations(range(1, len(order)), count):
            ends = [0, *cuts, len(order)]
            batches = [order[a:b] for a, b in pairwise(ends)]
            if all(len(b) == 1 or len(b) * lengths[b[0]] <= batch_tokens for b in batches):
                costs.append(cost(batches, lengths, batch_tokens))
    return min(costs)


@pytest.mark.parametrize("seed", range(12))
def test_no_other_cut_of_the_sorted_records_costs_less(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.choice((3, 8, 8, 21, 50, 64, 90)) + chance.randrange(3) for _ in range(10)]
    batch_tokens = chance.choice((64, 160, 400))
    batches = plan_batches(lengths, batch_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(10))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= batch_tokens for b in batches)
    assert cost(batches, lengths, batch_tokens) == cheapest(lengths, batch_tokens)


def test_records_of_one_length_fill_batches_and_pad_nothing() -> None:
    lengths = [10] * 25
    batches = plan_batches(lengths, 100)
    assert [len(batch) for batch in batches].count(10) == 2 and padded_tokens([batches], lengths) == 250


def test_nothing_makes_no_batch_and_the_plan_is_the_same_each_time() -> None:
    assert plan_batches([], 100) == []
    lengths = [random.Random(5).randrange(4, 60) for _ in range(200)]
    assert plan_batches(lengths, 256) == plan_batches(list(lengths), 256)


def test_a_wider_window_pads_less_and_a_shard_is_a_run_of_its_batches() -> None:
    chance = random.Random(0)
    lengths = [int(chance.lognormvariate(4, 0.8)) + 4 for _ in range(3000)]
    waste = []
    for window_batches in (1, 8, 32):
        width = window_tokens(1024, 2048, window_batches)
        windows = plan_windows(lengths, range(len(lengths)), 1024, width)
        waste.append(padded_tokens(windows, lengths) / sum(lengths))
        units = plan_units(windows, lengths, 2048)
        batches = [tuple(batch) for window in windows for batch in window]
        assert [batch for unit in units for batch in unit.batches] == batches
        assert all(sum(lengths[i] for i in unit.records) >= 2048 for unit in units[:-1])
    assert waste[0] > waste[1] > waste[2] and waste[2] < 1.05
    assert window_tokens(1024, 65536, 32) == 65536  # no less than a shard


def test_rows_are_read_as_they_stand_in_any_order() -> None:
    rows = {
        "record_id": ["a", "b", "c", "d"],
        "input_ids": [[5, 2], [7], [1, 2, 3], [9, 9]],
        "loss_mask": [[0, 1], [1], [0, 0, 1], [1, 0]],
    }
    data = Dataset.from_dict({**rows, "source": ["x"] * 4})
    table = Rows(data)
    assert (table.record_ids, table.lengths, len(table)) == (["a", "b", "c", "d"], [2, 1, 3, 2], 4)
    for read, order in ((table, [2, 0, 3]), (Rows(data.select([3, 2, 1, 0])), [1, 3, 0])):
        got = read.read(order)
        assert [name for name, _, _ in got] == ["c", "a", "d"]
        for name, ids, mask in got:
            place = rows["record_id"].index(name)
            assert ids.dtype == torch.int64 and ids.tolist() == rows["input_ids"][place]
            assert mask.dtype == torch.bool and mask.tolist() == [bool(m) for m in rows["loss_mask"][place]]
    with pytest.raises(DataError, match="nothing to extract"):
        Rows(data.select([]))
