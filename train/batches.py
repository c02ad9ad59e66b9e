"""Which conversations make up each optimizer step, and packing them.

The conversations of epoch e stand in a permutation drawn from (seed, e); the epochs follow one another in one
stream, cut into global batches of B, so the same conversations make a step whatever the number of processes. Within a
global batch they are dealt to the processes by length, equally many to each, and to a process's micro-batches likewise:
a step takes as long as its fullest process, and of 16 that took chat-like lengths in the order drawn, that one would
have half as many rows again as the mean (docs/scaling.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from eagle3.errors import ConfigError, DataError
from eagle3.ttt import PackedBatch
from train.config import TrainConfig
from train.job import SampleSource, TrainSample


def epoch_order(seed: int, epoch: int, samples: int) -> np.ndarray:
    """The permutation in which an epoch reads its conversations: [samples] int64."""
    return np.random.default_rng((seed, epoch)).permutation(samples)


class StepPlan:
    """The order of the conversations: a pure function of (settings, step), so its position is the step.

    Args:
        samples: conversations in the training split.
        cfg: batch sizes, epochs, max_steps and seed are used.
        world: processes.
        rank: this process.
        lengths: rows of every conversation, to deal them by; None = in the order drawn.

    Raises:
        ConfigError: no samples, or a global batch that the processes cannot share evenly.
    """

    def __init__(
        self, samples: int, cfg: TrainConfig, world: int, rank: int, lengths: Sequence[int] | None = None
    ) -> None:
        if samples < 1:
            raise ConfigError("nothing to train on", why="the training split is empty", mend="add conversations")
        if cfg.global_batch_size % world:
            raise ConfigError(
                "the processes cannot share the batch evenly",
                where="train.global_batch_size",
                why=f"{cfg.global_batch_size} conversations over {world} processes",
                mend="make it a multiple of the number of processes",
            )
        share = cfg.global_batch_size // world
        self.samples, self.seed, self.batch = samples, cfg.seed, cfg.global_batch_size
        self.world, self.rank, self.lengths = world, rank, lengths
        # The largest micro-batch within the limit that divides this process's share.
        self.micro = next(m for m in range(min(cfg.micro_batch_size, share), 0, -1) if share % m == 0)
        self.accumulation = share // self.micro
        self.total_steps = cfg.max_steps or max(1, samples * cfg.epochs // cfg.global_batch_size)
        self._permutation = lru_cache(maxsize=2)(self._draw)

    def _draw(self, epoch: int) -> np.ndarray:
        return epoch_order(self.seed, epoch, self.samples)

    def epoch(self, step: int) -> float:
        """Epochs done once `step` steps are done."""
        return step * self.batch / self.samples

    def global_batch(self, step: int) -> list[int]:
        """Indices of all conversations of a step, in order."""
        places = range(step * self.batch, (step + 1) * self.batch)
        return [int(self._permutation(p // self.samples)[p % self.samples]) for p in places]

    def micro_batches(self, step: int) -> list[list[int]]:
        """Indices of this process's micro-batches of a step."""
        whole = self.global_batch(step)
        return [[whole[place] for place in group] for group in self.places(step)]

    def places(self, step: int) -> list[list[int]]:
        """Places in the step's global batch that this process's micro-batches are taken from."""
        rows, own = self._rows(step), self.shares(step)[self.rank]
        return [[own[place] for place in group] for group in deal([rows[place] for place in own], self.micro)]

    def shares(self, step: int) -> list[list[int]]:
        """Places in the step's global batch that each process takes."""
        return deal(self._rows(step), self.micro * self.accumulation)

    def _rows(self, step: int) -> list[int]:
        return [1 if self.lengths is None else self.lengths[i] for i in self.global_batch(step)]


def deal(rows: Sequence[int], size: int) -> list[list[int]]:
    """Deal places into groups of `size` whose sums of `rows` are nearly equal.

    The longest first, each to the group with the fewest rows that has room (Graham 1969's rule, with equal counts).
    Places of equal rows throughout are dealt in their order. Within a group places ascend.
    """
    groups = -(-len(rows) // size)
    if len(set(rows)) < 2 or groups == 1:
        return [list(range(start, min(start + size, len(rows)))) for start in range(0, len(rows), size)]
    held, dealt = [0] * groups, [[] for _ in range(groups)]  # type: tuple[list[int], list[list[int]]]
    for place in sorted(range(len(rows)), key=lambda i: (-rows[i], i)):
        group = min((g for g in range(groups) if len(dealt[g]) < size), key=lambda g: (held[g], g))
        held[group] += rows[place]
        dealt[group].append(place)
    return [sorted(group) for group in dealt]


def pack(samples: list[TrainSample], device: torch.device | None = None) -> PackedBatch:
    """Lay conversations end to end: rows N = the sum of their lengths; nothing is padded.

    Raises:
        DataError: a conversation without rows.
    """
    for sample in samples:
        if not len(sample.token_ids):
            where, mend = f"record {sample.record_id}", "prepare the data again"
            raise DataError("a conversation without rows", where=where, mend=mend)
    return PackedBatch(
        features=torch.cat([s.features for s in samples]).to(device),
        token_ids=torch.cat([s.token_ids for s in samples]).to(device),
        teacher=torch.cat([s.teacher for s in samples]).to(device),
        loss_mask=torch.cat([s.loss_mask for s in samples]).to(device),
        doc_lengths=[len(s.token_ids) for s in samples],
    )


def read_micro_batches(source: SampleSource, groups: list[list[int]]) -> list[PackedBatch]:
    """Read and pack groups of samples (CPU tensors), one after another: what `train.loader` does ahead and in place."""
    return [pack([source.get(i) for i in group]) for group in groups]
