"""The results as a table for a terminal and for `table.txt`."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from eval.results import Summary
from eval.series import Parting, Series, failure_lines, looping_lines, partings


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """`value` with fixed digits, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def percent(value: float | None, digits: int = 0) -> str:
    """A share as a percentage, or a dash for None."""
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def show(series: Sequence[Series], console: Console) -> None:
    """Print one small table a way of serving, a row a prompt set (and batch size); 80 columns suffice for three
    proposals. Below them: acceptance by position where it does not fit in, prompts that failed, and alarms.
    """
    result = series[0].result
    lines = [
        f"accept length, of at most {result.ceiling} ({result.num_steps} proposals, temperature {result.temperature:g})"
    ]
    if any(_of_server(one) for one in series):
        lines.append("own: the server's own figure; tok/s: a whole batch by the wall clock; alone: no draft")
    parts: list[RenderableType] = list(lines)
    for group in _groups(series):
        parts += ["", _server_table(group) if _of_server(group[0]) else _table(group[0])]
        if _wide(group[0]):
            parts += ["", _positions_table(group)]
    notes = [*looping_lines(series), *failure_lines(series)]
    parts += [""] * bool(notes) + [Text(line, style="yellow") for line in notes]
    console.print(Group(*parts), highlight=False)
    for parting in partings(series):
        _show_parting(parting, console)


def _show_parting(parting: Parting, console: Console) -> None:
    """A loud block, then its commands, each whole on a line to be copied."""
    lines = [f"{line}." for line in parting.lines]
    lines += [f"Kept by position, predicted against served: {parting.positions}.", "It may be that"]
    lines += [f"- {cause}" for cause in parting.causes]
    title = "[bold white on red] ALARM: the draft does not do what validation promised [/]"
    console.print()
    console.print(Panel(Text("\n".join(lines)), title=title, border_style="bold red", title_align="left"))
    if parting.commands:
        console.print(Text("Next, find out which tensors it is fed:", style="bold red"))
    for command in parting.commands:
        console.print(Text(f"  {command}"), soft_wrap=True)


def _of_server(series: Series) -> bool:
    return bool(series.served.facts)


def _wide(series: Series) -> bool:
    """Whether acceptance by position needs a table of its own to stay within 80 columns."""
    return series.result.num_steps > (3 if _of_server(series) else 5)


def _groups(series: Sequence[Series]) -> list[list[Series]]:
    """Batch sizes of one way of serving together."""
    groups: dict[tuple[int, str], list[Series]] = {}
    for one in series:
        groups.setdefault((id(one.result), one.served.mode), []).append(one)
    return list(groups.values())


def _empty_table(series: Series, title: str) -> Table:
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    if series.served.differences:
        table.caption = escape("fed other tensors than it was trained on: " + series.served.differences[0])
        table.caption_justify = "left"
    return table


def _title(series: Series) -> str:
    predicted = series.result.predicted_tau
    return series.way if predicted is None else f"{series.way}; predicted {predicted:.2f}"


def _table(series: Series) -> Table:
    table = _empty_table(series, _title(series))
    table.add_column("prompts", overflow="fold")
    wide = _wide(series)
    for name in ("texts", "verifies", "tau", "95%", *([] if wide else ["kept %"]), "tok/s", "alone", "speed", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for summary in series.summaries:
        cells = [summary.measured, str(summary.verifies), number(summary.tau, 3), _interval(summary)]
        table.add_row(escape(summary.name), *cells, *([] if wide else [_kept(summary)]), *_speed_cells(summary))
    return table


def _server_table(group: list[Series]) -> Table:
    first, wide = group[0], _wide(group[0])
    table = _empty_table(first, _title(first))
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column(" prompts", overflow="fold")
    for name in ("texts", "tau", "own", "95%", *([] if wide else ["kept %"]), "tok/s", "alone", "speed", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in group:
        for place, summary in enumerate(one.summaries):
            batch = "" if place else str(one.served.batch)
            cells = [summary.measured, number(summary.tau), number(summary.engine_tau), _interval(summary)]
            cells += [] if wide else [_kept(summary)]
            table.add_row(batch, f" {escape(summary.name)}", *cells, *_speed_cells(summary))
    return table


def _positions_table(group: list[Series]) -> Table:
    table = Table(title="kept when judged, %, by position in the chain", title_justify="left")
    table.box, table.padding, table.show_edge = box.SIMPLE_HEAD, (0, 0), False
    table.add_column("batch ", justify="right", no_wrap=True)
    table.add_column("prompts", overflow="fold")
    for k in range(1, group[0].result.num_steps + 1):
        table.add_column(f"{k:>4}", justify="right", no_wrap=True)
    for one in group:
        for place, summary in enumerate(one.summaries):
            shares = ["-" if share is None else f"{100 * share:.0f}" for share in summary.acceptance]
            table.add_row("" if place else f"{one.served.batch} ", escape(summary.name), *shares)
    return table


def _interval(summary: Summary) -> str:
    return f"{summary.tau_low:.2f}-{summary.tau_high:.2f}"


def _kept(summary: Summary) -> str:
    return " ".join("-" if share is None else f"{100 * share:.0f}" for share in summary.acceptance)


def _speed_cells(summary: Summary) -> list[str]:
    return [
        number(summary.rate, 1),
        number(summary.plain_rate, 1),
        number(summary.gain, 2, "x"),
        "-" if summary.same_tokens is None else f"{summary.same_tokens}/{summary.prompts}",
    ]


def table_text(series: Sequence[Series], width: int = 80) -> str:
    """What `show` prints, without colours."""
    buffer = io.StringIO()
    show(series, Console(file=buffer, width=width, force_terminal=False))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"
