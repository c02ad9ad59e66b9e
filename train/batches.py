"""Which conversations make up each optimizer step, and packing them.

The conversations of epoch e stand in a permutation drawn from (seed, e); the epochs follow one another in one
stream, cut into global batches of B. Micro-batch m of rank r holds conversations `[(m * world + r) * micro : + micro]`
of its global batch, so the same conversations make a step whatever the number of processes.
"""

from __future__ import annotations

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

    Raises:
        ConfigError: no samples, or a global batch that the processes cannot share evenly.
    """

    def __init__(self, samples: int, cfg: TrainConfig, world: int, rank: int) -> None:
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
        self.world, self.rank = world, rank
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
        starts = [(m * self.world + self.rank) * self.micro for m in range(self.accumulation)]
        return [whole[start : start + self.micro] for start in starts]


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
