"""From summed loss parts to the figures people read: loss, accuracy per step, predicted accept length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def predicted_tau(accuracies: list[float]) -> float:
    """Tokens a verify step would emit, the bonus token included: `1 + sum_k prod_{j<=k} acc_j`."""
    tau, chain = 1.0, 1.0
    for accuracy in accuracies:
        chain *= accuracy
        tau += chain
    return tau


def figures(stats: Tensor, factors: Sequence[float]) -> dict[str, Any]:
    """Figures of a batch or a split.

    Args:
        stats: `[4, K]` float64 sums over all its micro-batches: cross entropy, supervised rows, right, tried.
        factors: `[K]` weight of each step.

    Returns:
        loss (weighted sum of the steps' means, as trained on), losses `[K]`, acc `[K]` (conditional: given that all
        steps before were right; 0 where nothing was tried), predicted_tau, supervised (rows of step 0).
    """
    sums, counts, right, tried = stats.tolist()
    losses = [s / c if c else 0.0 for s, c in zip(sums, counts, strict=True)]
    acc = [r / t if t else 0.0 for r, t in zip(right, tried, strict=True)]
    loss = math.fsum(factor * value for factor, value in zip(factors, losses, strict=True))
    tau = predicted_tau(acc)
    return {"loss": loss, "losses": losses, "acc": acc, "predicted_tau": tau, "supervised": int(counts[0])}
