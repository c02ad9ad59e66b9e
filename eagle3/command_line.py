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
from typing import Any, NoReturn

from eagle3.errors import ConfigError, RedraftError

Main = Callable[[Sequence[str] | None], int]


class Paragraphs(argparse.HelpFormatter):
    """Fills each paragraph of a description to the terminal's width; one with indented lines or columns stays as is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = textwrap.dedent(text).strip().split("\n\n")
        filled = [
            part if re.search(r"^\s|\S  +\S|:\n", part, re.MULTILINE) else textwrap.fill(part, width) for part in parts
        ]
        return textwrap.indent("\n\n".join(filled), indent)


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
            shown = "examples:\n" + textwrap.indent(textwrap.dedent(examples).strip(), "  ")
            self.epilog = f"{shown}\n\n{self.epilog}" if self.epilog else shown

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's own words."""
        raise ConfigError("bad command line", where=self.prog, why=message, mend=f"see `{self.prog} --help`")


def one_line_errors(main: Main) -> Main:
    """A `main` whose expected failures are printed as one line; its exit code is then the error's, 2 as a rule."""

    @functools.wraps(main)
    def told(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except RedraftError as err:
            print(f"error: {err}", file=sys.stderr)
            return err.exit_code

    return told
