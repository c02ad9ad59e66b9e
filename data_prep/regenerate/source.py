"""The conversations to be answered: read from JSON lines, and cut to the prompts that a server is asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.conversations import ID_KEYS, MEND, decoded_line, line_mend, to_conversation
from eagle3.errors import DataError

ASKING = ("user", "tool")  # roles after which the assistant speaks


@dataclass(frozen=True)
class Asked:
    """One record of the source.

    Args:
        id: unique in the source.
        record: the raw record without its messages; what is not known here is handed on.
        messages: OpenAI-style, normalized.
        tools: schemas offered in it, or None.
    """

    id: str
    record: dict[str, Any] = field(repr=False)
    messages: list[dict] = field(repr=False)
    tools: list | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Survey:
    """What a whole source holds."""

    sha256: str
    records: int
    with_tools: int


def read_source(path: Path) -> Iterator[Asked]:
    """Yield the records in order.

    Raises:
        DataError: no such file, a line is no conversation, or an id stands twice; `where` names the record.
    """
    if not path.is_file():
        raise DataError("conversations not found", where=str(path), mend="give an existing JSON lines file")
    seen: set[str] = set()
    number = 0
    with open(path, "rb") as lines:
        for line in lines:
            if not line.strip():
                continue
            number += 1
            asked = _read(line, number, path)
            if asked.id in seen:
                where = f"{path}, record {number}"
                raise DataError("the same id twice", where=where, why=repr(asked.id), mend="give each its own id")
            seen.add(asked.id)
            yield asked


def survey(path: Path) -> Survey:
    """Read the source once, so that a bad record is met before anything is asked.

    Raises:
        DataError: as `read_source`; or there is no record at all.
    """
    count = tools = 0
    for asked in read_source(path):
        count += 1
        tools += bool(asked.tools)
    if not count:
        mend = "give it one conversation a line"
        raise DataError("no conversations to answer", where=str(path), why="the file holds no record", mend=mend)
    with open(path, "rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return Survey(digest, count, tools)


def _read(line: bytes, number: int, path: Path) -> Asked:
    where = f"{path}, record {number}"
    try:
        record = decoded_line(line)
    except (ValueError, RecursionError) as err:
        raise DataError("not a JSON line", where=where, why=str(err), mend=line_mend(err)) from None
    if not isinstance(record, dict):
        raise DataError("record is not an object", where=where, why=f"found {type(record).__name__}", mend=MEND)
    given = next((str(record[key]) for key in ID_KEYS if record.get(key) not in (None, "")), f"{number:07d}")
    conversation = to_conversation(record, given, str(path), where)
    rest = {k: v for k, v in record.items() if k not in ("id", "messages", "conversations", "conversation", "system")}
    return Asked(given, rest, conversation.messages, conversation.tools)


def asking_lengths(messages: list[dict], turns: str) -> list[int]:
    """Numbers of messages after which the target is asked to speak, in order.

    `turns="last"`: after the last user or tool message, assistant messages at the end taken off; nothing when another
    role stands there. `turns="all"`: after each user or tool message that an assistant message follows, and at the end.
    """
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end or messages[end - 1]["role"] not in ASKING:
        return []
    if turns == "last":
        return [end]
    inner = [i for i in range(1, end) if messages[i]["role"] == "assistant" and messages[i - 1]["role"] in ASKING]
    return [*inner, end]


def for_request(messages: list[dict]) -> list[dict]:
    """Messages as the chat endpoint takes them: arguments of tool calls as JSON text."""
    return [
        {**message, "tool_calls": _calls(message)} if message.get("tool_calls") else message for message in messages
    ]


def _calls(message: dict) -> list[dict]:
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function")
        if isinstance(function, dict) and not isinstance(function.get("arguments"), str):
            text = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
            call = {**call, "function": {**function, "arguments": text}}
        calls.append(call)
    return calls
