"""What a draft row is taught: the loss of its distribution against the teacher's, and the gradient on its logits.

With p the teacher's row, q = softmax(z) the draft's and `a = sum_i min(p_i, q_i)`, the chance that a sampled proposal
is kept (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", theorem 3.5):

    soft_ce           - sum_i p_i log q_i             d/dz = q - p
    acceptance        1 - a = total variation         d/dz = q (b - m)        m_i = [q_i < p_i],  b = sum_i m_i q_i
    log_acceptance    - log a                         d/dz = q (b - m) / a
    mixed             w soft_ce + (1 - w) (1 - a)     w = ce_weight exp(-ce_fade a), taken as a constant

The acceptance losses move only what changes the chance of being kept, yet hardly learn while q is far from p (their
gradient is scaled by q), which is what `mixed` is for: it begins as cross entropy and hands over as the draft learns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from train.config import OBJECTIVES, ObjectiveConfig

_LEAST = 1e-6  # floor of `a` in -log a and its gradient


@dataclass(frozen=True)
class Objective:
    """A loss of draft rows, with its gradient in closed form.

    Args:
        kind: one of `train.config.OBJECTIVES`.
        ce_weight: share of cross entropy in "mixed", in [0, 1].
        ce_fade: how fast that share falls with the chance of being kept; 0 = it stays.
        teacher_temperature: divisor of the teacher's logits before their softmax; below 1 the teacher is sharper. Who
            computes the teacher's rows applies it.
        outside: what becomes of rows whose best token of the whole vocabulary is not the draft's: "drop" them, as EAGLE
            does, or "teach" the teacher's preferences among the draft's tokens. The second never asks for logits
            outside the draft's vocabulary while training.
    """

    kind: str = "soft_ce"
    ce_weight: float = 0.5
    ce_fade: float = 0.0
    teacher_temperature: float = 1.0
    outside: str = "drop"

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVES:
            raise ValueError(f"no objective {self.kind!r}; there are {', '.join(OBJECTIVES)}")

    @classmethod
    def of(cls, cfg: ObjectiveConfig) -> Objective:
        """As configured."""
        return cls(cfg.kind, cfg.ce_weight, cfg.ce_fade, cfg.teacher_temperature, cfg.outside)

    def rows(self, logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of each row and its gradient; at most one more buffer as large as the logits exists meanwhile.

        Args:
            logits: `[C, K, Vd]` the draft's, float32 or wider, shifted so that each row's largest is 0; overwritten.
            probs: `[C, 1, Vd]` the teacher's, each row summing to 1; left as they are.

        Returns:
            loss `[C, K]`, grad `[C, K, Vd]` (in the memory of `logits`) and scale `[C, K]`:
            `d loss / d logits = scale * grad`.
        """
        if self.kind == "soft_ce":
            cross = -torch.matmul(logits, probs.transpose(-1, -2))[..., 0]  # [C, K]
            total = logits.exp_().sum(-1)  # [C, K]
            return total.log() + cross, logits.addcmul_(probs, total[..., None], value=-1), 1 / total
        buffer = torch.empty_like(logits)
        lse = logits.logsumexp(-1, keepdim=True)  # [C, K, 1]
        cross = lse[..., 0] - torch.mul(probs, logits, out=buffer).sum(-1) if self.kind == "mixed" else lse[..., 0]
        q = logits.sub_(lse).exp_()
        kept = torch.minimum(probs, q, out=buffer).sum(-1)  # [C, K] the chance of being kept
        short = torch.lt(q, probs, out=buffer).mul_(q)  # q where it is below p, else 0
        held = short.sum(-1, keepdim=True)  # [C, K, 1]
        one = torch.ones_like(kept)
        if self.kind == "mixed":
            share = (self.ce_weight * (-self.ce_fade * kept).exp())[..., None]  # [C, K, 1]
            loss = share[..., 0] * cross + (1 - share[..., 0]) * (1 - kept)
            grad = q.mul_(share + (1 - share) * held).sub_(short.mul_(1 - share)).addcmul_(probs, share, value=-1)
            return loss, grad, one
        grad = q.mul_(held).sub_(short)
        if self.kind == "acceptance":
            return 1 - kept, grad, one
        floor = kept.clamp(min=_LEAST)
        return -floor.log(), grad, 1 / floor
