"""Fit a fresh draft's start to the training rows (`eagle3.draft_fit`), once, before the first step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from eagle3.draft import Eagle3Draft
from eagle3.draft_fit import Moments, fit_linear, put_linear
from eagle3.errors import DataError
from train.batches import StepPlan
from train.job import SampleSource, TrainSample
from train.world import World

RIDGE = 1e-2  # penalty, as a share of each input's mean square
BLOCK = 4096  # rows whose moments are taken at once


def fit_start(draft: Eagle3Draft, samples: SampleSource, plan: StepPlan, rows: int, seed: int, world: World) -> str:
    """Fit `draft` in place on the supervised rows of the run's first conversations, in their order; returns a line.

    Only conversations that the run reads are used. Rank 0 fits, the others are given its weights; every process must
    call it.

    Args:
        draft: fresh, kind "llama", float32, on the CPU.
        samples: the training split.
        plan: says which conversations the run begins with.
        rows: supervised rows to use, at most.
        seed: of the random part.
        world: the process group.

    Raises:
        DataError: a conversation is not there (in rounds, the first one holds fewer than `rows`).
    """
    used = 0
    if world.first:
        moments = Moments(draft)
        for block in _blocks(samples, plan, rows):
            moments.add(*block)
        used = moments.rows
        if used:
            put_linear(draft, fit_linear(moments, RIDGE), seed)
    for parameter in draft.midlayer.self_attn.parameters():
        _share(parameter, world)
    _share(draft.fc.weight, world)
    _share(draft.midlayer.mlp.down_proj.weight, world)
    return f"the start is fitted to {used:,} rows" if used else "no row to fit the start to"


def _blocks(samples: SampleSource, plan: StepPlan, rows: int) -> Iterator[list[Tensor]]:
    """Supervised rows of the run's conversations in the order of their first reading: features, tokens, teacher."""
    order = dict.fromkeys(index for step in range(plan.total_steps) for index in plan.global_batch(step))
    waiting: list[tuple[Tensor, Tensor, Tensor]] = []
    seen = held = 0
    for index in order:
        sample = _sample(samples, index)
        learnt = sample.loss_mask.nonzero()[: rows - seen, 0]
        waiting.append((sample.features[learnt], sample.token_ids[learnt], sample.teacher[learnt]))
        seen, held = seen + len(learnt), held + len(learnt)
        if held >= BLOCK or seen == rows:
            yield [torch.cat(parts) for parts in zip(*waiting, strict=True)]
            waiting, held = [], 0
        if seen == rows:
            return
    if waiting:
        yield [torch.cat(parts) for parts in zip(*waiting, strict=True)]


def _sample(samples: SampleSource, index: int) -> TrainSample:
    try:
        return samples.get(index)
    except DataError as err:
        mend = (
            "extract all of it, or in rounds: lower draft.fit_rows to what the first round holds, or raise disk_budget"
        )
        raise DataError("the start cannot be fitted", where=err.where, why=err.what, mend=mend) from None


def _share(parameter: Tensor, world: World) -> None:
    on_device = parameter.detach().to(world.device, copy=True)
    torch.distributed.broadcast(on_device, src=0)
    with torch.no_grad():
        parameter.copy_(on_device)
