"""The numbers: pooling, predicted tau, intervals, repetition, and results that survive the disk."""

from __future__ import annotations

import json

import pytest

from eagle3.errors import IntegrityError
from eval.engines.base import Generation, chain_counts
from eval.results import AcceptResult, Baseline, predicted_tau, prompt_result, summarize, unique_bigrams


def made(kept: list[int], seconds: float, tokens: list[int] | None = None) -> Generation:
    """A generation of 2 steps whose verifies kept the given counts, at 1 s of prefill."""
    histogram = [kept.count(c) for c in range(3)]
    tried, right = chain_counts(histogram)
    tokens = tokens if tokens is not None else list(range(1 + sum(kept) + len(kept)))
    return Generation(tokens, len(kept), sum(kept), 2 * len(kept), histogram, tried, right, seconds + 1.0, 1.0, 0.5)


def test_chain_counts() -> None:
    assert chain_counts([5, 3, 2]) == ([10, 5], [5, 2])


def test_pooling_sums_counts_rather_than_averaging_rates() -> None:
    rows = [
        prompt_result("a", made([2, 2, 1, 0], 2.0), Baseline(10, 3.0, True)),  # 10 tokens, 9 after the first
        prompt_result("b", made([0], 1.0), Baseline(2, 0.5, False, 1, 2.5)),  # 2 tokens
    ]
    one = summarize("chat", rows)
    assert one.tau == pytest.approx(1 + 5 / 5)
    assert one.acceptance == [pytest.approx(3 / 5), pytest.approx(2 / 3)]
    assert one.reach == [pytest.approx(3 / 5), pytest.approx(2 / 5)]
    assert one.correct_histogram == [2, 1, 2]
    assert one.tokens_per_second == pytest.approx(10 / 3)
    assert one.baseline_tokens_per_second == pytest.approx(10 / 3.5)
    assert one.speedup == pytest.approx(3.5 / 3)
    assert one.speedup_median == pytest.approx((1.5 + 0.5) / 2)
    assert one.draft_share == pytest.approx(1 / 3)
    assert (one.same_tokens, one.proposed, one.tokens) == (1, 10, 12)
    assert one.tau_low == 1.0 < one.tau < one.tau_high  # resampling only "b" gives 1, only "a" 2.25


def test_nothing_measured_is_none_rather_than_zero() -> None:
    one = summarize("chat", [prompt_result("a", made([], 0.0, tokens=[1]), None)])
    assert (one.tau, one.tau_low, one.tau_high) == (1.0, 1.0, 1.0)
    assert one.acceptance == [None, None]
    assert (one.speedup, one.same_tokens, one.tokens_per_second, one.tau_not_looping) == (None, None, None, 1.0)


def test_predicted_tau() -> None:
    assert predicted_tau([0.5, 0.4, 0.2, 0.9], 3) == pytest.approx(1 + 0.5 + 0.2 + 0.04)
    assert predicted_tau([0.5, 0.4], 3) is None
    assert predicted_tau(None, 1) is None


def test_repetition_is_flagged_and_tau_given_without_it() -> None:
    loop = [1, 2, 3] * 8
    assert unique_bigrams(loop) == pytest.approx(3 / 23)
    assert unique_bigrams([1]) == 1.0
    rows = [
        prompt_result("loop", made([2] * 8, 1.0, loop), None),
        prompt_result("text", made([0] * 20, 1.0), None),
        prompt_result("short", made([2] * 2, 1.0, [1, 1, 1, 1]), None),
    ]
    one = summarize("chat", rows)
    assert one.looping == ["loop"]
    assert one.tau_not_looping == pytest.approx(1 + 4 / 22)
    assert one.tau == pytest.approx(1 + 20 / 30)


def test_results_survive_the_disk(tmp_path, accept_result) -> None:
    accept_result.save(tmp_path / "results.json")
    assert AcceptResult.load(tmp_path / "results.json") == accept_result


def test_foreign_results_are_refused_in_one_line(tmp_path, accept_result) -> None:
    path = tmp_path / "results.json"
    with pytest.raises(IntegrityError, match="not found"):
        AcceptResult.load(path)
    accept_result.save(path)
    whole = json.loads(path.read_text())
    for broken in ({**whole, "format": 99}, {**whole, "extra": 1}, {**whole, "served": [{}]}, [1]):
        path.write_text(json.dumps(broken))
        with pytest.raises(IntegrityError, match="run the eval stage") as error:
            AcceptResult.load(path)
        assert "\n" not in str(error.value)
    path.write_text(json.dumps(whole)[:-40])
    with pytest.raises(IntegrityError, match="not a readable JSON"):
        AcceptResult.load(path)
