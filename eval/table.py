"""The results as a table for a terminal and for `table.txt`."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from eval.results import Summary
from eval.series import Series


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """`value` with fixed digits, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def percent(value: float | None, digits: int = 0) -> str:
    """A share as a percentage, or a dash for None."""
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def accept_tables(series: Sequence[Series]) -> Group:
    """One small table a way of serving, a row a prompt set; 80 columns suffice for three proposals."""
    result = series[0].result
    head = (
        f"accept length, of at most {result.ceiling} ({result.num_steps} proposals, temperature {result.temperature:g})"
    )
    return Group(head, *[part for one in series for part in ("", _table(one))])


def _table(series: Series) -> Table:
    predicted = series.result.predicted_tau
    title = series.label if predicted is None else f"{series.label}; predicted {predicted:.2f}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("prompts", no_wrap=True)
    for name in ("texts", "verifies", "tau", "95%", "kept %", "tok/s", "alone", "speed", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for summary in series.summaries:
        table.add_row(summary.name, *_cells(summary))
    if series.served.differences:
        table.caption = "fed other tensors than it was trained on: " + series.served.differences[0]
        table.caption_justify = "left"
    return table


def _cells(summary: Summary) -> list[str]:
    return [
        str(summary.prompts),
        str(summary.verifies),
        number(summary.tau, 3),
        f"{summary.tau_low:.2f}-{summary.tau_high:.2f}",
        " ".join("-" if share is None else f"{100 * share:.0f}" for share in summary.acceptance),
        number(summary.tokens_per_second, 1),
        number(summary.baseline_tokens_per_second, 1),
        number(summary.speedup, 2, "x"),
        "-" if summary.same_tokens is None else f"{summary.same_tokens}/{summary.prompts}",
    ]


def as_text(renderable: RenderableType, width: int = 100) -> str:
    """Plain text of a rich renderable."""
    buffer = io.StringIO()
    Console(file=buffer, width=width, force_terminal=False).print(renderable)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"
