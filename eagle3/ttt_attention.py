"""Attention of the unrolled draft: a causal prefix plus a few own keys, without a longer sequence or an N x N matrix.

A query at row `t` sees the step-0 keys of rows `0..t` of its document (flash attention) and one key of each later
step at its own row (the *diagonals*, plain products). Two softmaxes over disjoint keys join by their logsumexp:

    lse = logaddexp(lse_prefix, logsumexp(diagonal scores))
    out = exp(lse_prefix - lse) out_prefix + sum_j exp(score_j - lse) v_j

Backward, a flash kernel rebuilds the probabilities as `exp(score - lse)` and needs `sum(out * grad_out)`: given the
*joined* `out` and `lse` it returns the prefix's share of the gradients exactly (as ring attention does, Liu et al.
2023). The diagonals' share is written out by hand.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from eagle3.ttt_kernels import prefix_backward, prefix_forward


def ttt_attention(
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    doc_lengths: list[int],
    diagonals: list[Tensor],
    rows: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of the asking rows over their causal prefix and their own diagonals.

    Args:
        q: `[R, Hq, D]` rotated queries.
        k0: `[N, Hkv, D]` rotated step-0 keys of every row; Hkv divides Hq.
        v0: `[N, Hkv, Dv]` their values.
        doc_lengths: rows of each document; nothing is seen across documents.
        diagonals: `[k_1, v_1, k_2, v_2, ...]`, `[R, Hkv, D]` or `[R, Hkv, Dv]`: row `r` sees row `r` alone.
        rows: `[R]` int64, which of the N rows ask; None for all (R = N).
        scale: factor on the scores; None = `D ** -0.5`.

    Returns:
        `[R, Hq, Dv]`, in q's dtype.
    """
    return _TTTAttention.apply(q, k0, v0, doc_lengths, rows, scale or 1.0 / math.sqrt(q.shape[-1]), *diagonals)


def _spread(x: Tensor, rows: Tensor | None, total: int) -> Tensor:
    """`[R, ...] -> [N, ...]`, zeros where no row asks."""
    return x.contiguous() if rows is None else x.new_zeros((total, *x.shape[1:])).index_copy_(0, rows, x)


def _pick(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x[rows]


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """`[R, Hq, ...] -> [R, Hkv, G, ...]`: the query heads that share a key head, together."""
    return x.unflatten(1, (kv_heads, -1))


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k0: Tensor,
        v0: Tensor,
        doc_lengths: list[int],
        rows: Tensor | None,
        scale: float,
        *diagonals: Tensor,
    ) -> Tensor:
        q_all = _spread(q, rows, k0.shape[0])  # [N, Hq, D]
        out, lse, state = prefix_forward(q_all, k0, v0, doc_lengths, scale)  # [N, Hq, Dv], [N, Hq]
        if diagonals:
            out, lse_rows = _join(q, _pick(out, rows), _pick(lse, rows), diagonals, scale)  # [R, ...]
            # Rows that do not ask keep a finite lse; their zero grad_out makes their share of every gradient zero.
            lse = lse_rows if rows is None else lse.index_copy(0, rows, lse_rows)
        else:
            out = _pick(out, rows)
        ctx.save_for_backward(q, k0, v0, out, lse, rows, *diagonals)
        ctx.doc_lengths, ctx.scale, ctx.state = doc_lengths, scale, state
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k0, v0, out, lse, rows, *diagonals = ctx.saved_tensors
        total = k0.shape[0]
        dq, dk0, dv0 = prefix_backward(
            _spread(grad_out, rows, total),
            _spread(q, rows, total),
            k0,
            v0,
            _spread(out, rows, total),
            lse,
            ctx.doc_lengths,
            ctx.scale,
            ctx.state,
        )
        dq = _pick(dq, rows)
        if not diagonals:
            return dq, dk0, dv0, None, None, None
        dq_own, grads = _diagonal_grads(grad_out, q, out, _pick(lse, rows), diagonals, ctx.scale)
        return dq + dq_own.to(dq.dtype), dk0, dv0, None, None, None, *grads


def _join(q: Tensor, out: Tensor, lse: Tensor, diagonals: tuple[Tensor, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Add the diagonals to a prefix's `out [R, Hq, Dv]`, `lse [R, Hq]`; both come back joined."""
    kv_heads, wide = diagonals[0].shape[1], lse.dtype
    q_grouped = _grouped(q.to(wide), kv_heads)  # [R, Hkv, G, D]
    scores = [(q_grouped * k.to(wide)[:, :, None]).sum(-1).flatten(1) * scale for k in diagonals[::2]]  # J x [R, Hq]
    joined = torch.logsumexp(torch.stack([lse, *scores]), dim=0)  # [R, Hq]
    total = out.to(wide) * (lse - joined).exp()[..., None]
    for score, v in zip(scores, diagonals[1::2], strict=True):
        share = _grouped((score - joined).exp(), kv_heads)  # [R, Hkv, G]
        total += (share[..., None] * v.to(wide)[:, :, None]).flatten(1, 2)
    return total.to(q.dtype), joined


def _diagonal_grads(
    grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, diagonals: list[Tensor], scale: float
) -> tuple[Tensor, list[Tensor]]:
    """The diagonals' share of dq `[R, Hq, D]` and `[dk_1, dv_1, ...]`, each `[R, Hkv, ...]`."""
    kv_heads, wide = diagonals[0].shape[1], lse.dtype
    q_grouped, do = _grouped(q.to(wide), kv_heads), _grouped(grad_out.to(wide), kv_heads)  # [R, Hkv, G, D]
    delta = (do * _grouped(out.to(wide), kv_heads)).sum(-1)  # [R, Hkv, G]
    lse_grouped = _grouped(lse, kv_heads)  # [R, Hkv, G]
    dq, grads = torch.zeros_like(q_grouped), []
    for k, v in zip(diagonals[::2], diagonals[1::2], strict=True):
        k_wide, v_wide = k.to(wide)[:, :, None], v.to(wide)[:, :, None]  # [R, Hkv, 1, D]
        p = ((q_grouped * k_wide).sum(-1) * scale - lse_grouped).exp()  # [R, Hkv, G]
        ds = (p * ((do * v_wide).sum(-1) - delta) * scale)[..., None]  # [R, Hkv, G, 1]
        dq += ds * k_wide
        grads += [(ds * q_grouped).sum(2).to(k.dtype), (p[..., None] * do).sum(2).to(v.dtype)]
    return dq.flatten(1, 2), grads
