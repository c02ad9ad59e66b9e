"""What a draft was trained on and how that went, condensed for the page: curves, counts of data, vocabulary coverage.

The training stage's files belong to the front door, which hands in what they hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

POINTS = 80  # of a curve, at most
ROWS_A_POINT = 4  # fewer rows than this many a point would draw noise
LABEL_KINDS = ("domain", "language")

Row = Mapping[str, Any]


@dataclass
class Curve:
    """One kind of figures over the steps of training.

    Args:
        steps: [N] the last optimizer step that each point covers.
        loss: [K][N] cross-entropy in nats by position in the chain, mean over a point's rows; None = none known.
        accuracy: [K][N] share of positions whose first token is the target's own, given that all before it were.
        rows: how many rows a point is the mean of.
    """

    steps: list[int] = field(default_factory=list)
    loss: list[list[float | None]] = field(default_factory=list)
    accuracy: list[list[float | None]] = field(default_factory=list)
    rows: int = 1


@dataclass
class Training:
    """The training of one draft.

    Args:
        train: from the rows that steps wrote.
        validation: from the rows that validations wrote, none of them pooled.
        data: split ("train", "val") -> counts: records, tokens, supervised_tokens.
        coverage: the draft vocabulary: `vocab_size`, `target_vocab_size`, `min_coverage`, and `groups`, each with
            `kind` ("all", "domain", "language"), `label`, `records`, `tokens` (supervised) and `coverage` (a share).
    """

    train: Curve = field(default_factory=Curve)
    validation: Curve = field(default_factory=Curve)
    data: dict[str, dict[str, int]] = field(default_factory=dict)
    coverage: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Training:
        """Read what `dataclasses.asdict` made of one.

        Raises:
            TypeError: other fields.
        """
        curves = {name: Curve(**data.get(name, {})) for name in ("train", "validation")}
        return cls(**{**data, **curves})


def training_of(
    rows: Sequence[Row], counts: Mapping[str, Any] | None = None, coverage: Mapping[str, Any] | None = None
) -> Training:
    """Condense a training's own files.

    Args:
        rows: of `metrics.jsonl`, in order; rows of other kinds than `train` and `val` are left out.
        counts: the prepared set's, by split; entries that are no splits are left out.
        coverage: the report on the draft vocabulary (`coverage.json`).
    """
    steps = [row for row in rows if row.get("kind") == "train"]
    checks = [row for row in rows if row.get("kind") == "val"]
    splits = {name: dict(value) for name, value in (counts or {}).items() if isinstance(value, Mapping)}
    pooled = math.ceil(len(steps) / min(POINTS, max(1, len(steps) // ROWS_A_POINT))) if steps else 1
    return Training(_curve(steps, pooled), _curve(checks, 1), splits, _covered(coverage or {}))


def _curve(rows: Sequence[Row], pooled: int) -> Curve:
    """Means over `pooled` rows each; the last point may cover fewer."""
    points = [rows[start : start + pooled] for start in range(0, len(rows), pooled)]
    steps = [int(point[-1]["step"]) for point in points]
    return Curve(steps, _means(points, "losses", _supervised), _means(points, "acc", _tried), max(1, pooled))


def _supervised(row: Row, _k: int) -> float:
    return float(row.get("supervised") or 1)


def _tried(row: Row, k: int) -> float:
    """Rows that reached position `k`: of those supervised, the ones that were right at every position before."""
    return _supervised(row, k) * math.prod(row["acc"][:k])


def _means(points: Sequence[Sequence[Row]], name: str, weight: Callable[[Row, int], float]) -> list[list[float | None]]:
    """[K][N] weighted means of a list-valued figure, over the rows that have it."""
    depth = max((len(row.get(name) or []) for point in points for row in point), default=0)
    return [[_mean(point, name, k, weight) for point in points] for k in range(depth)]


def _mean(rows: Sequence[Row], name: str, k: int, weight: Callable[[Row, int], float]) -> float | None:
    known = [row for row in rows if k < len(row.get(name) or []) and math.isfinite(row[name][k])]
    total = math.fsum(weight(row, k) for row in known)
    return round(math.fsum(row[name][k] * weight(row, k) for row in known) / total, 5) if total > 0 else None


def _covered(report: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that a page shows, without the lists of single tokens."""
    if "all" not in report:
        return {}
    groups = [("all", "", report["all"])]
    for kind in LABEL_KINDS:
        labels = report.get(kind, {})
        groups += [(kind, label, one) for label, one in labels.items() if len(labels) > 1 or not label.startswith("(")]
    return {
        **{name: report.get(name) for name in ("vocab_size", "target_vocab_size", "min_coverage")},
        "groups": [
            {"kind": kind, "label": label, **{name: one[name] for name in ("records", "tokens", "coverage")}}
            for kind, label, one in groups
        ],
    }
