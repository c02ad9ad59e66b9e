"""What every command line of the product has in common: its help, and how it refuses.

It refuses with one line on standard error and exit code 2, never with a traceback or a page of usage.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from eagle3.errors import ConfigError, RedraftError


class Main(Protocol):
    """What a module runs: its exit code for a command line, the process's own by default."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


class Paragraphs(argparse.HelpFormatter):
    """Fills each paragraph of a description to the terminal's width; one with indented lines or columns stays as is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = re.split(r"\n\n+", textwrap.dedent(text).strip())
        filled = [
            part if re.search(r"^\s|\S  +\S|:\n", part, re.MULTILINE) else textwrap.fill(part, width) for part in parts
        ]
        return textwrap.indent("\n\n".join(filled), indent)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """A list of choices is shown once."""
        if action.choices and action.nargs == argparse.ONE_OR_MORE:
            return f"{self._metavar_formatter(action, default_metavar)(1)[0]} ..."
        return super()._format_args(action, default_metavar)


def folded(command: str, width: int = 76) -> str:
    """A command in lines of at most `width`, cut before options where that is possible, as a shell takes it."""
    if command.startswith("#"):
        return command
    lines = [""]
    for part in re.split(r" (?=--)", command):
        if lines[-1] and len(lines[-1]) + len(part) > width - 3:
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {part}" if lines[-1] else part
    return " \\\n".join(lines)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises its complaint instead of printing a page of usage.

    Args:
        examples: command lines that can be copied, shown below the options; a line may be a comment.
        options: as of `argparse.ArgumentParser`.
    """

    def __init__(self, *, examples: str = "", **options: Any) -> None:
        options.setdefault("formatter_class", Paragraphs)
        super().__init__(**options)
        if examples:
            lines = map(folded, textwrap.dedent(examples).strip().splitlines())
            shown = "examples:\n" + textwrap.indent("\n".join(lines), "  ")
            self.epilog = f"{shown}\n\n{self.epilog}" if self.epilog else shown

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's own words."""
        raise ConfigError("bad command line", where=self.prog, why=message, mend=f"see `{self.prog} --help`")


def positive(text: str) -> int:
    """The type of an argument that is a whole number from 1 on."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


def one_line_errors(main: Callable[[Sequence[str] | None], int]) -> Main:
    """A `main` whose expected failures are printed as one line; its exit code is then the error's, 2 as a rule."""

    @functools.wraps(main)
    def told(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except RedraftError as err:
            print(f"error: {err}", file=sys.stderr)
            return err.exit_code

    return told
