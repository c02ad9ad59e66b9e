"""A line chart as inline SVG: axes with labels, a line a series with its name at its end, values on hover.

Colours come from the page's classes (`l0` to `l5`, `axis`, `grid`), so that a chart follows light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from matplotlib.ticker import MaxNLocator

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 42, 306, 30, 188  # edges of the plotting area
NAME_GAP = 14  # least distance between two lines' names

Values = Sequence[float | None]


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Args:
        name: short; stands at the line's end.
        xs: [N] where its values stand, ascending.
        ys: [N] values; None leaves a gap.
        dots: [(x, y)] single values beside the line, drawn as rings.
    """

    name: str
    xs: Sequence[float]
    ys: Values
    dots: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Scale:
    """Maps values to places; `ticks` are round numbers that span them."""

    low: float
    high: float
    ticks: Sequence[float]

    @classmethod
    def over(cls, values: Sequence[float], low: float | None = None) -> Scale:
        """Spans all values, from `low` where that is given."""
        least, most = min(values) if low is None else min(low, *values), max(values)
        most = most if most > least else least + 1
        ticks = [float(tick) for tick in MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(least, most)]
        return cls(min(least, ticks[0]), max(most, ticks[-1]), ticks)

    def place(self, value: float, start: float, end: float) -> float:
        """Where `value` stands between the places `start` (of `low`) and `end` (of `high`)."""
        return start + (value - self.low) / (self.high - self.low) * (end - start)


def line_chart(lines: Sequence[Line], words: str, x_label: str, y_label: str, percent: bool = False) -> str:
    """The chart, or nothing where no line has a value.

    Args:
        lines: at most six tell apart by colour; each has its name at its end, too.
        words: what a reader who does not see it is told.
        x_label: under the horizontal axis.
        y_label: above the vertical axis.
        percent: the values are shares, shown as percentages.
    """
    known = [y for line in lines for y in [*line.ys, *(y for _, y in line.dots)] if y is not None]
    if not known:
        return ""
    across = [x for line in lines for x in [*line.xs, *(x for x, _ in line.dots)]]
    x_scale = Scale(min(across), max(across) if max(across) > min(across) else min(across) + 1, ())
    y_scale = Scale.over(known, 0.0 if percent else None)
    parts = [*_vertical(y_scale, y_label, percent), *_horizontal(x_scale, x_label)]
    for place, line in enumerate(lines):
        parts += _line(line, place, x_scale, y_scale)
    parts += _names(lines, y_scale)
    parts += _hovers(lines, x_scale, x_label, percent)
    head = f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(words)}">'
    return f"{head}{''.join(parts)}</svg>"


def _number(value: float, percent: bool) -> str:
    return f"{100 * value:.0f}%" if percent else f"{value:.4g}"


def _vertical(scale: Scale, label: str, percent: bool) -> list[str]:
    """The vertical axis: its label above it, a grid line and a number a tick."""
    parts = [f'<text class="label" x="0" y="14">{escape(label)}</text>']
    for tick in scale.ticks:
        y = scale.place(tick, BOTTOM, TOP)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f} H{RIGHT}"/>')
        parts.append(
            f'<text class="axis" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick, percent)}</text>'
        )
    return parts


def _horizontal(scale: Scale, label: str) -> list[str]:
    """The horizontal axis: whole numbers where they fit, its label under them."""
    ticks = MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]).tick_values(scale.low, scale.high)
    inside = [tick for tick in ticks if scale.low <= tick <= scale.high] or [scale.low]
    parts = [f'<path class="edge" d="M{LEFT} {BOTTOM} H{RIGHT}"/>']
    for tick in inside:
        x = scale.place(tick, LEFT, RIGHT)
        parts.append(f'<path class="edge" d="M{x:.1f} {BOTTOM} v4"/>')
        parts.append(f'<text class="axis" x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{tick:,.0f}</text>')
    middle = (LEFT + RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(label)}</text>')
    return parts


def _line(line: Line, place: int, x_scale: Scale, y_scale: Scale) -> list[str]:
    """The strokes between neighbouring values, and the rings."""
    path, pen_down = [], False
    for x, y in zip(line.xs, line.ys, strict=True):
        if y is None:
            pen_down = False
            continue
        at = f"{x_scale.place(x, LEFT, RIGHT):.1f} {y_scale.place(y, BOTTOM, TOP):.1f}"
        path.append(f"{'L' if pen_down else 'M'}{at}")
        pen_down = True
    parts = [f'<path class="line l{place % 6}" d="{" ".join(path)}"/>'] if path else []
    for x, y in line.dots:
        at = f'cx="{x_scale.place(x, LEFT, RIGHT):.1f}" cy="{y_scale.place(y, BOTTOM, TOP):.1f}"'
        parts.append(f'<circle class="ring l{place % 6}" {at} r="4"/>')
    return parts


def _names(lines: Sequence[Line], scale: Scale) -> list[str]:
    """Each line's name at its end, moved apart where lines end close to one another."""
    ends = [next((y for y in reversed(line.ys) if y is not None), None) for line in lines]
    named = [(k, scale.place(end, BOTTOM, TOP)) for k, end in enumerate(ends) if end is not None]
    heights = spread([y for _, y in named], TOP, BOTTOM, NAME_GAP)
    return [
        f'<text class="name n{k % 6}" x="{RIGHT + 8}" y="{y + 4:.1f}">{escape(lines[k].name)}</text>'
        for (k, _), y in zip(named, heights, strict=True)
    ]


def _hovers(lines: Sequence[Line], scale: Scale, x_label: str, percent: bool) -> list[str]:
    """An invisible strip a point, whose title tells every line's value there."""
    xs = lines[0].xs
    places = [scale.place(x, LEFT, RIGHT) for x in xs]
    edges = [LEFT, *((a + b) / 2 for a, b in pairwise(places)), RIGHT]
    parts = []
    for k, x in enumerate(xs):
        told = [f"{line.name}: {_told(line.ys[k], percent)}" for line in lines if k < len(line.ys)]
        title = escape(f"{x_label} {x:,.0f}; " + "; ".join(told))
        box = f'x="{edges[k]:.1f}" y="{TOP}" width="{max(edges[k + 1] - edges[k], 0.1):.1f}" height="{BOTTOM - TOP}"'
        parts.append(f'<rect class="hover" {box}><title>{title}</title></rect>')
    return parts


def _told(value: float | None, percent: bool) -> str:
    if value is None or math.isnan(value):
        return "not known"
    return f"{100 * value:.1f}%" if percent else f"{value:.3f}"


def spread(wanted: Sequence[float], low: float, high: float, gap: float) -> list[float]:
    """Move heights apart to at least `gap`, keeping their order, none above `high`, none below `low` where they fit."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = list(wanted)
    floor = low
    for i in order:
        placed[i] = max(wanted[i], floor)
        floor = placed[i] + gap
    roof = high
    for i in reversed(order):
        placed[i] = min(placed[i], roof)
        roof = placed[i] - gap
    return placed
