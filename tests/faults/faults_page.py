"""Pages of docs/ that list faults with the line each gets: written by `write_faults.py`, compared by the tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from planted_bench import ROOT, Bench, Fault

from eagle3.conventions import CONVENTIONS


@dataclass(frozen=True)
class Page:
    """One page.

    Args:
        name: of the file in docs/, without its suffix.
        head: what stands above the table, up to the head of its columns.
        faults: its rows.
    """

    name: str
    head: str
    faults: list[Fault]

    @property
    def path(self) -> Path:
        """The file."""
        return ROOT / "docs" / f"{self.name}.md"

    def text(self, lines: list[str]) -> str:
        """The whole page, with the line of each fault."""
        rows = []
        for number, (fault, line) in enumerate(zip(self.faults, lines, strict=True), start=1):
            cells = (str(number), fault.name, fault.stage, line)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return self.head + "\n".join(rows) + "\n"


def normal(line: str, bench: Bench) -> str:
    """The line without what differs from machine to machine."""
    line = re.sub(r"(?<![\w/])" + re.escape(str(bench.target)), "TARGET", line)
    line = re.sub(re.escape(str(bench.root)) + r"(/\d+)?", "RUN", line)
    line = line.replace(f"{ROOT}/", "")
    line = re.sub(r"(maximum recursion depth exceeded)[^.]*", r"\1", line)
    line = re.sub(r"http://127\.0\.0\.1:\d+", "http://HOST:PORT", line)
    line = re.sub(r"\b[0-9a-f]{12}(\.\.\.|[0-9a-f]{4}|[0-9a-f]{52})?(?![0-9a-z])", "HASH", line)
    line = re.sub(r"as_served-\w+", "as_served", line)
    line = re.sub(r"(?<![\d.])\d+\.\d+(e-?\d+)?(?![\d.]*\d)", "N", line)
    line = re.sub(r"\b\d+%", "N%", line)
    names = "|".join(sorted(CONVENTIONS, key=len, reverse=True))
    line = re.sub(rf"\b({names})(, ({names}))+(?![\w.-])", r"\1, ...", line)  # lists grow with every program read
    return " ".join(line.split())
