"""Validation: the same unrolled forward on held-out conversations, spread over the processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from train.figures import figures
from train.loader import Step
from train.world import World


def shares(count: int, micro: int, world: World) -> list[list[int]]:
    """Micro-batches of this process. All processes get as many: the short ones end with empty lists."""
    whole = [list(range(i, min(i + micro, count))) for i in range(0, count, micro)]
    rounds = -(-len(whole) // world.size)
    mine = whole[world.rank :: world.size]
    return mine + [[]] * (rounds - len(mine))


def validate(
    engine: Any, data: Iterable[Step], share: Sequence[Sequence[int]], *, factors: Sequence[float], world: World
) -> dict[str, Any]:
    """Figures over the whole validation split (see `train.figures.figures`). Every process must call it.

    Args:
        engine: DeepSpeed engine around `Trainee`.
        data: this process's micro-batches of the validation split, one a step.
        share: `shares` of this process; what is read in place of an empty one does not count.
        factors: `[K]` weight of each step in the loss.
    """
    steps = len(factors)
    weights = torch.ones(steps, dtype=torch.float64)
    total = torch.zeros(4, steps, dtype=torch.float64)
    engine.eval()
    with torch.no_grad():
        for step, group in zip(data, share, strict=True):
            for batch in step:
                mask = batch.loss_mask if group else torch.zeros_like(batch.loss_mask)
                _, stats = engine(batch.features, batch.token_ids, batch.teacher, mask, batch.doc_lengths, weights)
                total += stats.cpu()
                del batch, mask  # its place is the next one's
    engine.train()
    return figures(world.sum(total), factors)
