"""Every error that the product raises says how to mend it, and every command line refuses in one line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3.command_line import Parser, one_line_errors
from eagle3.errors import LONGEST, ConfigError, RedraftError

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = ("eagle3", "data_prep", "train", "eval", "scripts", "benchmarks")
# Exceptions of other names that are no errors of the product's kind, or are given their mend by who raises them anew.
KIN = {"RedraftError", "ConfigError", "WiringError", "DataError", "IntegrityError", "NothingToLearnError", "ServerGone"}


def errors_in(source: str) -> Iterator[tuple[int, set[str | None]]]:
    """Line, and names of the arguments, of each error of the product's kind that is made."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KIN:
            yield node.lineno, {one.arg for one in node.keywords}


@pytest.mark.parametrize("package", PRODUCT)
def test_every_error_says_how_to_mend_it(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}, line {line}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, names in errors_in(path.read_text(encoding="utf-8"))
        if not names & {"mend", None}  # None: `**clauses` of another error
    ]
    assert not found


def test_an_error_without_a_mend_would_be_found() -> None:
    (found,) = errors_in('raise DataError("bad", where="x", why="y")')
    assert found == (1, {"where", "why"})


def test_a_line_can_neither_move_the_cursor_nor_fill_the_screen() -> None:
    line = str(RedraftError("bad", where="a\x1b[2Jb\x00\r\nc", why="x" * 3 * LONGEST, mend="mend it"))
    assert "a\ufffd[2Jb\ufffd c" in line
    assert line.isprintable()
    assert len(line) < LONGEST + 60
    assert line.endswith("To mend: mend it")


def test_a_wrong_flag_gives_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    @one_line_errors
    def main(argv: list[str] | None = None) -> int:
        Parser(prog="python -m x").parse_args(argv)
        return 0

    assert main([]) == 0
    assert main(["--fast"]) == 2
    streams = capsys.readouterr()
    line = "error: bad command line [python -m x]: unrecognized arguments: --fast"
    assert (streams.out, streams.err) == ("", f"{line}. To mend: see `python -m x --help`\n")


def test_a_wrong_flag_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="--fast"):
        Parser(prog="x").parse_args(["--fast"])
