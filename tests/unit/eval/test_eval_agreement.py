"""One draft in two engines: what agrees, what is named, what cannot be compared."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3.errors import DataError
from eval.agreement import agreements, main
from eval.results import AcceptResult


def other_engine(result: AcceptResult) -> AcceptResult:
    return replace(copy.deepcopy(result), engine="sglang")


def test_equal_counts_agree(accept_result: AcceptResult) -> None:
    for row in agreements(accept_result, other_engine(accept_result)):
        assert row.first == row.second and row.equal > 0 and not row.parted


def test_a_prompt_with_other_counts_is_named_and_moves_tau(accept_result: AcceptResult) -> None:
    second = other_engine(accept_result)
    changed = second.served[0].sets[0].prompts[0]
    changed.verifies += 3
    (row, *_) = agreements(accept_result, second)
    assert row.parted == (f"{second.served[0].sets[0].summary.name}/{changed.id}",)
    assert row.second < row.first


def test_prompts_that_one_engine_lost_are_left_out(accept_result: AcceptResult) -> None:
    second = other_engine(accept_result)
    lost = second.served[0].sets[0].prompts.pop()
    (row, *_) = agreements(accept_result, second)
    assert lost.id not in "".join(row.parted) and row.first == row.second


@pytest.mark.parametrize(
    "change, named",
    [
        ({"num_steps": 9}, "num_steps"),
        ({"temperature": 1.0}, "temperature"),
        ({"served": []}, "no way of serving in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(accept_result: AcceptResult, change: dict, named: str) -> None:
    with pytest.raises(DataError, match=named):
        agreements(accept_result, replace(other_engine(accept_result), **change))


def test_other_prompts_are_refused(accept_result: AcceptResult) -> None:
    second = other_engine(accept_result)
    second.served[0].sets[0].key = "0000"
    with pytest.raises(DataError, match="other prompts"):
        agreements(accept_result, second)


def test_the_command_says_how_far_apart(
    accept_result: AcceptResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = other_engine(accept_result)
    for name, result in (("a", accept_result), ("b", second)):
        result.save(tmp_path / name / "results.json")
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    for served in second.served:
        for row in (row for one in served.sets for row in one.prompts):
            row.verifies *= 2
    second.save(tmp_path / "b" / "results.json")
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "eval.probe live" in capsys.readouterr().out
    assert main([str(tmp_path / "a"), str(tmp_path / "nowhere")]) == 2
