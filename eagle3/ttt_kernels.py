"""The causal prefix of packed documents through a flash kernel, forward and backward, logsumexp included.

- CPU: PyTorch's flash kernel, one call a document, any floating dtype, grouped heads natively.
- GPU, float16 or bfloat16: FlashAttention's variable-length kernel, one call for all documents.
- Anything else (a GPU in float32, odd head widths): plain matrix products a document and head group at a time.

A flash kernel wants one width for queries, keys and values. Latent attention has two (Kimi-K2.5: 192 and 128), so the
narrower tensors are widened with zeros for the call: zeros add nothing to a score, and what comes out of them is cut.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def prefix_forward(q: Tensor, k: Tensor, v: Tensor, doc_lengths: list[int], scale: float) -> tuple[Tensor, Tensor, Any]:
    """Causal attention within each document.

    Args:
        q: `[N, Hq, D]`; k: `[N, Hkv, D]`; v: `[N, Hkv, Dv]`.
        doc_lengths: rows of each document.
        scale: factor on the scores.

    Returns:
        out `[N, Hq, Dv]`, lse `[N, Hq]` (float32, or float64 for float64 inputs), and state for `prefix_backward`.
    """
    if _varlen(q, v):
        q, k, v_wide = _one_width(q, k, v)
        out, lse, state = _varlen_forward(q, k, v_wide, doc_lengths, scale)
        return out[..., : v.shape[-1]], lse, state
    one = _cpu_forward if q.device.type == "cpu" else _plain_forward
    parts = [
        one(_heads_first(qd), _heads_first(kd), _heads_first(vd), scale)
        for qd, kd, vd in _documents(doc_lengths, q, k, v)
    ]
    return torch.cat([_rows_first(o) for o, _ in parts]), torch.cat([lse[0].T for _, lse in parts]), None


def prefix_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    doc_lengths: list[int],
    scale: float,
    state: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v for a softmax whose joined `out [N, Hq, Dv]` and `lse [N, Hq]` may cover further keys."""
    if _varlen(q, v):
        do, q_wide, k_wide, v_wide, out = _one_width(grad_out, q, k, v, out)
        dq, dk, dv = _varlen_backward(do, q_wide, k_wide, v_wide, out, lse, scale, state)
        return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]
    one = _cpu_backward if q.device.type == "cpu" else _plain_backward
    parts = []
    for do, qd, kd, vd, od, lsed in _documents(doc_lengths, grad_out, q, k, v, out, lse):
        do, qd, kd, vd, od = (_heads_first(x) for x in (do, qd, kd, vd, od))  # [1, heads, T, ...] each
        grads = one(do, qd, kd, vd, od, lsed.T[None].contiguous(), scale)
        parts.append([_rows_first(g) for g in grads])
    dq, dk, dv = (torch.cat(x) for x in zip(*parts, strict=True))
    return dq, dk, dv


def _varlen(q: Tensor, v: Tensor) -> bool:
    width = max(q.shape[-1], v.shape[-1])
    return q.is_cuda and q.dtype in _HALF and width % 8 == 0 and width <= 256


def _one_width(*tensors: Tensor) -> list[Tensor]:
    """Each tensor `[..., any]`, widened with zeros to the widest."""
    width = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]


def _documents(doc_lengths: list[int], *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(x.split(doc_lengths) for x in tensors), strict=True))


def _heads_first(x: Tensor) -> Tensor:
    """`[T, heads, D] -> [1, heads, T, D]`, a view."""
    return x.transpose(0, 1)[None]


def _rows_first(x: Tensor) -> Tensor:
    """`[1, heads, T, D] -> [T, heads, D]`, a view."""
    return x[0].transpose(0, 1)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    wide = _one_width(q, k, v)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, True, scale=scale)
    return out[..., : v.shape[-1]], lse


def _cpu_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    do, q_wide, k_wide, v_wide, out = _one_width(do, q, k, v, out)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q_wide, k_wide, v_wide, out, lse, 0.0, True, scale=scale
    )
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]


def _plain_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Masked scores of one group: `q [1, Hkv, G, T, D]`, `k [1, Hkv, 1, T, D]` -> `[1, Hkv, G, T, T]`."""
    scores = q @ k.transpose(-1, -2) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -torch.inf)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.to(wide).unflatten(1, (k.shape[1], -1))  # [1, Hkv, G, T, D]
    scores = _plain_scores(groups, k.to(wide)[:, :, None], scale)  # [1, Hkv, G, T, T]
    lse = scores.logsumexp(-1)  # [1, Hkv, G, T]
    out = (scores - lse[..., None]).exp() @ v.to(wide)[:, :, None]
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _plain_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide, kv_heads = lse.dtype, k.shape[1]
    q5, do5, out5 = (x.to(wide).unflatten(1, (kv_heads, -1)) for x in (q, do, out))  # [1, Hkv, G, T, D]
    k5, v5 = k.to(wide)[:, :, None], v.to(wide)[:, :, None]  # [1, Hkv, 1, T, D]
    p = (_plain_scores(q5, k5, scale) - lse.unflatten(1, (kv_heads, -1))[..., None]).exp()  # [1, Hkv, G, T, T]
    dv = (p.transpose(-1, -2) @ do5).sum(2)
    ds = p * (do5 @ v5.transpose(-1, -2) - (do5 * out5).sum(-1, keepdim=True)) * scale
    dq, dk = (ds @ k5).flatten(1, 2), (ds.transpose(-1, -2) @ q5).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, doc_lengths: list[int], scale: float
) -> tuple[Tensor, Tensor, Any]:
    bounds = torch.tensor([0, *doc_lengths], device=q.device).cumsum(0).to(torch.int32)  # [documents + 1]
    longest = max(doc_lengths)
    out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
        q.contiguous(), k.contiguous(), v.contiguous(), bounds, bounds, longest, longest, 0.0, True, False, scale=scale
    )
    return out, lse.T, (bounds, longest, rng, unused)  # lse comes as [Hq, N]


def _varlen_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, state: Any
) -> tuple[Tensor, Tensor, Tensor]:
    bounds, longest, rng, unused = state
    tensors = [x.contiguous() for x in (do, q, k, v, out, lse.T)]
    return torch.ops.aten._flash_attention_backward(
        *tensors, bounds, bounds, longest, longest, 0.0, True, rng, unused, scale=scale
    )
