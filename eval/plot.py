"""The picture to paste into a message: accept length, acceptance by position, speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from eagle3.atomic import replacing
from eval.series import Series

COLOURS = ("#2160a6", "#ad5806", "#1f7d60", "#8247b0", "#b23a33", "#5f6875")  # the page's, in its light scheme
PLAIN = "#9aa3ad"


def draw_accept(series: Sequence[Series], path: Path, title: str) -> None:
    """Write the PNG, atomically."""
    figure, (tau, places, speed) = pyplot.subplots(1, 3, figsize=(15, 5.2), width_ratios=(1.3, 1, 1.1))
    try:
        _draw_tau(tau, series)
        _draw_positions(places, series)
        _draw_speed(speed, series)
        for axes in (tau, places, speed):
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_axisbelow(True)
            axes.grid(axis="y", color="#e5e7eb")
        figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
        handles, labels = tau.get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower left", ncols=2, frameon=False, fontsize=9)
        figure.tight_layout(rect=(0, 0.06 + 0.035 * ((len(labels) + 1) // 2 - 1), 1, 0.97))
        with replacing(path) as tmp:
            figure.savefig(tmp, dpi=130, format="png")
    finally:
        pyplot.close(figure)


LABELS: dict[str, dict[str, Any]] = {
    "inside": {"label_type": "center", "color": "white"},
    "above": {"label_type": "edge", "padding": 2},
}


def _bars(
    axes: Any, series: Sequence[Series], values: list[list[float]], names: list[str], digits: int, where: str
) -> list[Any]:
    """Grouped bars, a group a name, their numbers `inside` or `above`; returns one container a series."""
    width = 0.8 / len(series)
    out = []
    for place, (one, row) in enumerate(zip(series, values, strict=True)):
        middles = [x + (place - (len(series) - 1) / 2) * width for x in range(len(names))]
        bars = axes.bar(middles, row, width * 0.92, color=COLOURS[place % len(COLOURS)], label=one.label)
        if len(series) * len(names) <= 16:
            axes.bar_label(bars, fmt=f"%.{digits}f", fontsize=8, **LABELS[where])
        out.append(bars)
    axes.set_xticks(range(len(names)), [name.replace("_", "\n", 1) if len(names) > 3 else name for name in names])
    return out


def _draw_tau(axes: Any, series: Sequence[Series]) -> None:
    ceiling = max(one.result.ceiling for one in series)
    names = [summary.name for summary in series[0].summaries]
    values = [[summary.tau for summary in one.summaries] for one in series]
    for one, bars in zip(series, _bars(axes, series, values, names, 2, "inside"), strict=True):
        predicted = one.result.predicted_tau
        if predicted is not None and not one.served.differences:
            spans = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars]
            label = "predicted from validation" if one is series[0] else None
            axes.hlines([predicted] * len(spans), *zip(*spans, strict=True), colors="black", linewidth=2, label=label)
    axes.axhline(ceiling, color="#6b7280", linestyle="--", linewidth=1)
    axes.text(len(names) - 0.5, ceiling, f"ceiling {ceiling}", ha="right", va="bottom", fontsize=8, color="#6b7280")
    axes.set_ylim(0, ceiling + 0.3)
    axes.set_title("Accept length (tokens per verify)", loc="left", fontsize=11)


def _draw_positions(axes: Any, series: Sequence[Series]) -> None:
    steps = max(one.result.num_steps for one in series)
    for place, one in enumerate(series):
        shares = one.served.overall.acceptance
        xs = [k + 1 for k, share in enumerate(shares) if share is not None]
        ys = [100 * share for share in shares if share is not None]
        colour = COLOURS[place % len(COLOURS)]
        axes.plot(xs, ys, "o-", color=colour, linewidth=2)
        predicted = one.result.predicted_acceptance
        if predicted and not one.served.differences:
            known = [100 * share for share in predicted[:steps]]
            axes.plot(range(1, len(known) + 1), known, "_--", color=colour, markersize=14, linewidth=1)
    axes.set_ylim(0, 100)
    axes.set_xticks(range(1, steps + 1))
    axes.set_xlim(0.6, steps + 0.4)
    axes.set_xlabel("position in the chain")
    axes.set_title("Kept when judged, % (all sets; dashed: predicted)", loc="left", fontsize=11)


def _draw_speed(axes: Any, series: Sequence[Series]) -> None:
    names = [summary.name for summary in series[0].summaries]
    values = [[summary.rate or 0.0 for summary in one.summaries] for one in series]
    plain = [[summary.plain_rate for summary in one.summaries] for one in series]
    for rates, bars in zip(plain, _bars(axes, series, values, names, 1, "above"), strict=True):
        for rate, bar in zip(rates, bars, strict=True):
            if rate is not None:
                left = bar.get_x()
                axes.hlines(rate, left, left + bar.get_width(), colors="black", linestyles=":", linewidth=2)
    note = " (dotted: without a draft)" if any(rate for rates in plain for rate in rates) else ""
    axes.set_title(f"Tokens a second{note}", loc="left", fontsize=11)
