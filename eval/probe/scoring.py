"""How well a draft predicts under a wiring, standing alone, and how sure a lead of one wiring over another is.

Rows and steps are those of `eagle3.ttt`: row t reads the features after x[0..t] and the token x[t+1], and step k
predicts x[t+2+k] from the draft's own outputs. A guess is right when it is the target's own first choice there.
The score of a row is the number of steps right in a row from the first; its mean plus 1 is the accept length that
these rows predict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.draft import Eagle3Draft
from eagle3.target_weights import TargetWeights
from eagle3.ttt import PackedBatch, unroll
from eagle3.wiring import Wiring

BLOCK = 16  # neighbouring rows are alike, so uncertainty counts blocks of them, not rows
RESAMPLES = 2000
CONFIDENCE = 0.99


@dataclass(frozen=True)
class TargetEnd:
    """The target's final norm `[H]`, head `[V, H]` and epsilon; `normed`: its states come normed already."""

    norm: Tensor
    head: Tensor
    eps: float
    normed: bool = False

    @classmethod
    def read(cls, weights: TargetWeights, device: str, normed: bool = False) -> TargetEnd:
        """From the target's files; float32 on CPU, as stored elsewhere."""
        dtype = torch.float32 if device == "cpu" else None
        norm, head = weights.final_norm().to(device, dtype), weights.head().to(device, dtype)
        return cls(norm, head, weights.rms_norm_eps, normed)

    def choices(self, final: Tensor, chunk: int = 512) -> Tensor:
        """The target's first choice after each row of `final [T, H]`: int64 `[T]`."""
        best = []
        for block in final.to(self.head.device).split(chunk):
            if not self.normed:
                block = F.rms_norm(block.float(), (block.shape[-1],), self.norm.float(), self.eps)
            best.append((block.to(self.head.dtype) @ self.head.T).argmax(-1))
        return torch.cat(best)


@dataclass(frozen=True)
class Text:
    """One record: `ids [T]` int64, `mask [T]` bool (tokens to be judged), and states `[T, H]` by site, with `final`."""

    ids: Tensor
    mask: Tensor
    states: Mapping[str, Tensor]


@torch.inference_mode()
def score_text(draft: Eagle3Draft, text: Text, best: Tensor, wiring: Wiring, steps: int) -> Tensor:
    """Steps right in a row, for each row all of whose steps are judged: int64 `[R]`.

    Args:
        draft: on any device.
        text: at least `steps + 2` tokens.
        best: `[T]` the target's first choices.
        wiring: what to feed.
        steps: K.
    """
    device, dtype = draft.fc.weight.device, draft.fc.weight.dtype
    features = torch.cat([text.states[name] for name in wiring.names], dim=-1)[:-1]  # [N, A*H]
    learnt = torch.zeros(len(text.ids) - 1, dtype=torch.bool)  # [N]
    learnt[:-1] = text.mask[2:]
    batch = PackedBatch(
        features.to(device, dtype),
        text.ids[1:].to(device),
        features.new_zeros(len(features), 1).to(device),  # no teacher is needed: `best` holds its choices
        learnt.to(device),
        [len(features)],
    )
    rows = batch.supervised(steps).all(dim=1).nonzero()[:, 0]  # [R]
    if len(rows) == 0:
        return torch.zeros(0, dtype=torch.int64)
    right = []
    for k, g in enumerate(unroll(draft, batch, steps, rows)):
        guess = draft.to_target_ids(draft.logits(g).argmax(-1))  # [R]
        right.append(guess == best.to(device)[1:][rows + k])
    return torch.stack(right, dim=1).long().cumprod(1).sum(1).cpu()


@dataclass(frozen=True)
class Score:
    """One wiring's result: for each block of rows the sum of scores, of first steps right, and its rows: `[B]`."""

    wiring: Wiring
    reasons: list[str]
    kept: np.ndarray
    first: np.ndarray
    rows: np.ndarray

    @property
    def tau(self) -> float:
        """Accept length that the rows predict."""
        return 1.0 + float(self.kept.sum() / max(self.rows.sum(), 1))

    @property
    def accuracy(self) -> float:
        """Share of first steps right."""
        return float(self.first.sum() / max(self.rows.sum(), 1))


def blocks_of(per_row: list[Tensor]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sum each record's rows (`[R]` steps right in a row) over blocks that never cross records."""
    parts = [part for rows in per_row for part in rows.split(BLOCK) if len(part)]
    kept = np.array([float(part.sum()) for part in parts])
    first = np.array([float((part > 0).sum()) for part in parts])
    return kept, first, np.array([float(len(part)) for part in parts])


def lead(one: Score, other: Score, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Interval of `one.tau - other.tau`, by a paired bootstrap over blocks (both were scored on the same rows)."""
    random = np.random.default_rng(0)
    picks = random.integers(0, len(one.rows), size=(RESAMPLES, len(one.rows)))
    gain = (one.kept - other.kept)[picks].sum(1) / one.rows[picks].sum(1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(gain, [tail, 1 - tail])
    return float(low), float(high)
