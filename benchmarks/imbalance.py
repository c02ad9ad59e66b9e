"""How unevenly conversations of real lengths load the processes of one step: the slowest is waited for by all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from train.batches import StepPlan
from train.config import TrainConfig


@dataclass(frozen=True)
class Imbalance:
    """Rows of the fullest process over the mean of all, of the steps of a run.

    Args:
        mean: over the steps: by so much training takes longer than with even loads.
        high: its 95th percentile.
    """

    mean: float
    high: float


def imbalance(
    lengths: Sequence[int], world: int, batch: int, steps: int = 100, seed: int = 0, drawn: bool = False
) -> Imbalance:
    """What `StepPlan` gives each process, step by step.

    Args:
        lengths: rows of every conversation.
        world: processes.
        batch: conversations of a step.
        steps: looked at.
        seed: of the order.
        drawn: conversations are handed out in the order drawn, instead of dealt by length as training does.
    """
    cfg = TrainConfig(global_batch_size=batch, micro_batch_size=batch // world, max_steps=steps, seed=seed)
    plan = StepPlan(len(lengths), cfg, world, 0, None if drawn else lengths)
    loads = []
    for step in range(steps):
        rows = [lengths[i] for i in plan.global_batch(step)]
        loads.append([sum(rows[place] for place in share) for share in plan.shares(step)])
    return _of(np.array(loads))


def _of(loads: np.ndarray) -> Imbalance:
    """`loads [steps, world]`."""
    ratio = loads.max(1) / loads.mean(1)
    return Imbalance(float(ratio.mean()), float(np.quantile(ratio, 0.95)))


def long_tailed(count: int, median: float, sigma: float, longest: int, seed: int = 0) -> list[int]:
    """Lengths whose logarithms are normal, cut at the longest: what chat data looks like."""
    draw = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return [int(n) for n in np.clip(draw, 16, longest)]
