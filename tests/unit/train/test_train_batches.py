"""The order of the data, its split over processes, and packing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.errors import ConfigError, DataError
from train.batches import StepPlan, deal, pack
from train.config import TrainConfig


def plan(samples: int, batch: int, micro: int, world: int = 1, rank: int = 0, **more: int) -> StepPlan:
    return StepPlan(samples, TrainConfig(global_batch_size=batch, micro_batch_size=micro, **more), world, rank)


@settings(deadline=None)
@given(
    samples=st.integers(1, 40),
    share=st.integers(1, 6),
    world=st.integers(1, 4),
    micro=st.integers(1, 8),
    step=st.integers(0, 9),
)
def test_processes_share_one_batch_whatever_their_number(
    samples: int, share: int, world: int, micro: int, step: int
) -> None:
    batch = share * world
    plans = [plan(samples, batch, micro, world, rank) for rank in range(world)]
    groups = [p.micro_batches(step) for p in plans]
    assert {len(g) for g in groups} == {plans[0].accumulation}
    assert {len(m) for g in groups for m in g} == {plans[0].micro} and plans[0].micro <= micro
    assert [i for own in groups for m in own for i in m] == plan(samples, batch, micro).global_batch(step)


@settings(deadline=None)
@given(rows=st.lists(st.integers(1, 50), min_size=1, max_size=40), size=st.integers(1, 6))
def test_dealing_keeps_counts_and_never_loses_a_conversation(rows: list[int], size: int) -> None:
    rows = rows[: len(rows) // size * size] or rows[:1] * size
    groups = deal(rows, size)
    assert {len(group) for group in groups} == {size}
    assert sorted(i for group in groups for i in group) == list(range(len(rows)))
    assert deal([7] * len(rows), size) == [list(range(i, i + size)) for i in range(0, len(rows), size)]


def test_dealing_by_length_evens_out_the_processes() -> None:
    assert sorted(sum([9, 8, 7, 1, 1, 1][i] for i in group) for group in deal([9, 8, 7, 1, 1, 1], 2)) == [8, 9, 10]
    lengths = [10, 300, 20, 280, 30, 30, 15, 15]
    cfg = TrainConfig(global_batch_size=8, micro_batch_size=2)
    plans = [StepPlan(8, cfg, 2, rank, lengths) for rank in range(2)]
    shares = [[i for micro in p.micro_batches(0) for i in micro] for p in plans]
    assert sorted(shares[0] + shares[1]) == sorted(plans[0].global_batch(0))
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) < 1.2 * min(loads)
    assert plans[0].micro_batches(3) == StepPlan(8, cfg, 2, 0, lengths).micro_batches(3)  # asked for cold


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_conversation_keeps_its_place_in_the_batch_and_so_its_noise_whoever_takes_it(world: int) -> None:
    lengths, cfg = [10, 300, 20, 280, 30, 30, 15, 15], TrainConfig(global_batch_size=8, micro_batch_size=2)
    plans = [StepPlan(8, cfg, world, rank, lengths) for rank in range(world)]
    places: dict[int, int] = {}
    for process in plans:
        for group, here in zip(process.micro_batches(3), process.places(3), strict=True):
            places.update(zip(group, here, strict=True))
    assert places == {conversation: place for place, conversation in enumerate(plans[0].global_batch(3))}


@settings(deadline=None)
@given(samples=st.integers(1, 30), batch=st.integers(1, 9), epochs=st.integers(1, 3))
def test_every_epoch_holds_every_conversation_once_in_another_order(samples: int, batch: int, epochs: int) -> None:
    p = plan(samples, batch, 4, epochs=epochs)
    stream = [i for step in range(3 * samples) for i in p.global_batch(step)]
    for epoch in range(3):
        assert sorted(stream[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
    assert p.total_steps == max(1, samples * epochs // batch)


def test_order_depends_on_seed_and_epoch_and_on_nothing_before() -> None:
    first = plan(50, 50, 8)
    assert first.global_batch(1) == plan(50, 50, 8).global_batch(1)  # asked for cold, as after a resume
    assert first.global_batch(0) != first.global_batch(1)
    assert first.global_batch(0) != plan(50, 50, 8, seed=1).global_batch(0)
    assert plan(50, 10, 8, max_steps=7).total_steps == 7


def test_refuses_what_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match=r"train\.global_batch_size.*8 conversations over 3 processes"):
        plan(10, 8, 2, world=3)
    with pytest.raises(ConfigError, match="training split is empty"):
        plan(0, 8, 2)


def sample(rows: int, name: str = "r") -> SimpleNamespace:
    base = torch.arange(rows)
    return SimpleNamespace(
        record_id=name,
        features=base[:, None].float().repeat(1, 6),
        token_ids=base,
        teacher=base[:, None].float().repeat(1, 2),
        loss_mask=base > 0,
    )


def test_packs_end_to_end_without_padding() -> None:
    batch = pack([sample(3), sample(2)])
    assert batch.doc_lengths == [3, 2]
    assert batch.token_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.loss_mask.tolist() == [False, True, True, False, True]
    assert batch.features.shape == (5, 6)
    with pytest.raises(DataError, match="record empty"):
        pack([sample(3), sample(0, "empty")])
