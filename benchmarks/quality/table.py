"""Outcomes gathered over seeds, and their table."""

from __future__ import annotations

import statistics
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.quality.runs import Outcome
from benchmarks.quality.variants import Variant
from benchmarks.side_by_side import machine_line


def spread(values: list[float]) -> tuple[float, float] | None:
    """Mean and sample standard deviation (0 for one value); None for no value."""
    if not values:
        return None
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def gather(variants: list[Variant], outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """One row a variant: its outcomes, their mean and spread, and tau against SpecForge's best variant.

    The ratio is of means over the same seeds: measured tau where both sides have it, else predicted; SpecForge's best
    is the variant of its side with the highest mean of that figure.
    """
    rows: list[dict[str, Any]] = []
    for variant in variants:
        own = [one for one in outcomes if one.variant == variant.name]
        if own:
            taus = [one.tau for one in own if one.tau is not None]
            rows.append(
                {
                    "variant": variant.name,
                    "about": variant.about,
                    "side": variant.side,
                    "settings": list(variant.settings),
                    "seeds": [one.seed for one in own],
                    "predicted": spread([one.predicted for one in own]),
                    "tau": spread(taus),
                    "outcomes": [vars(one) for one in own],
                }
            )
    for figure in ("predicted", "tau"):
        best = max((row[figure][0] for row in rows if row["side"] == "specforge" and row[figure]), default=None)
        for row in rows:
            row[f"{figure}_ratio"] = row[figure][0] / best if best and row[figure] else None
    return rows


def as_table(rows: list[dict[str, Any]], title: str, facts: dict[str, Any]) -> Table:
    """One line a variant."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.caption, table.caption_justify = machine_line(facts), "left"
    table.add_column("variant", no_wrap=True)
    table.add_column("what it changes")
    for heading in ("seeds", "predicted\ntau", "times\nSpecForge", "measured\ntau", "times\nSpecForge"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [_cell(row["predicted"]), _ratio(row["predicted_ratio"]), _cell(row["tau"]), _ratio(row["tau_ratio"])]
        table.add_row(row["variant"], row["about"], str(len(row["seeds"])), *cells)
    return table


def _cell(figure: tuple[float, float] | None) -> str:
    if figure is None:
        return ""
    mean, deviation = figure
    return f"{mean:.3f} ± {deviation:.3f}" if deviation else f"{mean:.3f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
