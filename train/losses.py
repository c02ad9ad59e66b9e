"""The distillation loss of the unrolled draft, and how often its guesses stand.

For step `k` at row `t` the teacher is the target's distribution at row `s = t + k`, restricted to the draft's
vocabulary and renormalised there; the loss is the cross entropy against it (Li et al. 2025), or what
`train.objective` puts in its place. A teacher row whose own best token lies outside the draft's vocabulary gives no
loss, as in EAGLE's training code, yet it stays in the counts: the draft cannot be right there, so it is *wrong* in
every accuracy, and counts depend on masks alone. With `objective.outside = "teach"` such rows teach what the target
prefers among the draft's tokens; while training nothing is then computed outside the draft's vocabulary, and accuracy
is against the best token in it. Without gradients accuracy is always against the best token of all.

Nothing the size of rows x vocabulary is ever held: teacher rows go by in blocks; a block's teacher distribution is
computed once and serves the K draft rows that it teaches, whose logits stand beside one another as `[C, K, Vd]`. Their
gradients are taken on the spot, in the memory of the logits, which serves one block after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.draft import Eagle3Draft
from eagle3.ttt import PackedBatch, unroll
from train.objective import Objective
from train.tables import frozen_table

COLUMNS = 8192  # target ids whose logits are held at once
BLOCK = 1024  # rows of draft logits a block
CPU_BLOCK = 1 << 24  # of their logits, on a CPU: 64 MiB in float32, where smaller blocks take no longer
WIDENED = 2048  # rows of a head in 16 bits that are widened at once


@dataclass(frozen=True)
class TeacherHead:
    """The target's end: what turns teacher states into distributions.

    Args:
        norm_weight: `[H]` the target's final norm; products run in its dtype.
        head: `[V, H]` its output matrix, in that dtype or in a narrower one that holds the same values.
        eps: epsilon of the norm.
        normed: the teacher states are already normed (`final_normed`): leave the norm out.
        inside: so many rows of `head` come first, in the draft's order (`arranged`); 0 = the rows stand by target id.
    """

    norm_weight: Tensor
    head: Tensor
    eps: float
    normed: bool = False
    inside: int = 0

    def to(self, device: torch.device | str, dtype: torch.dtype) -> TeacherHead:
        """The same head elsewhere, its products in `dtype`."""
        return replace(
            self, norm_weight=self.norm_weight.to(device, dtype), head=frozen_table(self.head, device, dtype)
        )

    def arranged(self, draft: Eagle3Draft) -> TeacherHead:
        """The same head with the draft's tokens first: their logits are then a slice of all, not a selection.

        The rows are copied; who calls the loss more than once arranges once. Nothing of the result lies in the memory
        that this one lies in, which may be a mapped file.
        """
        if self.inside:
            return self
        own = replace(self, norm_weight=self.norm_weight.clone())
        ids = draft.to_target_ids(torch.arange(len(draft.d2t), device=self.head.device))  # [Vd]
        if draft.shape.full_vocab:
            return replace(own, head=self.head.clone(), inside=len(ids))
        others = (~draft.t2d.to(self.head.device)).nonzero()[:, 0]  # [V - Vd]
        return replace(own, head=self.head[torch.cat((ids, others))], inside=len(ids))

    def final(self, states: Tensor) -> Tensor:
        """`states [S, H]` -> what the head multiplies, in the dtype of products."""
        wide = torch.promote_types(states.dtype, torch.float32)
        if not self.normed:
            states = F.rms_norm(states.to(wide), (states.shape[-1],), self.norm_weight.to(wide), self.eps)
        return states.to(self.norm_weight.dtype)

    def logits(self, states: Tensor) -> Tensor:
        """`states [S, H] -> [S, V]`, at least float32, columns as the rows of `head` stand."""
        wide = torch.promote_types(states.dtype, torch.float32)
        return (self.final(states) @ self.head.to(self.norm_weight.dtype).T).to(wide)


def teacher_probs(
    states: Tensor,
    teacher: TeacherHead,
    temperature: float = 1.0,
    scratch: _Scratch | None = None,
    whole: bool = True,
) -> tuple[Tensor, Tensor]:
    """The teacher's distribution over the draft's vocabulary.

    Args:
        states: `[C, H]` teacher states.
        teacher: the target's end, arranged for the draft.
        temperature: divisor of the logits before their softmax.
        scratch: memory to compute in; the result then lives until its next use.
        whole: look for the best token in the whole vocabulary; else among the draft's alone.

    Returns:
        probs `[C, Vd]`, each row summing to 1, and best `[C]` int64, the draft id of the largest logit of the *full*
        vocabulary, or -1 where that token is not the draft's.
    """
    scratch = scratch or _Scratch()
    hidden = teacher.final(states)
    inside = scratch.product("teacher", hidden, teacher.head[: teacher.inside])  # [C, Vd]
    top, best = inside.max(-1)
    probs = torch.softmax(inside / temperature if temperature != 1 else inside, -1, out=scratch.like("probs", inside))
    for start in range(teacher.inside, len(teacher.head), COLUMNS) if whole else ():
        outside = scratch.product("teacher", hidden, teacher.head[start : start + COLUMNS])
        best = torch.where(outside.amax(-1) > top, -1, best)
    return probs, best


def block_rows(asked: int, draft_vocab: int, cuda: bool) -> int:
    """Rows of draft logits a block: `train.head_chunk` where it is set, else chosen for the device."""
    return asked or (BLOCK if cuda else max(1, min(BLOCK, CPU_BLOCK // draft_vocab)))


class _Scratch:
    """Memory that one block after another computes in: fresh memory costs a CPU more than the sums done in it."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def like(self, name: str, other: Tensor) -> Tensor:
        """Uninitialized memory of the shape, dtype and device of `other`."""
        return self.empty(name, tuple(other.shape), other.dtype, other.device)

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialized memory; what the same name gave before is gone."""
        count = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < count or held.dtype != dtype:
            self._held.pop(name, None)
            del held
            held = self._held[name] = torch.empty(count, dtype=dtype, device=device)
        return held[:count].view(shape)

    def product(self, name: str, a: Tensor, weight: Tensor) -> Tensor:
        """`a [n, H] @ weight[v, H].T -> [n, v]`, at least float32; computed in the dtype of `a`."""
        shape, wide = (a.shape[0], weight.shape[0]), torch.promote_types(a.dtype, torch.float32)
        out = self.empty(name, shape, wide, a.device)
        if weight.dtype != a.dtype:
            for start in range(0, len(weight), WIDENED):
                some = weight[start : start + WIDENED]
                rows = self.empty("widened", tuple(some.shape), a.dtype, a.device).copy_(some)
                torch.mm(a, rows.T, out=out[:, start : start + WIDENED])
            return out
        if a.dtype == wide:
            return torch.mm(a, weight.T, out=out)
        return out.copy_(torch.mm(a, weight.T, out=self.empty(f"narrow {name}", shape, a.dtype, a.device)))


@dataclass(frozen=True)
class LossParts:
    """One micro-batch's loss and counts; every field but `loss` is detached.

    Args:
        loss: scalar, `sum_k step_weights[k] * sums[k]`; the one to call `backward` on.
        sums: `[K]` float, cross entropy summed over the supervised rows of each step.
        counts: `[K]` int64, supervised rows of each step.
        right, tried: `[K]` int64; conditional accuracy of step k = right[k] / tried[k], over rows whose steps `0..k`
            are all supervised: `tried` counts those right in steps `0..k-1`, `right` those right in step `k` too.
        dropped: scalar int64, supervised teacher rows known to have a best token that the draft lacks.
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
    objective: Objective | None = None,
) -> LossParts:
    """Unroll the draft `K = len(weights)` steps and measure it against the teacher.

    Args:
        draft: the model; its head is read inside the head's own forward (safe under ZeRO-3).
        batch: packed documents, on the draft's device.
        teacher: the target's norm and head, on the same device; one that is not `arranged` is arranged here.
        weights: `[K]` factor on each step's summed loss, e.g. `step_weights(global_counts, decay)`, times whatever
            undoes the launcher's own averaging.
        chunk: rows of draft logits a block: `chunk / K` teacher rows, K draft rows for each.
        recompute: compute each step's activations again in backward (`eagle3.ttt.unroll`).
        objective: the loss of a row; None = cross entropy against the teacher.

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
    blocks = _Blocks(batch, rows, steps, teacher.arranged(draft), objective or Objective(), chunk)
    normed = draft.head_input(outputs)  # [K, R, H]
    loss, sums = draft.lm_head(normed, lambda h, weight: _ChunkedLoss.apply(h, weight, weights, blocks))
    correct = blocks.correct & supervised  # [R, K]
    so_far = correct.long().cumprod(1)  # [R, K] steps 0..k all supervised and right
    before = torch.cat((torch.ones_like(so_far[:, :1]), so_far[:, :-1]), dim=1)
    tried = (before * supervised.long().cumprod(1)).sum(0)
    return LossParts(loss, sums, supervised.sum(0), so_far.sum(0), tried, blocks.dropped)


@dataclass(frozen=True)
class _Block:
    """C teacher rows and the K draft rows that each teaches.

    Args:
        probs: `[C, Vd]` the teacher's distributions.
        best: `[C]` draft id of the teacher's best token, -1 where the draft has none.
        asking: `[C, K]` int64, place among the R unrolled rows of the row whose step `k` is taught; any where none is.
        there: `[C, K]` bool, whether there is one.
    """

    probs: Tensor
    best: Tensor
    asking: Tensor
    there: Tensor


class _Blocks:
    """Walks over the supervised teacher rows in blocks; notes which guesses are right."""

    def __init__(
        self, batch: PackedBatch, rows: Tensor, steps: int, teacher: TeacherHead, objective: Objective, chunk: int
    ) -> None:
        self.states, self.teacher, self.objective, self.scratch = batch.teacher, teacher, objective, _Scratch()
        self.correct = torch.zeros(len(rows), steps, dtype=torch.bool, device=rows.device)  # [R, K]
        self.dropped = rows.new_zeros(())
        # Whether the best token is looked for in the whole vocabulary: a measurement always does.
        self.whole = objective.outside == "drop" or not torch.is_grad_enabled()
        self._wanted = batch.loss_mask.nonzero()[:, 0]  # [S] ascending: step 0 is always there to be taught
        self._size = max(1, chunk // steps)
        ahead = torch.arange(steps, device=rows.device)
        self._there = batch.positions()[self._wanted][:, None] >= ahead  # [S, K]: row s - k is in the same document
        place = torch.zeros(batch.rows, dtype=torch.int64, device=rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
        self._asking = place[(self._wanted[:, None] - ahead).clamp(min=0)]  # [S, K]

    def __iter__(self) -> Iterator[_Block]:
        """The blocks, first rows first; each one's memory is the next one's."""
        for start in range(0, len(self._wanted), self._size):
            some = slice(start, start + self._size)
            states, temperature = self.states[self._wanted[some]], self.objective.teacher_temperature
            probs, best = teacher_probs(states, self.teacher, temperature, self.scratch, self.whole)
            self.dropped = self.dropped + (best < 0).sum()
            yield _Block(probs, best, self._asking[some], self._there[some])

    def judge(self, block: _Block, guesses: Tensor) -> None:
        """Note whether `guesses [C, K]` (draft ids) are the teacher's best."""
        right = (guesses == block.best[:, None]) & block.there
        steps = torch.arange(right.shape[1], device=right.device).expand_as(right)
        self.correct[block.asking[right], steps[right]] = True


class _ChunkedLoss(torch.autograd.Function):
    """The objective over all blocks; gradients are taken in forward: no logits outlive their block."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, factors: Tensor, blocks: _Blocks
    ) -> tuple[Tensor, Tensor]:
        """`hidden [K, R, H]` normed outputs, `weight [Vd, H]`, `factors [K]` -> weighted loss, sums `[K]`."""
        grads = _HeadGradients(hidden, weight, *ctx.needs_input_grad[:2])
        sums = torch.zeros(len(hidden), dtype=torch.float64, device=hidden.device)
        steps = torch.arange(len(hidden), device=hidden.device)
        for block in blocks:
            h = hidden[steps, block.asking]  # [C, K, H]
            flat = blocks.scratch.product("logits", h.flatten(0, 1), weight)  # [C K, Vd]
            logits = flat.view(*block.asking.shape, -1)  # [C, K, Vd]
            top, guesses = logits.max(-1)
            blocks.judge(block, guesses)
            counted = block.there  # [C, K]
            if blocks.objective.outside == "drop":
                counted = counted & (block.best >= 0)[:, None]
            loss, grad, scale = blocks.objective.rows(logits.sub_(top[..., None]), block.probs[:, None])
            sums += torch.where(counted, loss, 0).sum(0, dtype=torch.float64)
            scale = torch.where(counted, scale * factors.to(scale.dtype), 0)  # [C, K]
            grads.add(block.asking, h, grad, scale, blocks.scratch)
        ctx.save_for_backward(grads.hidden, grads.of_weight())
        ctx.mark_non_differentiable(sums)
        return (sums * factors).sum().to(torch.promote_types(hidden.dtype, torch.float32)), sums

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # In place: a copy of the head's gradient is as large as the head. A second backward is refused by autograd.
        scaled = (None if g is None else g.mul_(grad_loss.to(g.dtype)) for g in ctx.saved_tensors)
        return (*scaled, None, None)


class _HeadGradients:
    """Gradients of the head's input `[K, R, H]` and of its weight `[Vd, H]`, those that are needed."""

    def __init__(self, hidden: Tensor, weight: Tensor, need_hidden: bool, need_weight: bool) -> None:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self._head = weight
        self.hidden = torch.zeros_like(hidden) if need_hidden else None
        self._weight = torch.zeros_like(weight, dtype=wide) if need_weight else None

    def add(self, asking: Tensor, h: Tensor, grad: Tensor, scale: Tensor, scratch: _Scratch) -> None:
        """Add a block's: `asking`, `scale [C, K]`, `h [C, K, H]`, `grad [C, K, Vd]`; the true one is `scale * grad`.

        The scale is applied on the narrow side of both products.
        """
        if self.hidden is None and self._weight is None:
            return
        grad = grad.flatten(0, 1)  # [C K, Vd]
        if grad.dtype != h.dtype:
            grad = scratch.empty("narrow logits", tuple(grad.shape), h.dtype, h.device).copy_(grad)
        if self.hidden is not None:
            found = (grad @ self._head).view_as(h) * scale[..., None].to(h.dtype)
            for k, rows in enumerate(asking.unbind(1)):  # rows of a block are distinct in each step, save scale 0
                self.hidden[k].index_add_(0, rows, found[:, k])
        if self._weight is None:
            return
        scaled = (h * scale[..., None].to(h.dtype)).flatten(0, 1)  # [C K, H]
        if self._weight.dtype == grad.dtype:
            self._weight.addmm_(grad.T, scaled)
        else:
            self._weight += grad.T @ scaled

    def of_weight(self) -> Tensor | None:
        """The weight's gradient, in its dtype."""
        return None if self._weight is None else self._weight.to(self._head.dtype)
