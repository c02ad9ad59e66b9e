"""What a probe found: one sentence, its reasons, how to mend it, and the exit code a script can act on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

AGREES, DISAGREES, CANNOT_TELL = 0, 1, 2
WIDTH = 160


@dataclass(frozen=True)
class Verdict:
    """A probe's answer.

    Args:
        ok: what was measured is what was expected.
        what: the answer, one sentence.
        reasons: sentences that it rests on.
        mend: what to do about it; empty when there is nothing to do.
        told: the measurement decided the question; False = it cannot tell (then `ok` is False too).
        rows: the measurement as a table: flat dicts with the same keys, the column heads.
        facts: JSON-able values to keep with it (versions, flags, counts).
    """

    ok: bool
    what: str
    reasons: list[str]
    mend: str
    told: bool = True
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 agrees, 1 disagrees, 2 could not tell."""
        if not self.told:
            return CANNOT_TELL
        return AGREES if self.ok else DISAGREES

    @property
    def word(self) -> str:
        """`agrees`, `disagrees` or `cannot tell`."""
        return ("agrees", "disagrees", "cannot tell")[self.exit_code]

    def to_json(self) -> str:
        """One JSON object, for scripts."""
        return json.dumps(
            {"verdict": self.word, "exit_code": self.exit_code, **asdict(self)}, indent=2, ensure_ascii=False
        )

    def lines(self) -> list[Text]:
        """Verdict, reasons and mend, for people."""
        colour = ("green", "red", "yellow")[self.exit_code]
        out = [Text.assemble((self.word.upper(), f"bold {colour}"), f": {self.what}")]
        out += [Text(f"  - {reason}") for reason in self.reasons]
        return [*out, Text(f"  To mend: {self.mend}")] if self.mend else out


def cannot_tell(what: str, reasons: list[str], mend: str, **more: Any) -> Verdict:
    """A verdict of exit code 2."""
    return Verdict(False, what, reasons, mend, told=False, **more)


def show(verdict: Verdict, as_json: bool) -> int:
    """Print a verdict to standard output and return its exit code."""
    if as_json:
        print(verdict.to_json())
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = WIDTH  # a log has no width of its own
        if verdict.rows:
            console.print(_table(verdict.rows))
        for line in verdict.lines():
            console.print(line, soft_wrap=not console.is_terminal)
    return verdict.exit_code


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
