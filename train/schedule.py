"""The learning rate as a pure function of the step, so that resuming needs no scheduler state."""

from __future__ import annotations

import math


def learning_rate(
    step: int,
    total: int,
    *,
    peak: float,
    warmup_ratio: float,
    min_ratio: float,
    schedule: str = "cosine",
    decay_ratio: float = 0.2,
) -> float:
    """Linear warm-up to `peak`, then down to `peak * min_ratio`.

    Args:
        step: 0-based optimizer step about to be taken.
        total: optimizer steps of the whole run.
        peak: the highest rate, reached at the last warm-up step.
        warmup_ratio: share of `total` spent warming up (rounded up to whole steps).
        min_ratio: the rate that step `total` would have, as a share of `peak`.
        schedule: "cosine" (half a period), "linear", or "wsd": at `peak` until the last `decay_ratio` of `total`, then
            linear (warm-up, stable, decay; Hu et al. 2024, "MiniCPM").
        decay_ratio: "wsd" only.
    """
    warmup = math.ceil(warmup_ratio * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    start = max(warmup, total - math.ceil(decay_ratio * total)) if schedule == "wsd" else warmup
    progress = min(1.0, max(0.0, (step - start) / max(1, total - start)))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return peak * (min_ratio + (1 - min_ratio) * left)
