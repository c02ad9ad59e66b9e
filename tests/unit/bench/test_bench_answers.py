"""Questions with answers by the target and by others: what the comparison of authors is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.quality.answers import HELD_OUT, main, write_held_out
from benchmarks.quality.questions import CHARACTERS, write_questions
from data_prep.conversations import read_conversations
from data_prep.prepare import in_validation


def test_questions_and_documented_answers_share_their_ids(tmp_path: Path) -> None:
    count = write_questions(tmp_path, 60, seed=3)
    prompts = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    answered = [json.loads(line) for line in (tmp_path / "foreign.jsonl").read_text().splitlines()]
    assert count == len(prompts) == len(answered) == 60
    for prompt, whole in zip(prompts, answered, strict=True):
        assert whole["id"] == prompt["id"] and whole["messages"][:1] == prompt["messages"]
        assert CHARACTERS[0] <= len(whole["messages"][1]["content"]) <= CHARACTERS[1]
    assert len({whole["messages"][1]["content"] for whole in answered}) == 60
    again = tmp_path / "again"
    write_questions(again, 60, seed=3)
    assert (again / "foreign.jsonl").read_bytes() == (tmp_path / "foreign.jsonl").read_bytes()


def test_the_engine_is_asked_what_neither_draft_learns(tmp_path: Path) -> None:
    write_questions(tmp_path, 60)
    write_held_out(tmp_path, seed=0)
    asked = {json.loads(line)["id"] for line in (tmp_path / "asked.jsonl").read_text().splitlines()}
    known = [one.record_id for one in read_conversations([str(tmp_path / "foreign.jsonl")])]
    assert asked == {name for name in known if in_validation(name, 0, HELD_OUT)} and 0 < len(asked) < 30


@pytest.mark.parametrize(
    ("wrong", "named"), [(["--questions", "5"], "--questions"), (["--preset", "nothere"], "conf/nothere")]
)
def test_a_wrong_argument_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], named: str
) -> None:
    assert main([*wrong, "--work", str(tmp_path / "work")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and named in told
    assert not (tmp_path / "work").exists()
