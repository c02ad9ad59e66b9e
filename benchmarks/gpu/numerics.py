"""Values and gradients of the fast step on this device, against the plain one in double precision.

The reference is `benchmarks.plain_step` in float64 on the same numbers: the weights and states are first rounded to the
dtype under test. In float32 the fast step must be near it. In bfloat16 no fixed bound would mean much, so it may be off
by no more than `SLACK` times what the plain step in bfloat16 is off by: rounding is allowed, another formula is not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.synthetic import Sizes, random_batch, random_parts
from benchmarks.plain_step import plain_loss
from eagle3.draft import Eagle3Draft
from eagle3.ttt import PackedBatch
from train.losses import TeacherHead, step_weights, supervised_counts, ttt_loss

LIMIT = {"float32": (1e-5, 1e-3), "bfloat16": (2e-3, 2e-2)}  # of the loss, of a gradient: always allowed
SLACK = 2.0


def check(
    sizes: Sizes, lengths: list[int], kind: str, steps: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """One draft's step against the reference.

    Args:
        sizes: small ones: the reference keeps every attention matrix.
        lengths: of the packed documents.
        kind: of draft, "llama" or "mla".
        steps: K.
        dtype: of the step under test.
        device: where both run.

    Returns:
        relative errors of the loss and of the worst gradient, of the fast and of the plain step; `wrong` says what is
        beyond the bound.
    """
    parts = random_parts(sizes.shape(kind), device, dtype)
    batch = random_batch(parts.draft.shape, lengths, device, dtype, supervised=0.5)  # so that a part of the rows asks
    batch.loss_mask &= torch.rand(batch.rows, device=device) < 0.6
    weights = step_weights(supervised_counts(batch, steps), 0.8)
    fast = _take(parts.draft, ttt_loss(parts.draft, batch, parts.teacher, weights, chunk=100).loss)
    plain = _take(parts.draft, plain_loss(parts.draft, batch, parts.teacher, weights)[0])
    again = _take(parts.draft, ttt_loss(parts.draft, batch, parts.teacher, weights, 100, recompute=True).loss)
    wanted = _reference(parts.draft, batch, parts.teacher, weights)
    found = {"fast": _errors(fast, wanted), "recomputed": _errors(again, wanted), "plain": _errors(plain, wanted)}
    return {
        "rows": batch.rows,
        "asking": int(batch.supervised(steps).any(1).sum()),
        **found,
        "wrong": judge(found, dtype),
    }


def judge(found: dict[str, dict[str, Any]], dtype: torch.dtype) -> str:
    """What is beyond the bound, or ""."""
    limits = LIMIT[str(dtype).removeprefix("torch.")]
    for side in ("fast", "recomputed"):
        for what, limit in zip(("loss", "gradient"), limits, strict=True):
            allowed = max(limit, SLACK * found["plain"][what])
            if not found[side][what] <= allowed:  # also a NaN
                return f"{side} {what} off by {found[side][what]:.1e}, {allowed:.1e} allowed ({found[side]['worst']})"
    return ""


def _take(draft: Eagle3Draft, loss: Tensor) -> dict[str, Tensor]:
    """The loss and every gradient, by name, in double precision."""
    names = [name for name, p in draft.named_parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, [p for p in draft.parameters() if p.requires_grad])
    return {"loss": loss.detach().double(), **{n: g.double() for n, g in zip(names, grads, strict=True)}}


def _reference(draft: Eagle3Draft, batch: PackedBatch, teacher: TeacherHead, weights: Tensor) -> dict[str, Tensor]:
    """The plain step in float64; the draft comes back in float64."""
    wide = draft.double()
    device = batch.token_ids.device
    exact = plain_loss(wide, batch.to(device, torch.float64), teacher.to(device, torch.float64), weights)[0]
    return _take(wide, exact)


def _errors(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Any]:
    """Relative error of the loss, and the largest `|g - w| / |w|` of a gradient with its name."""
    off = {name: float((got[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}
    loss = off.pop("loss")
    worst = max(off, key=lambda name: float("inf") if off[name] != off[name] else off[name])
    return {"loss": loss, "gradient": off[worst], "worst": worst}
