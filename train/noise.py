"""Noise on the features in training, so that the draft bears with inputs it has not quite seen (Li et al. 2024, EAGLE).

Uniform in `(-scale, scale)` times the mean absolute value of that row's state at that site: sites differ in size by
orders of magnitude, so one amplitude for all, as EAGLE has it, would drown one and not touch another. Drawn from
(seed, step, place of the conversation in the global batch) alone, so the same run has the same noise resumed, and
whatever the number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from eagle3.ttt import PackedBatch


def with_noise(
    batch: PackedBatch, scale: float, sites: int, seed: int, step: int, places: Sequence[int]
) -> PackedBatch:
    """The batch with noise on `features`; the batch itself when `scale` is 0.

    Args:
        batch: packed conversations; not changed.
        scale: amplitude as a share of each state's mean size.
        sites: aux sites A in the features.
        seed: of the run.
        step: 0-based optimizer step.
        places: place of each of the batch's conversations in the step's global batch.
    """
    if not scale:
        return batch
    states = batch.features.unflatten(1, (sites, -1))  # [N, A, H]
    size = scale * states.abs().mean(-1, keepdim=True)  # [N, A, 1]
    draws = []
    for place, length in zip(places, batch.doc_lengths, strict=True):
        key = int(np.random.SeedSequence((seed, step, place)).generate_state(1, np.uint64)[0] >> np.uint64(1))
        random = torch.Generator(states.device).manual_seed(key)
        shape = (length, *states.shape[1:])
        draws.append(torch.rand(shape, generator=random, dtype=states.dtype, device=states.device))
    noise = torch.cat(draws).mul_(2).sub_(1).mul_(size)  # [N, A, H]
    return replace(batch, features=noise.add_(states).flatten(1))
