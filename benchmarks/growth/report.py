"""Tables of the points and of the fitted exponents, and a picture with logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from eagle3.atomic import replacing

MIB = 2**20


def exponent(found: dict[str, Any]) -> str:
    """`1.32 +- 0.05`, and the exponent between the two largest sizes."""
    power = found["power"]
    error = "" if power["error"] is None else f" +- {power['error']:.2f}"
    return f"{power['exponent']:.2f}{error} ({found['last']:.2f})"


def line(found: dict[str, Any], unit: float, name: str) -> str:
    """`0.21 s + 1.3 ms x`, where that describes the points better than a power does; else `-`."""
    if not found["straight"]:
        return "-"
    return f"{found['line']['fixed'] * unit:.3g} + {found['line']['each'] * unit:.3g} x {name}"


def fits_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line a side and axis."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for number, heading in enumerate(("size", "side", "time", "by FLOPs", "s = fixed + each x", "memory")):
        table.add_column(heading, justify="right" if number > 1 else "left", no_wrap=True)
    for row in rows:
        memory = exponent(row["memory"]) if "memory" in row else "-"
        table.add_row(
            row["axis"],
            row["side"],
            exponent(row["time"]),
            f"{row['theory']['power']['exponent']:.2f} ({row['theory']['last']:.2f})",
            line(row["time"], 1.0, "size"),
            memory,
        )
    return table


def points_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line a point: medians, and the spread of the rounds."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for number, heading in enumerate(("size", "side", "value", "s", "least-most", "GFLOP", "GFLOP/s", "MiB")):
        table.add_column(heading, justify="right" if number > 1 else "left", no_wrap=True)
    for row in rows:
        flops = row["needed_flops"] if row["axis"] != "extraction" else [None] * len(row["values"])
        sizes = row.get("bytes", [0] * len(row["values"]))
        columns = zip(row["values"], row["seconds"], row["rounds"], flops, sizes, strict=True)
        for value, seconds, rounds, work, size in columns:
            table.add_row(
                row["axis"],
                row["side"],
                f"{value:,}",
                f"{seconds:.3f}",
                f"{min(rounds):.3f}-{max(rounds):.3f}",
                f"{work / 1e9:,.1f}" if work else "-",
                f"{work / seconds / 1e9:,.1f}" if work else "-",
                f"{size / MIB:,.0f}" if size else "-",
            )
    return table


def processes_table(found: dict[str, Any]) -> Table:
    """One line a number of processes."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("processes", "s a step", "times as fast"):
        table.add_column(heading, justify="right", no_wrap=True)
    low, high = min(found["rounds"]), max(found["rounds"])
    for count, seconds in found["seconds_a_step"].items():
        spread = f"{found['times_as_fast']:.2f} ({low:.2f}-{high:.2f})" if int(count) > 1 else "1"
        table.add_row(str(count), f"{median(seconds):.3f}", spread)
    return table


def picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel an axis, both scales logarithmic: medians, their spread, and the fitted power."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    names = list(dict.fromkeys(row["axis"] for row in rows))
    across = min(3, len(names))
    down = -(-len(names) // across)
    figure, panels = plt.subplots(down, across, figsize=(4.2 * across, 3.4 * down), squeeze=False)
    for panel, name in zip(panels.flat, names, strict=False):
        for row in (row for row in rows if row["axis"] == name):
            values, power = row["values"], row["time"]["power"]
            error = "" if power["error"] is None else f" ± {power['error']:.2f}"
            low = [s - min(r) for s, r in zip(row["seconds"], row["rounds"], strict=True)]
            high = [max(r) - s for s, r in zip(row["seconds"], row["rounds"], strict=True)]
            label = f"{row['side']}: {power['exponent']:.2f}{error}"
            drawn = panel.errorbar(values, row["seconds"], yerr=[low, high], fmt="o", capsize=3, label=label)
            fitted = [power["scale"] * value ** power["exponent"] for value in values]
            panel.plot(values, fitted, color=drawn.lines[0].get_color(), linewidth=1)
        panel.set(xscale="log", yscale="log", xlabel=row["label"], ylabel="seconds")
        panel.set_xticks(values, [f"{value:,}" for value in values], rotation=45, fontsize=7)
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.legend(fontsize=8)
        panel.grid(True, alpha=0.3)
    for panel in panels.flat[len(names) :]:
        panel.axis("off")
    figure.tight_layout()
    with replacing(path) as tmp:
        figure.savefig(tmp, format="png", dpi=120)
    plt.close(figure)
