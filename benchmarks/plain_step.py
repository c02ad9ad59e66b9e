"""The training step written the obvious way: the yardstick for `train.losses.ttt_loss`.

Documents are padded to one length; each step makes the `[B, Hq, T, T + k]` attention matrix and the draft's logits of
every row, autograd keeps them all, and the loss mask comes in at the end. Weights and layer are the draft's own;
unrolling, attention and loss share no code with the fast path.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle3.draft import Eagle3Draft
from eagle3.ttt import PackedBatch
from train.losses import TeacherHead


def plain_loss(draft: Eagle3Draft, batch: PackedBatch, teacher: TeacherHead, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of `ttt_loss` (arguments as there), and `right [K]`, its count of rows right in steps `0..k`."""
    features, token_ids, states, mask = (
        pad_sequence(list(x.split(batch.doc_lengths)), batch_first=True)
        for x in (batch.features, batch.token_ids, batch.teacher, batch.loss_mask)
    )  # [B, T, ...]; padding is zero, hence unsupervised
    probs, best = _teach(draft, teacher, states)  # [B, T, Vd], [B, T]
    attend = _FullAttention(*token_ids.shape)
    positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)  # [B, T]
    hidden = draft.fuse(features).flatten(0, 1)  # [B*T, H]
    loss, chain, right = hidden.new_zeros(()), torch.ones_like(mask), []
    for k in range(len(weights)):
        hidden = draft.step(hidden, _ahead(token_ids, k).flatten(), (positions + k).flatten(), attend)
        logits = draft.logits(hidden).unflatten(0, token_ids.shape)  # [B, T, Vd]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        entropy = -(_ahead(probs, k) * logits.log_softmax(-1)).sum(-1)  # [B, T]
        supervised = _ahead(mask, k)  # [B, T]
        loss = loss + weights[k] * (entropy * supervised).sum()
        chain = chain & supervised & (draft.to_target_ids(logits.argmax(-1)) == _ahead(best, k))
        right.append(chain.sum())
    return loss, torch.stack(right)


@torch.no_grad()
def _teach(draft: Eagle3Draft, teacher: TeacherHead, states: Tensor) -> tuple[Tensor, Tensor]:
    """`states [B, T, H]` -> probabilities over the draft's vocabulary, zero where it lacks the best id; best ids."""
    logits = teacher.logits(states)  # [B, T, V]
    best = logits.argmax(-1)  # [B, T]
    ids = draft.to_target_ids(torch.arange(draft.shape.draft_vocab_size, device=states.device))  # [Vd]
    return logits[..., ids].softmax(-1) * draft.t2d[best][..., None], best


def _ahead(x: Tensor, k: int) -> Tensor:
    """`[B, T, ...]`: what stands `k` rows further on in the document; zeros past its end."""
    moved = torch.zeros_like(x)
    moved[:, : x.shape[1] - k] = x[:, k:]
    return moved


class _FullAttention:
    """Step 0: a causal matrix. Step k: the same matrix of the new queries, and k columns for the rows' own keys."""

    def __init__(self, documents: int, length: int) -> None:
        self.shape = (documents, length)
        self.keys: list[Tensor] = []  # per step [B, Hq, T, D]
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [B*T, Hq, D]`, `k`, `v [B*T, Hkv, D]` of this step -> `[B*T, Hq, D]`."""
        groups = q.shape[1] // k.shape[1]
        query = self._heads_first(q)
        self.keys.append(self._heads_first(k.repeat_interleave(groups, dim=1)))
        self.values.append(self._heads_first(v.repeat_interleave(groups, dim=1)))
        length = self.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = (query @ self.keys[0].transpose(-1, -2)).masked_fill(future, -torch.inf)  # [B, Hq, T, T]
        own = [(query * key).sum(-1, keepdim=True) for key in self.keys[1:]]  # [B, Hq, T, 1] each
        scores = torch.cat([scores, *own], dim=-1) * q.shape[-1] ** -0.5  # [B, Hq, T, T + k]
        share = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        out = share[..., :length] @ self.values[0]  # [B, Hq, T, D]
        for j, value in enumerate(self.values[1:]):
            out = out + share[..., length + j, None] * value
        return out.transpose(1, 2).flatten(0, 1)

    def _heads_first(self, x: Tensor) -> Tensor:
        return x.unflatten(0, self.shape).transpose(1, 2)
