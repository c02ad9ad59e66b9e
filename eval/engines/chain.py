"""Choosing and judging a chain of proposals, greedily or by speculative sampling.

Speculative sampling is that of Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative
Decoding" (2023): keep a proposal x with probability min(1, p(x) / q(x)); at the first refusal draw from
max(p - q, 0) normalized; after a full chain draw from the target's next distribution. The output is then
distributed exactly as plain sampling from p.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Judge(Protocol):
    """Picks proposals from the draft's logits and judges them against the target's."""

    def first(self, logits: Tensor) -> int:
        """Pick a token from the target's logits `[V]`."""

    def propose(self, logits: Tensor) -> Tensor:
        """Pick an index into the draft vocabulary from the draft's logits `[1, Vd]`: int64 `[1]`."""

    def judge(self, logits: Tensor, proposals: list[int]) -> tuple[int, int]:
        """`(kept, next token)` for n proposals (target ids) and the target's n + 1 rows of logits `[n + 1, V]`."""


class Greedy:
    """Temperature 0: a proposal is kept when it is the target's own argmax."""

    def first(self, logits: Tensor) -> int:
        """The target's argmax."""
        return int(logits.argmax())

    def propose(self, logits: Tensor) -> Tensor:
        """The draft's argmax."""
        return logits.argmax(dim=-1)

    def judge(self, logits: Tensor, proposals: list[int]) -> tuple[int, int]:
        """Keep the longest prefix that the target would have written itself."""
        wanted = logits.argmax(dim=-1).tolist()  # n + 1 ids
        kept = 0
        while kept < len(proposals) and proposals[kept] == wanted[kept]:
            kept += 1
        return kept, wanted[kept]


class Sampled:
    """Temperature > 0: speculative sampling.

    Args:
        temperature: divides both models' logits.
        seed: of this text's own random stream.
        draft_ids: int64 `[Vd]`, the target id of each draft vocabulary entry.
    """

    def __init__(self, temperature: float, seed: int, draft_ids: Tensor) -> None:
        self._temperature = temperature
        self._ids = draft_ids
        self._random = torch.Generator(device=draft_ids.device).manual_seed(seed)
        self._proposed: list[Tensor] = []  # q of each pending proposal, [Vd]

    def _softmax(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.float() / self._temperature, dim=-1)

    def _draw(self, weights: Tensor) -> Tensor:
        return torch.multinomial(weights, 1, generator=self._random)

    def first(self, logits: Tensor) -> int:
        """A draw from the target's distribution."""
        return int(self._draw(self._softmax(logits)))

    def propose(self, logits: Tensor) -> Tensor:
        """A draw from the draft's distribution, which is remembered for the verdict."""
        q = self._softmax(logits[0])  # [Vd]
        self._proposed.append(q)
        return self._draw(q)

    def judge(self, logits: Tensor, proposals: list[int]) -> tuple[int, int]:
        """Keep or refuse in turn; the refused place is filled from what the target has more of than the draft."""
        p = self._softmax(logits)  # [n + 1, V]
        chain, self._proposed = self._proposed, []
        if not proposals:
            return 0, int(self._draw(p[0]))
        coins = torch.rand(len(proposals), generator=self._random, device=p.device).tolist()
        for place, (token, q) in enumerate(zip(proposals, chain, strict=True)):
            q_full = torch.zeros_like(p[place]).index_copy_(0, self._ids, q)  # [V]
            if coins[place] * float(q_full[token]) < float(p[place, token]):
                continue
            rest = (p[place] - q_full).clamp_(min=0)
            return place, int(self._draw(rest if float(rest.sum()) > 0 else p[place]))
        return len(proposals), int(self._draw(p[len(proposals)]))
