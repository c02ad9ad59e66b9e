"""The training of a draft as the page shows it: two charts, counts of data, coverage of the draft vocabulary."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from eval.curves import Line, line_chart
from eval.training import Curve, Training


def training_view(title: str, training: Training) -> dict[str, Any]:
    """Charts and tables about one training."""
    splits = {"train": "training", "val": "validation"}
    names = [name for name in dict.fromkeys(name for counts in training.data.values() for name in counts)]
    groups = training.coverage.get("groups", [])
    return {
        "title": title,
        "rows": training.train.rows,
        "loss": Markup(_chart(training, "loss", "Loss, in nats")),
        "accuracy": Markup(_chart(training, "accuracy", "Accuracy, where all positions before were right")),
        "counts": [name.replace("_", " ") for name in names],
        "splits": [
            (splits.get(split, split), [f"{counts.get(name, 0):,}" for name in names])
            for split, counts in training.data.items()
        ],
        "coverage": training.coverage,
        "tokens": max([one["tokens"] for one in groups if one["kind"] == "all"] + [1]),
    }


def _chart(training: Training, name: str, label: str) -> str:
    """Loss or accuracy by position in the chain, with the validations as rings."""
    rows = _rows_of(training.train, name)
    lines = [
        Line(f"pos {k + 1}", training.train.steps, row, _dots(training.validation, name, k))
        for k, row in enumerate(rows)
    ]
    ends = [f"position {k + 1} ends at {row[-1]:.3f}" for k, row in enumerate(rows) if row and row[-1] is not None]
    words = f"{label} over {training.train.steps[-1] if training.train.steps else 0} steps: {', '.join(ends)}"
    return line_chart(lines, words, "step", label, percent=name == "accuracy")


def _rows_of(curve: Curve, name: str) -> list[list[float | None]]:
    return curve.loss if name == "loss" else curve.accuracy


def _dots(curve: Curve, name: str, k: int) -> list[tuple[float, float]]:
    rows = _rows_of(curve, name)
    known = zip(curve.steps, rows[k], strict=True) if k < len(rows) else []
    return [(step, value) for step, value in known if value is not None]
