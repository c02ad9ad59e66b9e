"""Bad conversations and prompt sets: JSON lines, JSON and folders in every state of disrepair."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_bench import Write, entered, shared, staged
from planted_bench import UNIT, Bench, Fault

import scripts.make_prompts
import scripts.write_answers
from data_prep.regenerate.__main__ import main as regenerate

sys.path.append(str(UNIT / "regenerate"))
from fake_chat import FakeChat, serving

READ, ANSWER, ASK = "prepare, at the record", "`data_prep.regenerate`, before it asks", "eval, before the first prompt"
TURNS = [{"role": "user", "content": "What is a river?"}, {"role": "assistant", "content": "Water on its way."}]
Content = bytes | str | list[Any] | None


def lines(records: list[Any]) -> bytes:
    """JSON lines."""
    return "".join(json.dumps(one) + "\n" for one in records).encode()


def two(**second: Any) -> list[Any]:
    """A sound record, and one with something else in it."""
    return [{"id": "a", "messages": TURNS}, {"id": "b", "messages": TURNS, **second}]


def second_turn(**answer: Any) -> list[Any]:
    """A sound record, and one whose answer is another object."""
    return two(messages=[TURNS[0], {"role": "assistant", **answer}])


def made(content: Content, name: str = "chats.jsonl") -> Write:
    """Writes a file of that content, or a folder where there is none."""

    def write(folder: Path) -> Path:
        path = folder / name
        folder.mkdir(parents=True)
        if content is None:
            path.mkdir()
        else:
            raw = lines(content) if isinstance(content, list) else content
            path.write_bytes(raw.encode() if isinstance(raw, str) else raw)
        return path

    return write


SOUND = made([{"id": name, "messages": [{"role": "user", "content": name}, TURNS[1]]} for name in ("a", "b", "c")])


def _prepared(write: Write) -> Callable[[Bench, bool], str]:
    """The prepare stage on a source."""

    def line(bench: Bench, make: Write) -> str:
        run = bench.folder("run")
        paths = (f"data.sources=['{make(bench.folder('data'))}']", f"paths.prepared={run / 'prepared'}")
        return staged(bench, "prepare", *paths, run_dir=run)

    return shared("prepare", lambda bench: line(bench, write), lambda bench: line(bench, SOUND))


def _asked(write: Write) -> Callable[[Bench, bool], str]:
    """`python -m data_prep.regenerate` on a source."""

    def line(bench: Bench, make: Write) -> str:
        with serving(FakeChat()) as fake:
            source, out = make(bench.folder("data")), bench.folder("answers")
            sampling = ("--temperature", 0, "--repetition-penalty", 1)
            return entered(regenerate, "--url", fake.url, "--source", source, "--out", out, *sampling)

    return shared("regenerate", lambda bench: line(bench, write), lambda bench: line(bench, SOUND))


def _measured(write: Write, entry: str = "{}") -> Callable[[Bench, bool], str]:
    """The eval stage with a prompt set."""

    def run(bench: Bench, planted: bool) -> str:
        if not planted:
            return bench.once(
                "eval command", lambda: staged(bench, "eval", run_dir=bench.copy_of_run(bench.served_run))
            )
        path = write(bench.folder("prompts"))
        given = entry.format(path)
        settings = (f"eval.prompt_sets=[{given}]", "eval.max_prompts=0")
        return staged(bench, "eval", *settings, run_dir=bench.copy_of_run(bench.served_run))

    return run


def _answers(write: Write) -> Callable[[Bench, bool], str]:
    def bad(bench: Bench) -> str:
        arguments = ("--prompts", write(bench.folder("prompts")), "--out", bench.folder("answers.jsonl"))
        return entered(scripts.write_answers.main, "--target", bench.target, *arguments)

    return shared("no answers asked for", bad, lambda _bench: "")


def _topics(write: Write) -> Callable[[Bench, bool], str]:
    def line(bench: Bench, *topics: Any) -> str:
        out = bench.folder("out") / "prompts.jsonl"
        default = scripts.make_prompts.DATA / "prompt_topics.txt"
        return entered(scripts.make_prompts.main, *(topics or (default,)), out)

    return shared("topics", lambda bench: line(bench, write(bench.folder("topics"))), line)


DEEP = '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
CONVERSATIONS: list[tuple[str, Content, str, tuple[str, ...]]] = [
    ("a folder without conversations", None, "chats", ("no conversations in this folder", "data.sources")),
    ("a file of another kind", "a,b\n", "chats.csv", ("unknown kind of file", ".jsonl or .json")),
    ("an empty file", "", "chats.jsonl", ("not enough data", "0 usable", "at least 2 records")),
    ("half a line", b'{"messages": [\n', "chats.jsonl", ("not a JSON line", "record 1, line 1", "fix or drop")),
    ("Latin-1", '{"messages": "caf\xe9"}\n'.encode("latin-1"), "chats.jsonl", ("record 1", "save the file as UTF-8")),
    ("UTF-16", '{"messages": 1}\n'.encode("utf-16"), "chats.jsonl", ("not a JSON line", "save the file as UTF-8")),
    ("a byte-order mark", b"\xef\xbb\xbf" + lines(two()), "chats.jsonl", ("BOM", "line 1", "as UTF-8")),
    (
        "NUL bytes, as a file system leaves after a crash",
        lines(two()) + bytes(64),
        "chats.jsonl",
        ("record 3, line 3",),
    ),
    ("half a character: a lone surrogate", second_turn(content="\ud83d"), "chats.jsonl", ("record 2", "surrogate")),
    ("100,000 brackets in one another", DEEP, "chats.jsonl", ("not a JSON line", "recursion", "fix or drop")),
    ("a number for a record", [*two(), 7], "chats.jsonl", ("record is not an object", "record 3", "int")),
    ("no messages", two(messages=None), "chats.jsonl", ("record without messages", "record 2", "`messages`")),
    ("no message in them", two(messages=[]), "chats.jsonl", ("record without messages", "record 2")),
    ("text for messages", two(messages="Hello"), "chats.jsonl", ("record without messages", "record 2", "a str")),
    ("text for a message", two(messages=["Hello"]), "chats.jsonl", ("message is not an object", "record 2, message 1")),
    (
        "a role that is none",
        two(messages=[{"role": "robot", "content": "hi"}]),
        "chats.jsonl",
        ("'robot'", "message 1"),
    ),
    ("a message without content", second_turn(content=None), "chats.jsonl", ("without content", "record 2, message 2")),
    (
        "a picture",
        second_turn(content=[{"type": "image"}]),
        "chats.jsonl",
        ("content is not text", "message 2", "images"),
    ),
    (
        "arguments of a tool call that are no JSON",
        second_turn(content="", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
        "chats.jsonl",
        ("`arguments` is not JSON", "record 2, message 2"),
    ),
    (
        "a number for tool calls",
        second_turn(content="", tool_calls=5),
        "chats.jsonl",
        ("tool calls are no list", "int"),
    ),
    ("two records of one id", two(id="a"), "chats.jsonl", ("two records with one id", "record 2", "'a'")),
    ("tokens that are no numbers", two(token_ids={"prompt": ["x"]}), "chats.jsonl", ("bad token ids", "record 2")),
    (
        "answers that say nothing",
        [{"messages": [TURNS[0]]}] * 3,
        "chats.jsonl",
        ("not enough data", "no assistant turn"),
    ),
    ("an object in a .json file", '{"messages": []}', "chats.json", ("not a list of records", "dict", ".jsonl")),
]
ASKED: list[tuple[str, Content, tuple[str, ...]]] = [
    ("no record to answer", "\n\n", ("no conversations to answer", "one conversation a line")),
    ("half a line to answer", b'{"messages": [\n', ("not a JSON line", "record 1", "fix or drop")),
    ("one id twice among those to answer", two(id="a"), ("the same id twice", "record 2", "'a'")),
]
PROMPTS: list[tuple[str, Content, str, str, tuple[str, ...]]] = [
    ("a prompt set that is a folder", None, "chat", "{}", ("cannot read the prompt set", "eval.prompt_sets")),
    ("half a line of a prompt set", '{"id": 1', "chat.jsonl", "{}", ("not a JSON line", "chat.jsonl, line 1")),
    ("a prompt without messages", [{"id": "a"}], "chat.jsonl", "{}", ("without messages", "line 1", "write {")),
    ("a prompt with a number for its role", [{"messages": [{"role": 1}]}], "chat.jsonl", "{}", ("without messages",)),
    ("a prompt that was answered", [{"messages": TURNS}], "chat.jsonl", "{}", ("ends with the assistant", "line 1")),
    (
        "two prompts of one id",
        [{"id": "a", "messages": TURNS[:1]}] * 2,
        "chat.jsonl",
        "{}",
        ("two prompts share an id",),
    ),
    ("an empty prompt set", "\n", "chat.jsonl", "{}", ("the prompt set is empty", "at least one")),
    ("one prompt set twice", [{"messages": TURNS[:1]}], "chat.jsonl", "{0},{0}", ("share a name", "'chat'", "rename")),
    ("half a gzip file", gzip.compress(b"x" * 999)[:-9], "p.jsonl.gz", "gsm8k:{}", ("cannot read the prompt set",)),
    (
        "a damaged gzip file",
        gzip.compress(b"x")[:10] + b"\xff" * 9,
        "p.jsonl.gz",
        "gsm8k:{}",
        ("cannot read", "p.jsonl.gz"),
    ),
    (
        "another set's file",
        [{"problem": "x"}],
        "p.jsonl",
        "gsm8k:{}",
        ("not a record of gsm8k", "line 1", "'question'"),
    ),
]
FAULTS = [
    Fault(
        "a source that is not there",
        READ,
        _prepared(lambda folder: folder / "chats.jsonl"),
        ("source file not found", "chats.jsonl", "data.sources"),
    ),
    *(Fault(name, READ, _prepared(made(content, file)), words) for name, content, file, words in CONVERSATIONS),
    *(Fault(name, ANSWER, _asked(made(content)), words) for name, content, words in ASKED),
    *(Fault(name, ASK, _measured(made(content, file), entry), words) for name, content, file, entry, words in PROMPTS),
    Fault(
        "prompts to answer that are not UTF-8",
        "`scripts/write_answers.py`",
        _answers(made(b"\xff\xfe")),
        ("cannot read the prompts", "UTF-8"),
    ),
    Fault(
        "topics in no group",
        "`scripts/make_prompts.py`",
        _topics(made("rivers\n", "topics.txt")),
        ("topic before any group", "line 1", "[group]"),
    ),
    Fault(
        "a group of topics left out",
        "`scripts/make_prompts.py`",
        _topics(made("[concept]\nrivers\n", "topics.txt")),
        ("a group of topics is missing", "[group]"),
    ),
]
