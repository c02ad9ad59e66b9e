"""Warm-up and cosine."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from train.schedule import learning_rate


def rates(total: int, **settings: float) -> list[float]:
    base = {"peak": 2.0, "warmup_ratio": 0.2, "min_ratio": 0.1}
    return [learning_rate(step, total, **{**base, **settings}) for step in range(total + 1)]


def test_warms_up_linearly_to_the_peak_then_falls_to_the_floor() -> None:
    lr = rates(20)
    assert lr[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert lr[4] == pytest.approx(2.0)
    assert all(a > b for a, b in itertools.pairwise(lr[4:]))
    assert lr[12] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))  # half-way down
    assert lr[20] == pytest.approx(0.2)


@pytest.mark.filterwarnings("ignore:Detected call of")  # no optimizer step is needed to see the rates
def test_falls_on_the_cosine_that_torch_draws() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=27, eta_min=0.1)
    theirs = []
    for _ in range(27):
        theirs.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    ours = [learning_rate(s, 30, peak=1.0, warmup_ratio=0.1, min_ratio=0.1) for s in range(30)]
    assert ours[3:] == pytest.approx(theirs)
    assert ours[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])  # no step is spent at rate 0


def test_short_runs_and_no_warmup() -> None:
    assert learning_rate(0, 1, peak=1.0, warmup_ratio=0.0, min_ratio=0.0) == 1.0
    assert learning_rate(0, 1, peak=1.0, warmup_ratio=0.015, min_ratio=0.0) == 1.0
    assert all(math.isfinite(rate) and rate > 0 for rate in rates(2)[:2])


def test_linear_falls_in_equal_parts() -> None:
    lr = rates(20, schedule="linear")
    assert lr[4] == pytest.approx(2.0) and lr[12] == pytest.approx(1.1) and lr[20] == pytest.approx(0.2)
    falls = [a - b for a, b in itertools.pairwise(lr[4:])]
    assert falls == pytest.approx([falls[0]] * len(falls))


def test_wsd_stays_at_the_peak_until_its_last_part() -> None:
    lr = rates(20, schedule="wsd", decay_ratio=0.25)
    assert lr[3:16] == pytest.approx([2.0] * 13)
    assert lr[15] > lr[16] > lr[19] > lr[20] == pytest.approx(0.2)
    # A fall longer than what the warm-up leaves begins right after it.
    assert rates(20, schedule="wsd", decay_ratio=1.0) == pytest.approx(rates(20, schedule="linear"))
