"""Validation: the same unrolled forward on held-out conversations, spread over the processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from eagle3.ttt import PackedBatch
from train.batches import pack
from train.figures import figures
from train.job import SampleSource
from train.world import World


def _shares(count: int, micro: int, world: World) -> list[list[int]]:
    """Micro-batches of this process. All processes get as many: the short ones end with empty lists."""
    whole = [list(range(i, min(i + micro, count))) for i in range(0, count, micro)]
    rounds = -(-len(whole) // world.size)
    mine = whole[world.rank :: world.size]
    return mine + [[]] * (rounds - len(mine))


def _unsupervised(batch: PackedBatch) -> PackedBatch:
    return dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))


def validate(
    engine: Any, source: SampleSource, *, micro: int, factors: Sequence[float], world: World
) -> dict[str, Any]:
    """Figures over the whole validation split (see `train.figures.figures`). Every process must call it.

    Args:
        engine: DeepSpeed engine around `Trainee`.
        source: the validation split, not empty.
        micro: conversations per forward pass.
        factors: `[K]` weight of each step in the loss.
    """
    steps = len(factors)
    weights = torch.ones(steps, dtype=torch.float64)
    total = torch.zeros(4, steps, dtype=torch.float64)
    engine.eval()
    with torch.no_grad():
        for group in _shares(len(source), micro, world):
            # A process without a share still runs a forward pass: under ZeRO-3 the others need its weights.
            batch = pack([source.get(i) for i in group]) if group else _unsupervised(pack([source.get(0)]))
            _, stats = engine(
                batch.features, batch.token_ids, batch.teacher, batch.loss_mask, batch.doc_lengths, weights
            )
            total += stats.cpu()
    engine.train()
    return figures(world.sum(total), factors)
