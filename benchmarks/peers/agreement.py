"""Whether two sides do the same work: their losses turned into one quantity, and their gradients compared."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.documents import CaseFiles

# Relative. bfloat16 sums of thousands of rows differ by its rounding.
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
GRADIENT_TOLERANCE = {"float32": 1e-2, "bfloat16": 0.2}


def mean_losses(answer: dict[str, Any], files: CaseFiles) -> list[float]:
    """A side's answer to `loss` -> mean cross entropy over the supervised rows of each step, nats, `[K]`."""
    sums = answer["sums"]
    if answer["kind"] == "kl":
        sums = [divergence + entropy for divergence, entropy in zip(sums, files.entropy, strict=True)]
    return [total / count for total, count in zip(sums, files.counts, strict=True)]


@dataclass(frozen=True)
class Agreement:
    """How far a peer is from us.

    Args:
        losses: the peer's mean cross entropies, `[K]`.
        loss_off: largest relative difference of a step's mean.
        gradient_off: largest difference of a weight's gradient, beside that gradient's norm.
        weight: where that is.
        missing: weights that only one of the two trains.
        agrees: whether both differences are within tolerance, and all train the same weights but those told frozen.
    """

    losses: list[float]
    loss_off: float
    gradient_off: float
    weight: str
    missing: list[str]
    agrees: bool

    @property
    def words(self) -> str:
        """The differences in a line."""
        parts = [f"losses {self.loss_off:.1e}", f"gradients {self.gradient_off:.1e} ({self.weight})"]
        if self.missing:
            parts.append(f"trained by one alone: {', '.join(self.missing)}")
        return "not timed, differs from ours: " + ", ".join(parts)


def compare(
    ours: list[float],
    theirs: list[float],
    our_gradients: dict[str, Any],
    their_gradients: dict[str, Any],
    dtype: str,
    frozen: Collection[str] = (),
) -> Agreement:
    """Compare mean losses `[K]` and gradients.

    Args:
        ours, theirs: see `mean_losses`.
        our_gradients, their_gradients: `benchmarks.peers.serving.fingerprint` of each trained weight.
        dtype: of the case.
        frozen: weights that the peer was told not to train.
    """
    loss_off = max(abs(a - b) / abs(a) for a, b in zip(ours, theirs, strict=True))
    shared = sorted(set(our_gradients) & set(their_gradients))
    off = {name: _difference(our_gradients[name], their_gradients[name]) for name in shared}
    weight = max(off, key=off.__getitem__) if off else ""
    gradient_off = off.get(weight, math.inf)
    missing = sorted(set(our_gradients) ^ set(their_gradients))
    within = loss_off <= LOSS_TOLERANCE[dtype] and gradient_off <= GRADIENT_TOLERANCE[dtype]
    return Agreement(theirs, loss_off, gradient_off, weight, missing, within and set(missing) <= set(frozen))


def _difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Difference of norms and of the sampled numbers, each beside its own size; the larger."""
    norms = abs(a["norm"] - b["norm"]) / max(a["norm"], 1e-30)
    apart = math.dist(a["sample"], b["sample"])
    return max(norms, apart / max(math.hypot(*a["sample"]), 1e-30))
