"""Every command line says what it does, what each option means, and gives examples that its own parser takes."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3.command_line import Parser

ROOT = Path(__file__).parents[3]
FOREIGN = {"specforge_train.py", "specforge_worker.py", "speculators_worker.py"}  # run in another tool's environment
COMMAND = re.compile(r"^(?:OMP_NUM_THREADS=1 )?python (?:-m )?(\S+)")


def entries() -> list[str]:
    """Modules that are started from a command line and make a parser of the house."""
    found = []
    for folder in ("benchmarks", "data_prep", "eval", "scripts", "train"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            foreign = path.name in FOREIGN or "sglang_worker" in path.parts  # a child that is given numbers
            if '__name__ == "__main__"' in text and "Parser(" in text and not foreign:
                found.append(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"))
    return found


class CaughtError(Exception):
    """The parser, in place of what it would have parsed."""

    def __init__(self, parser: Parser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


def parser_of(entry: str, monkeypatch: pytest.MonkeyPatch) -> Parser:
    """The parser that an entry makes."""

    def caught(self: Parser, *_: object) -> None:
        raise CaughtError(self)

    name = entry if not (ROOT / entry.replace(".", "/") / "__main__.py").exists() else f"{entry}.__main__"
    module = importlib.import_module(name)
    with monkeypatch.context() as patch:
        patch.setattr(Parser, "parse_args", caught)
        with pytest.raises(CaughtError) as error:
            module.main([])
    return error.value.parser


def levels(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and its subcommands'."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def examples(parser: argparse.ArgumentParser) -> list[str]:
    """The commands of its epilog, lines that go on joined."""
    lines = (parser.epilog or "").replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if COMMAND.match(line.strip()) and "`" not in line]


def arguments(command: str, entry: str) -> list[str]:
    """What follows the entry's name in an example of it."""
    words = shlex.split(command.removeprefix("OMP_NUM_THREADS=1 "))
    named = words[2] if words[1] == "-m" else words[1].removesuffix(".py").replace("/", ".")
    assert named == entry, f"an example of {entry} runs {named}"
    return words[3 if words[1] == "-m" else 2 :]


@pytest.mark.parametrize("entry", entries())
def test_help_describes_all_and_its_examples_parse(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = parser_of(entry, monkeypatch)
    for parser in levels(whole):
        assert parser.description, f"{parser.prog} has no description"
        shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
        silent = [a.option_strings or a.dest for a in shown if not a.help and not a.choices]
        silent += [a.option_strings for a in shown if not a.help and a.option_strings]
        assert not silent, f"{parser.prog}: no help for {silent}"
        told = examples(parser)
        assert told, f"{parser.prog} gives no example"
        for command in told:
            whole.parse_args(arguments(command, entry))
        monkeypatch.setenv("COLUMNS", "80")
        text = parser.format_help()
        wide = [line for line in text.splitlines() if len(line) > 80]
        assert not wide, f"{parser.prog}: {wide}"


def test_the_walk_finds_the_entries() -> None:
    assert {"eval.probe", "eval.compare", "data_prep.regenerate", "scripts.sglang_patch", "benchmarks.gpu"} < set(
        entries()
    )


def test_paragraphs_are_filled_and_columns_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    long = "word " * 30
    parser = Parser(prog="x", description=f"{long}\n\nname   what it is\nother  what that is", examples="# do\nx --a")
    lines = parser.format_help().splitlines()
    assert max(map(len, lines)) <= 60 and "name   what it is" in lines
    assert lines[-3:] == ["examples:", "  # do", "  x --a"]
