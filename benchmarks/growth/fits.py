"""Two ways to say how a cost grows with a size: a power of it, or a part that grows beside a part that does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eagle3.errors import DataError


@dataclass(frozen=True)
class Power:
    """`y = scale * x ** exponent`, by least squares on the logarithms.

    Args:
        exponent: by how much `log y` grows with `log x`.
        error: its standard error, from the points' distance to the line; None with fewer than three points.
        scale: `y` at `x = 1`.
        off: root of the mean square of the relative residuals.
    """

    exponent: float
    error: float | None
    scale: float
    off: float

    def at(self, x: float) -> float:
        """`y` of the fit."""
        return self.scale * x**self.exponent


@dataclass(frozen=True)
class Line:
    """`y = fixed + each * x`, by least squares on relative residuals.

    Args:
        fixed: what is there at `x = 0`.
        each: what one more of `x` costs.
        off: root of the mean square of the relative residuals.
    """

    fixed: float
    each: float
    off: float

    def at(self, x: float) -> float:
        """`y` of the fit."""
        return self.fixed + self.each * x


@dataclass(frozen=True)
class Growth:
    """Both fits, and the exponent between the two largest sizes, which shows what is still to come."""

    power: Power
    line: Line
    last: float

    @property
    def straight(self) -> bool:
        """Whether the line describes the points better, with a part that stays: then the exponent says less."""
        return self.line.off < self.power.off and self.line.fixed > 0 and self.line.each > 0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form."""
        return {**asdict(self), "straight": self.straight}


def fit_power(x: Sequence[float], y: Sequence[float]) -> Power:
    """Fit a power.

    Raises:
        DataError: fewer than two sizes, or a number that is not positive.
    """
    _check(x, y)
    a, b = np.log(np.asarray(x, dtype=float)), np.log(np.asarray(y, dtype=float))
    away = a - a.mean()
    exponent = float((away * (b - b.mean())).sum() / (away**2).sum())
    residuals = b - b.mean() - exponent * away
    error = None
    if len(x) > 2:
        error = math.sqrt(float((residuals**2).sum()) / (len(x) - 2) / float((away**2).sum()))
    scale = math.exp(float(b.mean() - exponent * a.mean()))
    return Power(exponent, error, scale, _off(x, y, lambda one: scale * one**exponent))


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Fit a line; raises as `fit_power`."""
    _check(x, y)
    sizes, costs = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    columns = np.stack([1 / costs, sizes / costs], axis=1)
    (fixed, each), *_ = np.linalg.lstsq(columns, np.ones(len(x)), rcond=None)
    return Line(float(fixed), float(each), _off(x, y, lambda one: fixed + each * one))


def fit(x: Sequence[float], y: Sequence[float]) -> Growth:
    """Both fits, over sizes in ascending order."""
    last = math.log(y[-1] / y[-2]) / math.log(x[-1] / x[-2])
    return Growth(fit_power(x, y), fit_line(x, y), last)


def _check(x: Sequence[float], y: Sequence[float]) -> None:
    if len(set(x)) < 2 or len(x) != len(y) or min(*x, *y) <= 0:
        raise DataError(
            "no growth can be fitted",
            why=f"sizes {list(x)}, costs {list(y)}",
            mend="measure at least two different sizes, with positive costs",
        )


def _off(x: Sequence[float], y: Sequence[float], model: Any) -> float:
    squares = [(model(one) / cost - 1) ** 2 for one, cost in zip(x, y, strict=True)]
    return math.sqrt(sum(squares) / len(squares))
