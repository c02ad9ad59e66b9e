"""The learning rate as a pure function of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math


def learning_rate(step: int, total: int, *, peak: float, warmup_ratio: float, min_ratio: float) -> float:
    """Linear warm-up to `peak`, then half a cosine down to `peak * min_ratio`.

    Args:
        step: 0-based optimizer step about to be taken.
        total: optimizer steps of the whole run.
        peak: the highest rate, reached at the last warm-up step.
        warmup_ratio: share of `total` spent warming up (rounded up to whole steps).
        min_ratio: the rate that step `total` would have, as a share of `peak`.
    """
    warmup = math.ceil(warmup_ratio * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
