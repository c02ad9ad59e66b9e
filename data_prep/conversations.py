"""Conversations from JSON lines, ShareGPT files and HF `datasets`, as one stream of OpenAI-style messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.checked_json import LINE_CHECKSUM, read_checked, without_checksum
from eagle3.errors import DataError

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
ID_KEYS = ("id", "record_id", "conversation_id", "uuid")
ANSWERS = "answers.jsonl"  # as the regenerate stage names its file
FILE_SUFFIXES = (".jsonl", ".json")
MEND = "fix or drop the record"


@dataclass(frozen=True)
class Conversation:
    """One conversation.

    Args:
        record_id: unique over all sources of a run.
        messages: OpenAI-style dicts: `role` in system, developer, user, assistant, tool; `content` a string; on
            assistant turns perhaps `tool_calls` (arguments decoded from JSON) and `reasoning_content`.
        source: the entry of `data.sources` it came from.
        tools: OpenAI tool schemas offered in it, or None.
        arguments: by message number, the arguments of its tool calls as the record spells them (None where it gives
            them decoded): what the model wrote, where servers decode and print them anew for later turns.
        truncated: whether the last answer was cut off: `truncated` of the record, or `finish_reason` "length".
        finish_reason: why the last answer ended, as the record says, or "".
        domain: what the record is about, or "".
        language: its language, or "".
        provenance: where the record came from, as its maker noted.
        template_kwargs: chat template arguments with which the last answer was asked for (`generation` of the record).
        token_ids: the very tokens of the last exchange, `prompt` and `answer`, where the server gave them.
    """

    record_id: str
    messages: list[dict] = field(repr=False)
    source: str
    tools: list | None = field(default=None, repr=False)
    arguments: dict[int, list[str | None]] = field(default_factory=dict, repr=False)
    truncated: bool = False
    finish_reason: str = ""
    domain: str = ""
    language: str = ""
    provenance: dict[str, Any] = field(default_factory=dict, repr=False)
    template_kwargs: dict[str, Any] = field(default_factory=dict, repr=False)
    token_ids: dict[str, list[int]] | None = field(default=None, repr=False)


def read_conversations(sources: list[str], split: str = "train") -> Iterator[Conversation]:
    """Yield the conversations of all sources, in order.

    Args:
        sources: JSON lines files (`messages`, or ShareGPT `conversations`), JSON files holding a list of such records,
            folders of HF `datasets.save_to_disk` or of JSON lines files, or names (`name` or `name:config`) that
            `datasets.load_dataset` knows.
        split: split taken from HF datasets that have splits.

    A record without an id is named after its source and number. An id that another source took already gets its
    source's name in front.

    Raises:
        DataError: a source is missing or a record is malformed; `where` names source and record (counted from 1).
    """
    seen: set[str] = set()
    names: set[str] = set()
    for index, source in enumerate(sources):
        stem = Path(source.rstrip("/")).stem
        name = f"{stem}-{index}" if stem in names else stem
        names.add(name)
        own: set[str] = set()
        for where, number, record in _records(source, split):
            given = next((str(record[key]) for key in ID_KEYS if record.get(key) not in (None, "")), None)
            if given is not None and given in own:
                raise DataError(
                    "two records with one id", where=where, why=f"{given!r} stands earlier in the same source",
                    mend="give each record its own id",
                )  # fmt: skip
            own.add(given or "")
            record_id = given if given is not None and given not in seen else f"{name}/{given or f'{number:07d}'}"
            if record_id in seen:
                raise DataError(
                    "two records with one id", where=where, why=repr(record_id), mend="give each record its own id"
                )
            seen.add(record_id)
            yield to_conversation(record, record_id, source, where)


def to_conversation(record: dict, record_id: str, source: str, where: str) -> Conversation:
    """Normalize one raw record. Raises DataError naming `where`."""
    raw = next((record[k] for k in ("messages", "conversations", "conversation") if record.get(k) is not None), None)
    if not isinstance(raw, list) or not raw:
        found = f"keys found: {sorted(record)}"
        if raw is not None:
            found = "found an empty list" if raw == [] else f"found a {type(raw).__name__}"
        raise DataError(
            "record without messages", where=where, why=found,
            mend="give a non-empty list `messages` (role, content) or `conversations` (from, value)",
        )  # fmt: skip
    finish_reason = str(record.get("finish_reason") or "")
    truncated = bool(record.get("truncated")) or finish_reason == "length"
    messages = [
        _message(turn, f"{where}, message {i}", cut=truncated and i == len(raw)) for i, turn in enumerate(raw, start=1)
    ]
    arguments = {i: spelt for i, turn in enumerate(raw) if any(spelt := _spelt_arguments(turn))}
    if isinstance(record.get("system"), str) and record["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": record["system"]})
        arguments = {i + 1: spelt for i, spelt in arguments.items()}
    generation, provenance = record.get("generation"), record.get("provenance")
    served_kwargs = generation.get("template_kwargs") if isinstance(generation, dict) else None
    return Conversation(
        record_id,
        messages,
        source,
        _tools(record.get("tools"), where),
        arguments=arguments,
        truncated=truncated,
        finish_reason=finish_reason,
        domain=str(record.get("domain") or ""),
        language=str(record.get("language") or ""),
        provenance=provenance if isinstance(provenance, dict) else {},
        template_kwargs=served_kwargs if isinstance(served_kwargs, dict) else {},
        token_ids=_token_ids(record.get("token_ids"), where),
    )


def _token_ids(given: Any, where: str) -> dict[str, list[int]] | None:
    if given is None:
        return None
    ids: dict[str, Any] = {key: given.get(key) for key in ("prompt", "answer")} if isinstance(given, dict) else {}
    sound = (isinstance(one, list) and one and all(isinstance(token, int) for token in one) for one in ids.values())
    if not ids or not all(sound):
        raise DataError("bad token ids", where=where, mend="give `token_ids` two lists, `prompt` and `answer`, or none")
    return ids


def _spelt_arguments(turn: dict) -> list[str | None]:
    """Arguments of a raw turn's tool calls where they are given as text."""
    calls = turn.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    given = [function.get("arguments") if isinstance(function, dict) else None for function in functions]
    return [text if isinstance(text, str) and text else None for text in given]


def _tools(raw: Any, where: str) -> list | None:
    if isinstance(raw, str) and raw.strip():
        raw = _decoded(raw, "tools", where)
    if not raw:
        return None
    if not isinstance(raw, list):
        raise DataError("bad tools", where=where, why=f"found {type(raw).__name__}", mend="give a list of tool schemas")
    return [_without_none(tool) for tool in raw]


def _message(turn: Any, where: str, *, cut: bool = False) -> dict:
    if not isinstance(turn, dict):
        raise DataError("message is not an object", where=where, why=f"found {type(turn).__name__}", mend=MEND)
    name = turn.get("role") or turn.get("from")
    role = ROLES.get(str(name).lower())
    if role is None:
        raise DataError("unknown role", where=where, why=f"found {name!r}", mend=f"use one of {', '.join(ROLES)}")
    content = turn["content"] if "content" in turn else turn.get("value")
    message: dict[str, Any] = {"role": role, "content": _text(content, where)}
    extra = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value") and v not in (None, "")}
    if isinstance(extra.get("reasoning"), str):
        extra.setdefault("reasoning_content", extra.pop("reasoning"))
    if extra.get("tool_calls"):
        if not isinstance(extra["tool_calls"], list):
            found = type(extra["tool_calls"]).__name__
            raise DataError("tool calls are no list", where=where, why=f"found {found}", mend=MEND)
        extra["tool_calls"] = [_tool_call(call, where, cut=cut) for call in extra["tool_calls"]]
    else:
        extra.pop("tool_calls", None)
        if content is None and not extra.get("reasoning_content"):
            raise DataError("message without content", where=where, mend="give `content` (or tool calls)")
    return message | _without_none(extra)


def _text(content: Any, where: str) -> str:
    """A content as one string; parts of type text are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type", "text") == "text"]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise DataError("content is not text", where=where, mend="drop records with images or other media")
    return "".join(str(text) for text in texts)


def _tool_call(call: Any, where: str, *, cut: bool = False) -> dict:
    """Decode `arguments` from their JSON string: chat templates print them as JSON, and would quote a string twice.

    The arguments of an answer that was `cut` off need not be JSON any more.
    """
    if not isinstance(call, dict):
        raise DataError("tool call is not an object", where=where, why=f"found {type(call).__name__}", mend=MEND)
    call = _without_none(call)
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str) and not cut:
        call["function"] = function | {"arguments": _decoded(function["arguments"] or "{}", "arguments", where)}
    return call


def _decoded(text: str, name: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as err:
        raise DataError(f"`{name}` is not JSON", where=where, why=str(err), mend="fix or drop the record") from None


def _without_none(value: Any) -> Any:
    """Drop the keys that a columnar format filled with null."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_none(v) for v in value]
    return value


def _records(source: str, split: str) -> Iterator[tuple[str, int, dict]]:
    """Yield (where, number, raw record) of one source."""
    path = Path(source)
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix in FILE_SUFFIXES)
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            rows: Iterator[tuple[str, int, Any]] = _dataset_rows(saved_dataset(path, split), source)
        elif files:
            rows = (row for file in files for row in _file_rows(file))
        else:
            raise DataError(
                "no conversations in this folder", where=source, why="neither a saved dataset nor .jsonl files",
                mend="point data.sources at a file, a folder of `save_to_disk` or a dataset name",
            )  # fmt: skip
    elif path.is_file():
        rows = _file_rows(path)
    elif path.suffix in (*FILE_SUFFIXES, ".gz", ".parquet") or source.startswith((".", "/", "~")):
        raise DataError("source file not found", where=source, mend="check data.sources")
    else:
        rows = _dataset_rows(named_dataset(source, split), source)
    for count, (where, number, record) in enumerate(rows, start=1):
        if not isinstance(record, dict):
            raise DataError("record is not an object", where=where, why=f"found {type(record).__name__}", mend=MEND)
        yield where, number if not path.is_dir() else count, record


def _file_rows(path: Path) -> Iterator[tuple[str, int, Any]]:
    if path.suffix == ".json":
        yield from _json_rows(path)
        return
    if path.suffix != ".jsonl":
        raise DataError("unknown kind of file", where=str(path), mend="give .jsonl or .json")
    number = 0
    with open(path, "rb") as handle:
        for line_number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            number += 1
            where = f"{path}, record {number}"
            try:
                record = decoded_line(line)
            except (ValueError, RecursionError) as err:
                raise DataError(
                    "not a JSON line", where=f"{where}, line {line_number}", why=str(err), mend=line_mend(err)
                ) from None
            yield where, number, _as_written(record, where)
    _check_count(path, number)


def _as_written(record: Any, where: str) -> Any:
    """A record compared with its checksum, if it has one: answers of the regenerate stage do."""
    if not isinstance(record, dict):
        return record
    try:
        return without_checksum(record, LINE_CHECKSUM)
    except ValueError as err:
        where = f"{where}, {record.get('id')!r}"
        mend = (
            f"run the regenerate stage again: it asks for this one alone; or drop {LINE_CHECKSUM} from what you changed"
        )
        raise DataError("a record is not what was written", where=where, why=str(err), mend=mend) from None


def _check_count(path: Path, number: int) -> None:
    """Refuse answers that have lost lines since the regenerate stage counted them in the report beside them."""
    report = path.with_name("report.json")
    if path.name != ANSWERS or not report.exists():
        return
    mend = "run the regenerate stage again: it asks for what is missing; or give a part of the answers another name"
    wanted = read_checked(report, mend).get("answers")
    if isinstance(wanted, int) and number < wanted:
        raise DataError("answers are missing", where=str(path), why=f"{number} lines of {wanted}", mend=mend)


def decoded_line(line: bytes) -> Any:
    """The JSON value of a line, or of a file, in UTF-8.

    Raises:
        ValueError: it is not UTF-8, not JSON, or holds half a character (a lone surrogate, which no tokenizer takes).
        RecursionError: it is nested too deeply.
    """
    text = line.decode("utf-8")
    value = json.loads(text)
    if "\\u" in text:  # only an escape can hold one
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def line_mend(err: Exception) -> str:
    """How to mend what `decoded_line` refused."""
    encoding = isinstance(err, UnicodeDecodeError) or "BOM" in str(err)
    return "save the file as UTF-8, without a byte-order mark" if encoding else "fix or drop the line"


def _json_rows(path: Path) -> Iterator[tuple[str, int, Any]]:
    try:
        data = decoded_line(path.read_bytes())
    except (ValueError, RecursionError) as err:
        raise DataError(
            "not a JSON file", where=str(path), why=str(err), mend="give a list of records, or JSON lines as .jsonl"
        ) from None
    if not isinstance(data, list):
        mend = "give a list of records, or JSON lines as .jsonl"
        raise DataError("not a list of records", where=str(path), why=f"found {type(data).__name__}", mend=mend)
    for number, record in enumerate(data, start=1):
        yield f"{path}, record {number}", number, record


def _dataset_rows(rows: Any, source: str) -> Iterator[tuple[str, int, Any]]:
    for number, record in enumerate(rows, start=1):
        yield f"{source}, record {number}", number, record


def saved_dataset(path: Path, split: str) -> Any:
    """One split of a folder that `save_to_disk` wrote. Raises DataError when it cannot be read."""
    import datasets

    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as err:
        why, mend = f"{type(err).__name__}: {err}", "write it again with `save_to_disk`, or give JSON lines"
        raise DataError("dataset folder cannot be read", where=str(path), why=why, mend=mend) from None
    return _one_split(saved, split, str(path))


def named_dataset(source: str, split: str) -> Any:
    """One split of `name` or `name:config`, by `load_dataset`. Raises DataError when it cannot be had."""
    import datasets

    name, _, config = source.partition(":")
    try:
        return datasets.load_dataset(name, config or None, split=split)
    except Exception as err:
        raise DataError(
            "dataset cannot be loaded", where=source, why=f"{type(err).__name__}: {err}",
            mend="check the name, data.split and the network, or point data.sources at a file",
        ) from None  # fmt: skip


def _one_split(saved: Any, split: str, where: str) -> Any:
    import datasets

    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if split not in saved:
        raise DataError("no such split", where=where, why=f"{split!r} not in {sorted(saved)}", mend="set data.split")
    return saved[split]
