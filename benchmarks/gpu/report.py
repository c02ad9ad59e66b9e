"""The results as tables and JSON, written again after every task: a run that is cut short leaves what it found."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table

from benchmarks.gpu.timebox import DONE, NO_TIME, WRONG, Outcome
from benchmarks.side_by_side import machine_line
from eagle3.atomic import write_json, write_text

GB = 1e9


def publish(head: dict[str, Any], outcomes: Sequence[Outcome], out: Path) -> str:
    """Write `gpu.txt` and `gpu.json` to folder `out`, and give the text."""
    text = as_text(head, outcomes)
    write_text(out / "gpu.txt", text)
    write_json(out / "gpu.json", {**head, "outcomes": [one.to_dict() for one in outcomes]})
    return text


def as_text(head: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """All tables there is something for, then whatever is not done, a line each."""
    tables = [make(outcomes) for make in (rate_table, numerics_table, step_table, write_table, copy_table)]
    buffer = io.StringIO()
    console = Console(file=buffer, width=150, force_terminal=False)
    console.print(f"{head['title']}: {machine_line(head['machine'])}, {head['engine']}", soft_wrap=True)
    console.print(Group(*(table for table in tables if table.row_count)))
    for one in outcomes:
        if one.state not in (DONE, NO_TIME):
            console.print(f"{one.section}, {one.name}: {one.state}: {one.note}", soft_wrap=True)
    late = [f"{one.section}, {one.name}" for one in outcomes if one.state == NO_TIME]
    if late:
        console.print(f"{NO_TIME} for {len(late)}: {'; '.join(late)}", soft_wrap=True)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


def _of(outcomes: Sequence[Outcome], section: str) -> list[Outcome]:
    return [one for one in outcomes if one.section == section and one.figures]


def rate_table(outcomes: Sequence[Outcome]) -> Table:
    """Products of the step's shapes."""
    table = _table("matrix rate", ["product", "TFLOP/s", "of the best"])
    for one in _of(outcomes, "matrix rate"):
        best = one.figures["best"]
        for name, rate in one.figures["tflops"].items():
            table.add_row(name, f"{rate:.3g}", f"{rate / best:.0%}")
    return table


def numerics_table(outcomes: Sequence[Outcome]) -> Table:
    """Relative errors against the plain step in float64."""
    headings = ["numerics", "rows, asking", "loss", "gradient", "recomputed", "plain's loss", "gradient", ""]
    table = _table("relative error against the plain step in float64", headings)
    for one in _of(outcomes, "numerics"):
        found = one.figures
        cells = [found["fast"]["loss"], found["fast"]["gradient"], found["recomputed"]["gradient"]]
        cells += [found["plain"]["loss"], found["plain"]["gradient"]]
        said = "wrong" if one.state == WRONG else "right"
        table.add_row(one.name, f"{found['rows']}, {found['asking']}", *(f"{cell:.1e}" for cell in cells), said)
    return table


def step_table(outcomes: Sequence[Outcome]) -> Table:
    """One line a training case."""
    headings = ["training step", "ms", "least-most", "tok/s", "TFLOP", "TFLOP/s", "MFU", "GB", "predicted", "ratio"]
    table = _table("training step: forward, backward, optimizer", headings)
    for one in _of(outcomes, "training step"):
        found, seconds, memory = one.figures, one.figures["seconds"], one.figures["memory"]
        peak = memory.get("allocated", 0)
        table.add_row(
            one.name,
            f"{1000 * seconds['median']:,.0f}",
            f"{1000 * seconds['least']:,.0f}-{1000 * seconds['most']:,.0f}",
            f"{found['tokens_per_second']:,.0f}",
            f"{found['needed_flops']['total'] / 1e12:,.3g}",
            f"{found['tflops']:.3g}",
            "-" if found["mfu"] is None else f"{found['mfu']:.1%}",
            f"{peak / GB:.2f}" if peak else "-",
            f"{memory['predicted'] / GB:.2f}",
            f"{memory['predicted'] / peak:.3f}" if peak else "-",
        )
    return table


def write_table(outcomes: Sequence[Outcome]) -> Table:
    """Extraction beside the bare forward."""
    headings = ["extraction", "tok/s bare", "tok/s", "times as long", "us a token more", "MB", "MB/s to disk"]
    table = _table("extraction: capture and the store's writes", headings)
    for one in _of(outcomes, "extraction"):
        found = one.figures
        table.add_row(
            one.name,
            f"{found['bare_tokens_per_second']:,.0f}",
            f"{found['tokens_per_second']:,.0f}",
            f"{found['times_as_long']:.3f}",
            f"{1e6 * found['extra_seconds_per_token']:,.1f}",
            f"{found['bytes'] / 1e6:,.3g}",
            f"{found['bytes_per_second'] / 1e6:,.0f}",
        )
    return table


def copy_table(outcomes: Sequence[Outcome]) -> Table:
    """A batch's states on their way to the device."""
    table = _table("a packed batch's way to the device", ["copy, memory", "MB", "ms", "GB/s"])
    for one in _of(outcomes, "copy"):
        for name, found in one.figures["copies"].items():
            size = one.figures["bytes"] / 1e6
            table.add_row(name, f"{size:,.3g}", f"{1000 * found['seconds']:.3g}", f"{found['gb_per_s']:.1f}")
    return table
