"""How every command line of the product refuses: one line on standard error and exit code 2, never a traceback."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from eagle3.errors import ConfigError, RedraftError

Main = Callable[[Sequence[str] | None], int]


class Parser(argparse.ArgumentParser):
    """An argument parser that raises its complaint instead of printing a page of usage."""

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
