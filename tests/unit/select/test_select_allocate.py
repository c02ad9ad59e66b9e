"""Quotas become whole numbers, and are filled exactly wherever they can be filled."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.select.allocate import allocate, margin, transport
from data_prep.select.config import SelectConfig
from data_prep.select.quotas import Quota, apportion, resolve


def quotas(*margins: np.ndarray) -> tuple[Quota, Quota, Quota]:
    kinds = ("domain", "language", "length")
    a, b, c = (Quota(k, tuple(f"{k}{i}" for i in range(len(m))), m) for k, m in zip(kinds, margins, strict=True))
    return a, b, c


@st.composite
def solvable(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A table with holes, and a supply that is at least it."""
    shape = tuple(draw(st.integers(1, n)) for n in (4, 5, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    table = np.where(rng.random(shape) < draw(st.sampled_from([0.4, 0.9])), rng.integers(0, 50, shape), 0)
    more = rng.integers(0, draw(st.sampled_from([1, 5, 300])), shape)
    return table, table + np.where(rng.random(shape) < 0.6, more, 0)


@given(solvable())
@settings(max_examples=60, deadline=None)
def test_quotas_that_can_be_filled_together_are_filled_exactly(case: tuple[np.ndarray, np.ndarray]) -> None:
    table, supply = case
    total = int(table.sum())
    if not total:
        return
    wanted = [margin(table, axis) for axis in range(3)]
    found = allocate(supply, quotas(*wanted), total)
    assert (found.take >= 0).all() and (found.take <= supply).all() and found.moved == 0
    assert [found.margin(axis).tolist() for axis in (0, 1)] == [w.tolist() for w in wanted[:2]]
    assert np.abs(found.margin(2) - wanted[2]).sum() <= 2 * max(1, total // 100)  # lengths come after the cells


def least_excess_by_trying(rows: np.ndarray, columns: np.ndarray, bound: np.ndarray, total: int) -> int:
    tables = (np.array(cells).reshape(bound.shape) for cells in itertools.product(*(range(b + 1) for b in bound.flat)))
    return min(excess(table, rows, columns) for table in tables if table.sum() == total)


def excess(table: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> int:
    return int(np.maximum(table.sum(1) - rows, 0).sum() + np.maximum(table.sum(0) - columns, 0).sum())


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_transport_exceeds_as_little_as_trying_all_tables_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bound, rows, columns = rng.integers(0, 4, (2, 3)), rng.integers(0, 6, 2), rng.integers(0, 6, 3)
    total = int(rng.integers(0, bound.sum() + 1))
    table = transport(rows, columns, bound, rng.random((2, 3)) * 4, total)
    assert (table >= 0).all() and (table <= bound).all() and table.sum() == total
    assert excess(table, rows, columns) == least_excess_by_trying(rows, columns, bound, total)


def test_where_the_choice_is_free_the_table_stays_near_the_given_one() -> None:
    near = np.array([[30.0, 20.0], [20.0, 30.0]])
    table = transport(np.array([50, 50]), np.array([50, 50]), np.full((2, 2), 100), near, 100)
    assert table.tolist() == near.tolist()


def test_a_missing_language_does_not_cost_a_domain_its_quota() -> None:
    supply = np.array([[[50], [0]], [[50], [5]]])
    found = allocate(supply, quotas(np.array([20, 20]), np.array([20, 20]), np.array([40])), 40)
    assert found.take[..., 0].tolist() == [[20, 0], [15, 5]] and found.moved == 15


def test_unfilled_quotas_go_to_the_others_in_proportion() -> None:
    supply = np.array([[[5]], [[1000]], [[1000]]])
    found = allocate(supply, quotas(np.array([100, 60, 40]), np.array([200]), np.array([200])), 200)
    assert found.take.ravel().tolist() == [5, 117, 78] and found.moved == 95  # 95 shared out as 60 : 40


def test_no_quota_no_record() -> None:
    supply = np.array([[[5], [90]]])
    found = allocate(supply, quotas(np.array([50]), np.array([50, 0]), np.array([50])), 50)
    assert found.take.ravel().tolist() == [5, 0] and found.moved == 0


@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.integers(0, 10_000))
def test_apportioned_counts_sum_and_stay_within_one(weights: list[float], total: int) -> None:
    values = np.array(weights)
    counts = apportion(values, total)
    if values.sum() > 1e-3:
        assert counts.sum() == total
        assert np.abs(counts - values * total / values.sum()).max() <= 1 + 1e-6


def test_shares_and_counts_resolve_alike() -> None:
    shares = resolve(SelectConfig(total=200, quotas_domain={"a": 0.25, "*": 0.75}, length_buckets={64: 0.5, 16: 0.5}))
    counts = resolve(SelectConfig(total=200, quotas_domain={"a": 50, "*": 150}, length_buckets={16: 100, 64: 100}))
    assert [q.counts.tolist() for q in shares] == [q.counts.tolist() for q in counts] == [[50, 150], [200], [100, 100]]
    assert shares[2].names == ("1-16", "17-64")
    assert [shares[2].bucket(n) for n in (1, 16, 17, 64)] == [0, 0, 1, 1]
    assert [shares[0].place(name) for name in ("a", "b")] == [0, 1]
    assert resolve(SelectConfig(total=4, quotas_domain={"a": 1.0}))[0].place("b") is None


@pytest.mark.parametrize("total", [7, 100])
def test_largest_remainders_break_ties_by_order(total: int) -> None:
    assert apportion(np.ones(3), total).tolist() == [total // 3 + (i < total % 3) for i in range(3)]
