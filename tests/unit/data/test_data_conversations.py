"""Reading conversations: formats, ids, and one clear line for each kind of bad input."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from data_prep.conversations import Conversation, read_conversations, to_conversation
from eagle3.errors import DataError

TALK = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "blue"}]


def write(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def read(*sources: str, split: str = "train") -> list[Conversation]:
    return list(read_conversations(list(sources), split))


def test_openai_lines(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", {"id": 7, "messages": TALK}, {"messages": TALK})
    first, second = read(source)
    assert first == Conversation("7", TALK, source)
    assert second.record_id == "a/0000002"


def test_sharegpt_lines_and_list(tmp_path: Path) -> None:
    record = {
        "id": "x",
        "system": "be kind",
        "conversations": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "blue"}],
    }
    lines = write(tmp_path / "a.jsonl", record)
    (tmp_path / "b.json").write_text(json.dumps([record | {"id": "y"}]))
    for conv in read(lines, str(tmp_path / "b.json")):
        assert conv.messages == [{"role": "system", "content": "be kind"}, *TALK]


def test_saved_dataset_drops_filled_in_nulls(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": '{"n": 1}'}}
    messages = [TALK[0] | {"tool_calls": None}, {"role": "assistant", "content": "x", "tool_calls": [call]}]
    rows = datasets.Dataset.from_list([{"id": "r", "messages": messages}])
    rows.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"test": rows}).save_to_disk(str(tmp_path / "split"))
    (conv,) = read(str(tmp_path / "plain"))
    assert conv.messages[0] == TALK[0]
    assert conv.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"n": 1}}
    assert [c.messages for c in read(str(tmp_path / "split"), split="test")] == [conv.messages]
    with pytest.raises(DataError, match=r"no such split.*'train'"):
        read(str(tmp_path / "split"))


def test_folder_of_files_numbers_records_through(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"messages": TALK})
    write(tmp_path / "b.jsonl", {"messages": TALK})
    assert len({conv.record_id for conv in read(str(tmp_path))}) == 2


def test_text_parts_tools_and_reasoning(tmp_path: Path) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "wh"}, {"type": "text", "text": "y"}]}
    answer = {"role": "assistant", "content": "blue", "reasoning": "light"}
    (conv,) = read(write(tmp_path / "a.jsonl", {"messages": [parts, answer], "tools": '[{"type": "function"}]'}))
    assert conv.messages[0] == TALK[0]
    assert conv.messages[1] == {"role": "assistant", "content": "blue", "reasoning_content": "light"}
    assert conv.tools == [{"type": "function"}]


def test_ids_of_two_sources_are_kept_apart(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", {"id": "0", "messages": TALK})
    two = write(tmp_path / "two.jsonl", {"id": "0", "messages": TALK})
    (tmp_path / "sub").mkdir()
    three = write(tmp_path / "sub" / "one.jsonl", {"messages": TALK})
    assert [conv.record_id for conv in read(one, two, three)] == ["0", "two/0", "one-2/0000001"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "hello"}, "record without messages"),
        ({"messages": []}, "record without messages"),
        ({"messages": ["hello"]}, "message 1.*found str"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role.*'narrator'"),
        ({"messages": [{"role": "user", "content": None}]}, "message without content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content is not text"),
        ({"messages": TALK, "tools": "{oops"}, "`tools` is not JSON"),
        ({"id": "first", "messages": TALK}, "two records with one id"),
        ([1], "record is not an object"),
    ],
)
def test_bad_record_is_named(tmp_path: Path, record: object, message: str) -> None:
    source = write(tmp_path / "a.jsonl", {"id": "first", "messages": TALK}, record)
    with pytest.raises(DataError) as caught:
        read(source)
    line = str(caught.value)
    assert "a.jsonl, record 2" in line and "\n" not in line
    with pytest.raises(DataError, match=message):
        read(source)


def test_torn_line_and_bad_bytes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps({"messages": TALK}).encode() + b'\n\n{"messages": [')
    with pytest.raises(DataError, match=r"a\.jsonl, record 2, line 3"):
        read(str(path))
    path.write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(DataError, match=r"record 1"):
        read(str(path))


@pytest.mark.parametrize("name", ["gone.jsonl", "./gone", "empty", "notes.txt"])
def test_missing_sources(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=name):
        read(name)


def test_what_a_record_says_of_its_answer_is_kept() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    record = {
        "system": "Be kind.",
        "messages": [
            {"role": "user", "content": "why"},
            {"role": "assistant", "content": None, "tool_calls": [call, {**call, "function": {"name": "g"}}]},
        ],
        "domain": "code",
        "language": "en",
        "provenance": {"source": "x"},
        "finish_reason": "tool_calls",
        "generation": {"template_kwargs": {"thinking": False}},
        "token_ids": {"prompt": [1], "answer": [2, 3]},
    }
    conv = to_conversation(record, "r", "s", "here")
    assert (conv.domain, conv.language, conv.provenance) == ("code", "en", {"source": "x"})
    assert (conv.finish_reason, conv.truncated) == ("tool_calls", False)
    assert conv.arguments == {2: ['{"a":1}', None]} and conv.messages[2]["tool_calls"][0]["function"]["arguments"] == {
        "a": 1
    }
    assert conv.template_kwargs == {"thinking": False} and conv.token_ids == {"prompt": [1], "answer": [2, 3]}
    bare = to_conversation({"messages": record["messages"]}, "r", "s", "here")
    assert (bare.domain, bare.provenance, bare.token_ids, bare.truncated) == ("", {}, None, False)


def test_an_answer_that_was_cut_off_need_not_be_whole() -> None:
    half = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":'}}
    said = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "", "tool_calls": [half]}]
    assert to_conversation({"messages": said, "finish_reason": "length"}, "r", "s", "here").truncated
    with pytest.raises(DataError, match="not JSON"):
        to_conversation({"messages": said}, "r", "s", "here")


@pytest.mark.parametrize(
    "given", [[1], {"prompt": [1]}, {"prompt": [1], "answer": []}, {"prompt": [1], "answer": ["a"]}]
)
def test_bad_token_ids_are_refused(given: object) -> None:
    said = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "blue"}]
    with pytest.raises(DataError, match=r"bad token ids \[here\]"):
        to_conversation({"messages": said, "token_ids": given}, "r", "s", "here")
