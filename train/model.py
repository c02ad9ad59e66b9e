"""The module that DeepSpeed trains: the draft with its frozen surroundings, one `forward` per micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle3.draft import Eagle3Draft
from eagle3.ttt import PackedBatch
from train.losses import LossParts, TeacherHead, block_rows, ttt_loss
from train.objective import Objective
from train.tables import frozen_table


@dataclass
class TrainParts:
    """What a model factory returns: the draft at its start and the target's end that teaches it.

    `fit_rows`: supervised rows that the start is yet to be fitted to (`train.start`); 0 = it is as it should be.
    """

    draft: Eagle3Draft
    teacher: TeacherHead
    fit_rows: int = 0


def plain_embedding(draft: Eagle3Draft) -> None:
    """Turn the draft's frozen embedding from a parameter into a plain tensor.

    ZeRO would otherwise partition the largest matrix of the model and gather it again for each of the K steps, and
    every checkpoint would carry it. The state dict loses `embed_tokens.weight`, which is the target's anyway.
    """
    weight = draft.embed_tokens.weight.detach()
    del draft.embed_tokens.weight
    draft.embed_tokens.weight = weight  # type: ignore[assignment]


class Trainee(nn.Module):
    """The draft as DeepSpeed's module; the teacher's head and the embedding stay plain tensors.

    Args:
        parts: draft and teacher, as built (CPU).
        device: where training runs.
        dtype: of the draft's forward and the teacher's products; frozen tables may be narrower (`train.tables`).
        chunk: rows of draft logits a block of the loss; 0 = chosen (`train.losses.block_rows`).
        recompute: compute each step's activations again in backward instead of keeping them.
        objective: the loss of a row; None = cross entropy.
    """

    def __init__(
        self,
        parts: TrainParts,
        device: torch.device,
        dtype: torch.dtype,
        chunk: int,
        recompute: bool = False,
        objective: Objective | None = None,
    ) -> None:
        super().__init__()
        self.draft, self.objective = parts.draft, objective
        self.dtype, self.device, self.recompute = dtype, device, recompute
        self.chunk = block_rows(chunk, parts.draft.shape.draft_vocab_size, device.type == "cuda")
        self._teacher = parts.teacher.arranged(self.draft).to(device, dtype)
        plain_embedding(self.draft)
        words = frozen_table(self.draft.embed_tokens.weight, device, dtype)
        self.draft.embed_tokens.weight = words  # type: ignore[assignment]

    def forward(
        self,
        features: Tensor,
        token_ids: Tensor,
        teacher: Tensor,
        loss_mask: Tensor,
        lengths: list[int],
        weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Measure one micro-batch.

        Args:
            features, token_ids, teacher, loss_mask, lengths: the fields of a `PackedBatch`.
            weights: `[K]` float64 factor on each step's summed cross entropy.

        Returns:
            the weighted loss (scalar), and `[4, K]` float64: sums, counts, right, tried of `LossParts`, detached.
        """
        batch = PackedBatch(features, token_ids, teacher, loss_mask, lengths).to(self.device, self.dtype)
        weights = weights.to(self.device)
        settings = (self.chunk, self.recompute, self.objective)
        parts: LossParts = ttt_loss(self.draft, batch, self._teacher, weights, *settings)
        stats = torch.stack([x.detach().double() for x in (parts.sums, parts.counts, parts.right, parts.tried)])
        return parts.loss, stats
