"""The comparison as a table."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from benchmarks.peers.sides import OURS
from benchmarks.side_by_side import machine_line

HEADINGS = ("case", "side", "s a step", "tok/s", "taught/s", "times as fast", "MiB", "share")


def as_table(rows: list[dict[str, Any]], facts: dict[str, Any]) -> Table:
    """A block a case, a line a side; ours bears the ratios to the best peer."""
    first = rows[0]["case"]
    title = f"one training step of the same draft on the same data: vocabulary {first['vocab']}, {first['dtype']}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    table.caption = caption(rows, facts)
    table.caption_justify = "left"
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for row in rows:
        lines = case_lines(row)
        for number, (name, side) in enumerate(row["sides"].items()):
            end = number == len(row["sides"]) - 1
            table.add_row(lines[number] if number < len(lines) else "", name, *cells(row, name, side), end_section=end)
    return table


def case_lines(row: dict[str, Any]) -> list[str]:
    """The case in up to three short lines."""
    case, share = row["case"], row["supervised_tokens"] / row["tokens"]
    documents = f"{len(row['documents'])} documents, {share:.0%}"
    return [f"H {case['hidden']}, Vd {case['draft_vocab']}", f"{row['tokens']} tokens, K {case['steps']}", documents]


def cells(row: dict[str, Any], name: str, side: dict[str, Any]) -> list[str]:
    """What stands behind a side's name."""
    peak = f"{side['memory_mib']['peak']:,.0f}" if "memory_mib" in side else "-"
    if "median_s" not in side:
        return ["failed" if "error" in side else "not run", "-", "-", "", peak, ""]
    low, high = min(side["seconds"]), max(side["seconds"])
    rates = [f"{side['tokens_per_s']:,.0f}", f"{side['supervised_per_s']:,.0f}"]
    speed = memory = ""
    if name == OURS and row["ratios"]:
        r = row["ratios"]
        speed = f"{r['speed']:.2f} ({r['spread'][0]:.2f}-{r['spread'][1]:.2f})"
        memory = f"{r['memory']:.2f}"
    return [f"{side['median_s']:.2f} ({low:.2f}-{high:.2f})", *rates, speed, peak, memory]


def caption(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """The machine, what the columns are, how far the sides agree, and what failed."""
    checks = [(c["loss_off"], c["gradient_off"]) for row in rows for n, c in row.get("check", {}).items() if n != OURS]
    agree = "no peer was checked"
    if checks:
        loss, gradient = (max(x) for x in zip(*checks, strict=True))
        agree = f"largest difference from ours: losses {loss:.1e}, gradients {gradient:.1e}"
    columns = (
        "taught/s: supervised tokens a second, each counted once; MiB: peak of the side's process over its second step"
    )
    ours = "times as fast as the faster peer (range of the rounds); share of the smaller peer's MiB"
    failures = [
        f"{', '.join(case_lines(row)[:2])}: {name}: {side['error']}"
        for row in rows
        for name, side in row["sides"].items()
        if "error" in side
    ]
    return "\n".join((machine_line(facts), columns, ours, agree, *failures))


def profile_lines(row: dict[str, Any]) -> list[str]:
    """The operators that take most of each side's profiled step, as shares of all operators' own time."""
    lines = []
    for name, side in row["sides"].items():
        if "profile" in side:
            whole = side["profile"]["total"]
            top = ", ".join(f"{x['op'][:60]} {x['seconds'] / whole:.0%}" for x in side["profile"]["operators"])
            lines.append(f"{name}: {whole:.1f} s: {top}")
    return lines
