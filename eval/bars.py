"""Bars of the page, as rows that its template draws: accept length, acceptance by position, speeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.results import Summary
from eval.series import Series
from eval.table import percent

COLOURS = 6  # classes b0 to b5 of the page


def bar_colour(place: int) -> str:
    """The page's class for the colour of the series at `place`."""
    return f"b{place % COLOURS}"


def set_name(summary: Summary) -> str:
    """A prompt set's name; the pooled one's in words."""
    return "all sets" if summary.name == "all" else summary.name


def bars_by_set(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Bars of accept length, grouped by prompt set; widths are shares of the way from 0 to the ceiling."""
    groups: dict[str, list[dict[str, Any]]] = {}
    top = max(one.result.ceiling for one in series)
    for place, one in enumerate(series):
        trusted = one.result.predicted_tau if not one.served.differences else None
        for summary in one.summaries:
            row = {
                "label": one.label,
                "name": one.label if len(series) > 1 else "",
                "colour": bar_colour(place),
                "width": 100 * summary.tau / top,
                "mark": None if trusted is None else 100 * trusted / top,
                "value": f"{summary.tau:.2f}",
                "note": f"{summary.tau_low:.2f} to {summary.tau_high:.2f}",
            }
            groups.setdefault(set_name(summary), []).append(row)
    return [{"name": name, "bars": bars, "short": False, "stacked": False} for name, bars in groups.items()]


def bars_by_position(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Bars of conditional acceptance, grouped by place in the chain."""
    groups = []
    for k in range(max(one.result.num_steps for one in series)):
        bars = []
        for place, one in enumerate(series):
            overall, predicted = one.served.overall, one.result.predicted_acceptance or []
            share, reach = at_position(overall.acceptance, k), at_position(overall.reach, k)
            known = at_position(predicted, k) if not one.served.differences else None
            bars.append(
                {
                    "label": one.label,
                    "name": one.label if len(series) > 1 else "",
                    "colour": bar_colour(place),
                    "width": 100 * (share or 0),
                    "mark": None if known is None else 100 * known,
                    "value": percent(share),
                    "note": f"{percent(reach)} of all",
                }
            )
        groups.append({"name": f"Position {k + 1}", "bars": bars, "short": False, "stacked": False})
    return groups


def at_position(values: Sequence[float | None], k: int) -> float | None:
    """The figure of position `k`, or None where there is none."""
    return values[k] if k < len(values) else None


def bars_of_speed(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Pairs of bars, with the draft and without: a pair a prompt set, or of several ways of serving a pair a way."""
    several = len(series) > 1
    pairs = [
        (one.label if several else set_name(summary), bar_colour(place), summary)
        for place, one in enumerate(series)
        for summary in ([one.served.overall] if several else one.summaries)
    ]
    top = max((rate for _, _, summary in pairs for rate in (summary.rate, summary.plain_rate) if rate), default=1.0)
    return [
        {"name": name, "bars": _speed_bars(summary, colour, top), "short": True, "stacked": several}
        for name, colour, summary in pairs
    ]


def _speed_bars(summary: Summary, colour: str, top: float) -> list[dict[str, Any]]:
    ratio = "" if summary.gain is None else f"{summary.gain:.2f}x"
    rows = [("with the draft", colour, summary.rate, ratio), ("alone", "plain", summary.plain_rate, "")]
    return [
        {
            "label": name,
            "name": name,
            "colour": fill,
            "width": 100 * (rate or 0) / top,
            "mark": None,
            "value": "-" if rate is None else f"{rate:,.1f} tok/s",
            "note": note,
        }
        for name, fill, rate, note in rows
        if name != "alone" or rate is not None
    ]
