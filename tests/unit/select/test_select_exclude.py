"""Evaluation prompts stay out of the training set."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from select_sources import ask, sentence, write_lines

from data_prep.select.exclude import Excluded
from data_prep.select.prints import normalize
from eagle3.errors import DataError

DATA = Path(__file__).resolve().parents[3] / "data"


def judge(excluded: Excluded, *turns: str) -> str | None:
    return excluded.judge([normalize(turn) for turn in turns])


def test_each_way_of_meeting_an_evaluation_prompt(tmp_path: Path) -> None:
    prompt = "Explain how the moons of Jupiter were found, and by whom, in five sentences."
    excluded = Excluded([str(write_lines(tmp_path / "eval.jsonl", [ask(prompt), ask("Why?")]))], 0.7, 5)
    assert len(excluded) == 2
    assert judge(excluded, "something else", prompt.upper().replace(" ", "\n")) == "exact"
    assert judge(excluded, f"You are a teacher. {prompt} Be brief.") == "contained"
    assert judge(excluded, prompt.replace("five", "six")) == "near"
    assert judge(excluded, "why?") == "exact"
    assert judge(excluded, "Tell me why? I do not know, and nobody else does.") is None  # too short to be evidence
    assert judge(excluded, "Explain how the rings of Saturn came to be, in two sentences.") is None
    assert judge(excluded, "") is None and judge(excluded) is None


def test_a_long_text_with_all_the_same_shingles_is_not_contained(tmp_path: Path) -> None:
    words = sentence(random.Random(3), 8)
    excluded = Excluded([str(write_lines(tmp_path / "eval.jsonl", [ask(words)]))], 0.7, 5)
    overlapping = "  ".join(words[i : i + 6] for i in range(len(words)))  # every run of five, never the text
    assert words not in normalize(overlapping)
    assert judge(excluded, overlapping + " " + sentence(random.Random(4), 100)) is None
    assert judge(excluded, sentence(random.Random(4), 50) + " " + words) == "contained"


def test_published_forms_folders_and_gzip_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "sets"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [{"question": "one"}, {"problem": "two"}, {"prompt": "three"}])
    write_lines(
        folder / "b.jsonl", [{"turns": ["four", "five"]}, {"conversations": [{"from": "human", "value": "six"}]}]
    )
    with gzip.open(folder / "c.jsonl.gz", "wt") as handle:
        handle.write(json.dumps({"text": "seven"}) + "\n\n")
    assert Excluded([str(folder)], 0.7, 5).texts == sorted(["one", "two", "three", "four", "five", "six", "seven"])
    shipped = Excluded([str(DATA / "eval"), str(DATA / "eval" / "samples")], 0.7, 5)
    assert len(shipped) == 36 + 8 * 3 + 16  # three sets of 12, three of 8, and 8 of two turns


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{bad", ["eval.jsonl, record 2"]),
        ('{"id": 1}', ["eval.jsonl, record 2", "no evaluation prompt", "messages"]),
        ("[1]", ["eval.jsonl, record 2", "list"]),
        ('{"turns": [1]}', ["eval.jsonl, record 2"]),
        ('{"messages": [{"role": "user"}]}', ["eval.jsonl, record 2", "without content"]),
    ],
)
def test_a_bad_evaluation_prompt_is_one_line_with_its_place(tmp_path: Path, content: str, words: list[str]) -> None:
    path = write_lines(tmp_path / "eval.jsonl", [ask("fine"), content])
    with pytest.raises(DataError) as caught:
        Excluded([str(path)], 0.7, 5)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_missing_evaluation_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"evaluation prompts not found.*select\.exclude"):
        Excluded([str(tmp_path / "none.jsonl")], 0.7, 5)
