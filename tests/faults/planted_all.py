"""Every planted fault, in the order in which a user would meet them."""

from __future__ import annotations

import re

import planted_config
import planted_draft
import planted_engine
import planted_foreign
import planted_store
from planted_bench import Bench, Fault

from eagle3.conventions import CONVENTIONS

ALL: list[Fault] = [
    *planted_config.FAULTS,
    *planted_foreign.FOREIGN,
    *planted_foreign.CAPTURE,
    *planted_store.FAULTS,
    *planted_draft.FAULTS,
    *planted_engine.FAULTS,
]

HEAD = """# Faults planted, and where each is caught

Each row plants one fault in otherwise right inputs and calls what a user would call next; `tests/faults` also shows
that the same inputs without the fault pass. All are caught before training or serving. Shortened here: paths, ports,
hashes, measured decimals (`N`), and lists of conventions. A verdict of several lines is joined into one.

Written by `python tests/faults/write_faults.py`; a test compares it with what the product prints.

| # | fault | caught | the line |
|---|---|---|---|
"""


def normal(line: str, bench: Bench) -> str:
    """The line without what differs from machine to machine."""
    line = re.sub(r"(?<![\w/])" + re.escape(str(bench.target)), "TARGET", line)
    line = re.sub(re.escape(str(bench.root)) + r"(/\d+)?", "RUN", line)
    line = re.sub(r"http://127\.0\.0\.1:\d+", "http://HOST:PORT", line)
    line = re.sub(r"\b[0-9a-f]{12}(\.\.\.|[0-9a-f]{4}|[0-9a-f]{52})?(?![0-9a-z])", "HASH", line)
    line = re.sub(r"as_served-\w+", "as_served", line)
    line = re.sub(r"(?<![\d.])\d+\.\d+(e-?\d+)?(?![\d.]*\d)", "N", line)
    line = re.sub(r"\b\d+%", "N%", line)
    names = "|".join(sorted(CONVENTIONS, key=len, reverse=True))
    line = re.sub(rf"\b({names})(, ({names}))+(?![\w.-])", r"\1, ...", line)  # lists grow with every program read
    return " ".join(line.split())


def table(lines: list[str]) -> str:
    """docs/faults.md."""
    rows = []
    for number, (fault, line) in enumerate(zip(ALL, lines, strict=True), start=1):
        cells = (str(number), fault.name, fault.stage, line)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return HEAD + "\n".join(rows) + "\n"
