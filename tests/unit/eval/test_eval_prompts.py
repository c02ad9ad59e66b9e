"""Prompt sets: what is read, what is refused, and how a prompt becomes tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eval_models import make_tokenizer

from eagle3.errors import DataError
from eval.prompts import Prompt, encode_prompt, read_prompt_set, read_prompt_sets


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return path


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_reads_in_order_and_names_by_stem(tmp_path) -> None:
    path = write(tmp_path / "chat.jsonl", {"id": "a", "messages": user("x")}, "", {"messages": user("y")})
    one = read_prompt_set(path)
    assert one.name == "chat"
    assert [(p.id, p.messages[0]["content"]) for p in one.prompts] == [("a", "x"), ("3", "y")]
    assert [p.id for p in read_prompt_set(path, max_prompts=1).prompts] == ["a"]


def test_key_follows_content_only(tmp_path) -> None:
    first = read_prompt_set(write(tmp_path / "a.jsonl", {"id": "1", "messages": user("x")}))
    same = read_prompt_set(write(tmp_path / "b.jsonl", {"id": "2", "messages": user("x")}))
    other = read_prompt_set(write(tmp_path / "c.jsonl", {"id": "1", "messages": user("z")}))
    assert first.key == same.key != other.key


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{not json"], "line 1"),
        ([{"id": "a", "messages": user("x")}, {"id": "b"}], "without messages .*line 2"),
        ([{"id": "a", "messages": []}], "without messages"),
        ([["a list"]], "without messages"),
        ([{"id": "a", "messages": [*user("x"), {"role": "assistant", "content": "y"}]}], "ends with the assistant"),
        ([{"id": "a", "messages": user("x")}] * 2, "share an id"),
        ([""], "empty"),
    ],
)
def test_refusals_name_the_line(tmp_path, lines, words) -> None:
    with pytest.raises(DataError, match=words) as error:
        read_prompt_set(write(tmp_path / "set.jsonl", *lines))
    assert "set.jsonl" in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_and_equal_names(tmp_path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        read_prompt_set(tmp_path / "none.jsonl")
    (tmp_path / "other").mkdir()
    paths = [write(folder / "chat.jsonl", {"messages": user("x")}) for folder in (tmp_path, tmp_path / "other")]
    with pytest.raises(DataError, match="share a name"):
        read_prompt_sets([str(path) for path in paths])


def test_encoding_ends_where_the_answer_begins() -> None:
    tokenizer = make_tokenizer()
    ids = encode_prompt(tokenizer, Prompt("a", user("b c")))
    assert tokenizer.convert_ids_to_tokens(ids) == ["<user>", "b", "c", "<assistant>"]
    thinking = encode_prompt(tokenizer, Prompt("a", user("b")), {"thinking": True})
    assert tokenizer.convert_ids_to_tokens(thinking) == ["<user>", "b", "<assistant>", "<think>"]


def test_a_refusing_template_is_one_line() -> None:
    with pytest.raises(DataError, match=r"refuses a prompt .*: no systems here"):
        encode_prompt(make_tokenizer(), Prompt("a", [{"role": "system", "content": "b"}]))
