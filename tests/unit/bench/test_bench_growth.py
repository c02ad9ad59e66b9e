"""The fits find what synthetic costs were made of; points take turns; tables and picture say what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.growth import __main__ as script
from benchmarks.growth import axes, measure
from benchmarks.growth.fits import fit, fit_line, fit_power
from benchmarks.growth.job import open_source
from eagle3.errors import DataError

SIZES = [256.0, 512.0, 1024.0, 2048.0, 4096.0]
TINY = replace(axes.BASE, steps=2, length=16, hidden=128, vocab=64, draft_vocab=32)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.7, 2.0])
def test_a_power_is_found_exactly(exponent: float) -> None:
    found = fit(SIZES, [3.0 * x**exponent for x in SIZES])
    assert found.power.exponent == pytest.approx(exponent) and found.power.scale == pytest.approx(3.0)
    assert found.power.error == pytest.approx(0.0, abs=1e-9) and found.last == pytest.approx(exponent)
    assert not found.straight or exponent == 1.0


def test_the_standard_error_covers_the_truth_as_often_as_it_should() -> None:
    """Noise of 10% on the costs: the truth lies within two standard errors in most of 400 tries, not in all."""
    draw = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        found = fit_power(SIZES, [x**1.5 * np.exp(0.1 * draw.standard_normal()) for x in SIZES])
        assert found.error is not None
        inside += abs(found.exponent - 1.5) < 2 * found.error
    assert 0.78 < inside / 400 < 0.95  # Student's t with three degrees of freedom: 0.86


def test_a_fixed_part_makes_the_line_the_better_description() -> None:
    found = fit(SIZES, [5.0 + 0.01 * x for x in SIZES])
    assert found.straight and found.line.fixed == pytest.approx(5.0) and found.line.each == pytest.approx(0.01)
    assert found.power.exponent < 0.7 < found.last < 1.0 and found.line.off < 1e-9 < found.power.off


def test_small_points_weigh_as_much_as_large_ones() -> None:
    """A relative error on one point moves the line as far wherever the point stands."""
    costs = [2.0 + 0.5 * x for x in SIZES]
    low, high = [2 * costs[0], *costs[1:]], [*costs[:-1], 2 * costs[-1]]
    assert fit_line(SIZES, low).off == pytest.approx(fit_line(SIZES, high).off, rel=0.5)
    assert fit_line(SIZES, low).fixed > 20


@pytest.mark.parametrize(("x", "y"), [([1.0], [1.0]), ([1.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [0.0, 1.0])])
def test_what_cannot_be_fitted_is_refused(x: list[float], y: list[float]) -> None:
    with pytest.raises(DataError, match="no growth"):
        fit_power(x, y)


def test_every_call_runs_once_a_round_and_rounds_begin_elsewhere() -> None:
    said: list[str] = []
    kept: dict[str, list[float]] = {name: [] for name in "abcd"}
    measure.time_in_turns([(kept[name], lambda name=name: said.append(name)) for name in "abcd"], 2)
    assert "".join(said) == "abcd" + "abcd" + "cdab"
    assert all(len(seconds) == 2 for seconds in kept.values())


def test_axes_change_one_size_and_the_plain_side_keeps_to_its_memory() -> None:
    for axis in axes.axes():
        cases = [axis.case(value) for value in axis.values]
        assert len(set(cases)) == len(cases) >= 4
        assert list(axis.values) == sorted(axis.values)
        work = [axes.needed(case) for case in cases]
        assert work == sorted(work)
    cut = next(axis for axis in axes.axes() if axis.name == "cut")
    assert {axis_case.documents * axis_case.length for axis_case in map(cut.case, cut.values)} == {4096}
    points = measure.points_of(axes.chosen(["length"]), measure.SIDES, 2**30)
    sides = {side: [point.value for point in points if point.side == side] for side in measure.SIDES}
    assert (
        sides["redraft"][-1] == 4096 and sides["plain"] == sides["redraft"][: len(sides["plain"])] != sides["redraft"]
    )


def test_the_script_writes_tables_figures_and_a_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = [replace(axis, values=axis.values[:3]) for axis in axes.axes(TINY) if axis.name == "steps"]
    monkeypatch.setattr(script, "chosen", lambda names: few)
    assert script.main(["--rounds", "2", "--axes", "steps", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["growth.json", "growth.png", "growth.txt"]
    result = json.loads((tmp_path / "growth.json").read_text())
    assert [(row["axis"], row["side"]) for row in result["rows"]] == [("steps", "redraft"), ("steps", "plain")]
    for row in result["rows"]:
        assert len(row["rounds"]) == 3 and all(len(one) == 2 for one in row["rounds"])
        assert row["time"]["power"]["exponent"] == pytest.approx(
            np.polyfit(np.log(row["values"]), np.log(row["seconds"]), 1)[0]
        )
    assert "steps" in (tmp_path / "growth.txt").read_text()


def test_memory_is_what_the_step_raises_the_process_by(monkeypatch: pytest.MonkeyPatch) -> None:
    def sides(_case: object) -> tuple[dict[str, object], int]:
        held = torch.ones(8 << 20)  # built beforehand: does not count
        return {"redraft": lambda: float(torch.ones(16 << 20).sum() + held[0])}, 0

    monkeypatch.setattr(measure, "make_sides", sides)
    assert measure.raised_by(TINY, "redraft") == pytest.approx(4 * (16 << 20), rel=0.1)


def test_a_refused_argument_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--rounds", "0"]) == 2
    assert "--rounds" in capsys.readouterr().err


def test_the_jobs_samples_are_the_same_each_way() -> None:
    source = open_source("train", count=3, length=10, hidden=8, vocab=20)
    assert source is not None and open_source("val") is None
    sample = source.get(1)
    features, teacher = sample.features.clone().zero_(), sample.teacher.clone().zero_()
    source.fill(1, features, teacher, None)  # type: ignore[arg-type]
    tokens, mask = source.tokens(1)
    assert features.equal(sample.features) and teacher.equal(sample.teacher) and teacher.any()
    assert tokens.equal(sample.token_ids) and mask.equal(sample.loss_mask) and int(mask.sum()) == 5
    assert not source.get(2).features.equal(features)
