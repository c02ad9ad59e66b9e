"""The writer of answers, and the shipped prompts and answers themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep.conversations import read_conversations
from eagle3.errors import DataError
from scripts.make_prompts import DATA, build_prompts, read_topics
from scripts.write_answers import plan_batches, read_prompts, write_answers


class Echo:
    """Answers with the prompt's length and the batch it came in, so that another batching would show."""

    def __init__(self, fail_after: int = 10**9) -> None:
        self.calls, self.fail_after = 0, fail_after

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        return list(messages[-1]["content"].encode())

    def answer(self, prompts: list[list[int]]) -> list[tuple[str, int, str]]:
        if self.calls == self.fail_after:
            raise KeyboardInterrupt
        self.calls += 1
        return [(f"{len(row)} of {[len(p) for p in prompts]}", 3, "stop") for row in prompts]


def prompts(count: int) -> list[dict]:
    return [{"id": f"p{i}", "messages": [{"role": "user", "content": "x" * (i * 7 % 11)}]} for i in range(count)]


def quiet(line: str) -> None:
    assert "answers" in line


def test_batches_hold_each_prompt_once_longest_first() -> None:
    lengths = [3, 9, 9, 1, 5]
    assert list(plan_batches(lengths, 2)) == [[1, 2], [4, 0], [3]]


def test_stopped_run_goes_on_and_ends_like_an_unbroken_one(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    counts = write_answers(prompts(10), Echo(), whole, 4, quiet)
    assert counts == {"records": 10, "answer_tokens": 30, "stopped": 10, "empty": 0}
    with pytest.raises(KeyboardInterrupt):
        write_answers(prompts(10), Echo(fail_after=2), broken, 4, quiet)
    part = tmp_path / "broken.jsonl.part"
    assert not broken.exists()
    part.write_bytes(part.read_bytes()[:-9])  # killed in mid-write: the last record of the second batch is torn
    again = Echo()
    write_answers(prompts(10), again, broken, 4, quiet)
    assert again.calls == 2 and broken.read_bytes() == whole.read_bytes() and not part.exists()
    assert [json.loads(line)["id"] for line in whole.read_text().splitlines()] == [f"p{i}" for i in range(10)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("{oops\n", "line 1.*not a JSON|not a JSON line.*line 1"),
        ('{"id": "a", "messages": []}\n', "not a prompt"),
        ('{"id": "a", "messages": [{"role": "assistant", "content": "x"}]}\n', "not a prompt"),
        ('{"id": "a", "messages": [{"role": "user", "content": "x"}]}\n' * 2, "line 2.*the same id|same id.*line 2"),
    ],
)
def test_bad_prompts_are_named(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(lines)
    with pytest.raises(DataError, match=message):
        read_prompts(tmp_path / "p.jsonl")


def test_shipped_prompts_are_what_the_topics_give() -> None:
    assert read_prompts(DATA / "demo_prompts.jsonl") == build_prompts(read_topics(DATA / "prompt_topics.txt"))


def test_shipped_answers_answer_the_prompts() -> None:
    asked = read_prompts(DATA / "demo_prompts.jsonl")
    told = list(read_conversations([str(DATA / "demo_answers.jsonl")]))
    assert [(c.record_id, c.messages[:-1]) for c in told] == [(p["id"], p["messages"]) for p in asked]
    assert all(c.messages[-1]["role"] == "assistant" and c.messages[-1]["content"].strip() for c in told)
    tokens = [json.loads(line)["answer_tokens"] for line in (DATA / "demo_answers.jsonl").read_text().splitlines()]
    assert sum(tokens) >= 70_000 and max(tokens) == 128


def test_held_out_prompts_are_not_trained_on() -> None:
    trained = {p["messages"][0]["content"].lower() for p in read_prompts(DATA / "demo_prompts.jsonl")}
    for name in ("chat", "explain", "list"):
        held = read_prompts(DATA / "eval" / f"{name}.jsonl")
        assert len(held) == 12 and not {p["messages"][0]["content"].lower() for p in held} & trained
