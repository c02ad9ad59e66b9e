"""The distillation loss of the unrolled draft, and how often its guesses stand.

For step `k` at row `t` the teacher is the target's distribution at row `s = t + k`, restricted to the draft's
vocabulary and renormalised there; the loss is the cross entropy against it (Li et al. 2025). A teacher row whose own
best token lies outside the draft's vocabulary gives no loss, as in EAGLE's training code, yet it stays in the counts:
the draft cannot be right there, so it is *wrong* in every accuracy, and counts depend on masks alone.

Nothing the size of rows x vocabulary is ever held: teacher rows go by in blocks of `chunk`; each block's teacher
distribution is computed once and serves all K steps, and the gradients of the block are taken on the spot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.draft import Eagle3Draft
from eagle3.ttt import PackedBatch, unroll


@dataclass(frozen=True)
class TeacherHead:
    """The target's end: what turns teacher states into distributions.

    Args:
        norm_weight: `[H]` the target's final norm.
        head: `[V, H]` its output matrix; products run in this dtype.
        eps: epsilon of the norm.
        normed: the teacher states are already normed (`final_normed`): leave the norm out.
    """

    norm_weight: Tensor
    head: Tensor
    eps: float
    normed: bool = False

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TeacherHead:
        """The same head elsewhere."""
        return TeacherHead(self.norm_weight.to(device, dtype), self.head.to(device, dtype), self.eps, self.normed)

    def logits(self, states: Tensor) -> Tensor:
        """`states [S, H] -> [S, V]`, at least float32."""
        wide = torch.promote_types(states.dtype, torch.float32)
        if not self.normed:
            states = F.rms_norm(states.to(wide), (states.shape[-1],), self.norm_weight.to(wide), self.eps)
        return (states.to(self.head.dtype) @ self.head.T).to(wide)


def teacher_probs(states: Tensor, teacher: TeacherHead, draft_ids: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """The teacher's distribution over the draft's vocabulary.

    Args:
        states: `[S, H]` teacher states.
        teacher: the target's norm and head.
        draft_ids: `[Vd]` target id of each draft id; None when the draft has the whole vocabulary.
        chunk: rows whose full-vocabulary logits are held at once.

    Returns:
        probs `[S, Vd]`, each row summing to 1, and best `[S]` int64, the argmax over the *full* vocabulary.
    """
    probs, best = [], []
    for block in states.split(chunk):
        logits = teacher.logits(block)  # [C, V]
        best.append(logits.argmax(-1))
        probs.append((logits if draft_ids is None else logits[:, draft_ids]).softmax(-1))
    return (probs[0], best[0]) if len(probs) == 1 else (torch.cat(probs), torch.cat(best))


@dataclass(frozen=True)
class LossParts:
    """One micro-batch's loss and counts; every field but `loss` is detached.

    Args:
        loss: scalar, `sum_k step_weights[k] * sums[k]`; the one to call `backward` on.
        sums: `[K]` float, cross entropy summed over the supervised rows of each step.
        counts: `[K]` int64, supervised rows of each step.
        right, tried: `[K]` int64; conditional accuracy of step k = right[k] / tried[k], over rows whose steps `0..k`
            are all supervised: `tried` counts those right in steps `0..k-1`, `right` those right in step `k` too.
        dropped: scalar int64, supervised teacher rows whose best token the draft's vocabulary lacks.
    """

    loss: Tensor
    sums: Tensor
    counts: Tensor
    right: Tensor
    tried: Tensor
    dropped: Tensor


def supervised_counts(batch: PackedBatch, steps: int) -> Tensor:
    """Supervised rows of each step, `[K]` int64; masks alone decide, so a whole global batch can be counted first."""
    return batch.supervised(steps).sum(0)


def step_weights(counts: Tensor, decay: float) -> Tensor:
    """`decay ** k / counts[k]`, `[K]` float64: with the *global* counts, the loss is a weighted sum of means.

    The steps' weights are not divided by their sum (as in EAGLE and SpecForge). A step nobody supervises weighs 0.
    """
    powers = decay ** torch.arange(len(counts), device=counts.device, dtype=torch.float64)
    return torch.where(counts > 0, powers / counts.clamp(min=1), 0.0)


def ttt_loss(
    draft: Eagle3Draft,
    batch: PackedBatch,
    teacher: TeacherHead,
    weights: Tensor,
    chunk: int = 1024,
    recompute: bool = False,
) -> LossParts:
    """Unroll the draft `K = len(weights)` steps and measure it against the teacher.

    Args:
        draft: the model; its head is read inside the head's own forward (safe under ZeRO-3).
        batch: packed documents, on the draft's device.
        teacher: the target's norm and head, on the same device.
        weights: `[K]` factor on each step's summed cross entropy, e.g. `step_weights(global_counts, decay)`, times
            whatever undoes the launcher's own averaging.
        chunk: teacher rows a block; `chunk * V` logits exist at once.
        recompute: compute each step's activations again in backward (`eagle3.ttt.unroll`).

    Returns:
        LossParts. With no supervised row the loss is 0 and still differentiable.
    """
    steps = len(weights)
    supervised = batch.supervised(steps)  # [N, K]
    rows = supervised.any(1).nonzero()[:, 0]  # [R]
    if len(rows) == 0:
        rows = rows.new_zeros(1)  # one row, unsupervised: keeps every parameter in the graph
    supervised = supervised[rows]  # [R, K]
    outputs = torch.stack(unroll(draft, batch, steps, rows, recompute))  # [K, R, H]
    blocks = _Blocks(batch.teacher, rows, supervised, teacher, None if draft.shape.full_vocab else draft, chunk)
    normed = draft.head_input(outputs)  # [K, R, H]
    loss, sums = draft.lm_head(normed, lambda h, weight: _ChunkedCE.apply(h, weight, weights, blocks))
    correct = blocks.correct & supervised  # [R, K]
    so_far = correct.long().cumprod(1)  # [R, K] steps 0..k all supervised and right
    before = torch.cat((torch.ones_like(so_far[:, :1]), so_far[:, :-1]), dim=1)
    tried = (before * supervised.long().cumprod(1)).sum(0)
    return LossParts(loss, sums, supervised.sum(0), so_far.sum(0), tried, blocks.dropped)


class _Blocks:
    """Walks over teacher rows in blocks, pairing each with the draft rows it teaches; notes which guesses are right."""

    def __init__(
        self,
        states: Tensor,
        rows: Tensor,
        supervised: Tensor,
        teacher: TeacherHead,
        draft: Eagle3Draft | None,
        chunk: int,
    ) -> None:
        self.states, self.teacher, self.chunk = states, teacher, chunk
        self.draft_ids = (
            None if draft is None else draft.to_target_ids(torch.arange(len(draft.d2t), device=rows.device))
        )
        self.known = None if draft is None else draft.t2d
        self.correct = torch.zeros_like(supervised)  # [R, K]
        self.dropped = rows.new_zeros(())
        ahead = torch.arange(supervised.shape[1], device=rows.device)
        self._teacher_row = torch.where(supervised, rows[:, None] + ahead, -1)  # [R, K]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, list[Tensor], list[Tensor]]]:
        """Yield `(probs [C, Vd], best [C], rows, places)`: of step k, `places[k]` of the block teach `rows[k]`."""
        wanted = self._teacher_row.unique()  # ascending
        wanted = wanted[wanted >= 0]
        for block in wanted.split(self.chunk) if len(wanted) else ():
            probs, best = teacher_probs(self.states[block], self.teacher, self.draft_ids, self.chunk)
            if self.known is not None:
                known = self.known[best]  # [C]
                probs = probs * known[:, None]  # a row of zeros teaches nothing
                self.dropped = self.dropped + (~known).sum()
            inside = (self._teacher_row >= block[0]) & (self._teacher_row <= block[-1])  # [R, K]
            rows = [column.nonzero()[:, 0] for column in inside.unbind(1)]
            places = [torch.searchsorted(block, self._teacher_row[r, k]) for k, r in enumerate(rows)]
            yield probs, best, rows, places
            del probs  # before the next block's: each is `chunk x Vd`

    def judge(self, step: int, rows: Tensor, guesses: Tensor, best: Tensor) -> None:
        """Note whether `guesses [r]` (draft ids) are the teacher's `best [r]` (target ids)."""
        told = guesses if self.draft_ids is None else self.draft_ids[guesses]
        self.correct[rows, step] = told == best


class _ChunkedCE(torch.autograd.Function):
    """Soft cross entropy over all blocks and steps; gradients are taken in forward: no logits outlive their block."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, factors: Tensor, blocks: _Blocks
    ) -> tuple[Tensor, Tensor]:
        """`hidden [K, R, H]` normed outputs, `weight [Vd, H]`, `factors [K]` -> weighted loss, sums `[K]`."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        sums = torch.zeros(len(hidden), dtype=torch.float64, device=hidden.device)
        for probs, best, rows, places in blocks:
            for k, (r, place) in enumerate(zip(rows, places, strict=True)):
                if len(r) == 0:
                    continue
                h, p = hidden[k, r], probs[place]  # [r, H], [r, Vd]
                logits = (h @ weight.T).to(wide)  # [r, Vd]
                blocks.judge(k, r, logits.argmax(-1), best[place])
                lse, mass = logits.logsumexp(-1), p.sum(-1)  # [r]; mass is 1, or 0 where nothing is taught
                sums[k] += (lse * mass - (p * logits).sum(-1)).sum()
                if not (need_hidden or need_weight):
                    continue
                grad = (logits - lse[:, None]).exp_().mul_(mass[:, None]).sub_(p).mul_(factors[k].to(wide))  # [r, Vd]
                del logits, p  # each as large as the block: gone before the next is made
                grad = grad.to(weight.dtype)
                if grad_hidden is not None:
                    grad_hidden[k, r] = grad @ weight
                if grad_weight is not None:
                    grad_weight += grad.T @ h
                del grad
            del probs
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(sums)
        return (sums * factors).sum().to(wide), sums

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # In place: a copy of the head's gradient is as large as the head. A second backward is refused by autograd.
        scaled = (None if g is None else g.mul_(grad_loss.to(g.dtype)) for g in ctx.saved_tensors)
        return (*scaled, None, None)
