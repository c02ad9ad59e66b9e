"""Attention over SGLang's paged cache, one request at a time, in float32.

Cache buffers are `[slots, heads, dim]`; `req_to_token[request, position]` names the slot of each position. With MLA
the cache holds one latent head: keys are `[latent | rope]` and values a view of their first part, so that the
absorbed form attends with one key head for all query heads, while an unabsorbed prefill brings keys per head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, keep: Tensor | None) -> Tensor:
    """Softmax attention: q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv], keep bool [Tq, Tk] -> [Tq, Hq, Dv]."""
    q, k, v = (t.float().transpose(0, 1) for t in (q, k, v))
    groups = q.shape[0] // k.shape[0]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.transpose(1, 2) * scale  # [Hq, Tq, Tk]
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    if keep is not None:
        scores = scores.masked_fill(~keep, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def extend_attention_cpu(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    out: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    _key_scale: float,
    _value_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    extend_start: Tensor,
    _max_extend: int,
    scale: float,
    cap: float,
    is_cross: bool,
    window: int | None,
    _encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    causal: bool = True,
) -> None:
    """New tokens over a cached prefix: prefill, and verify (a chain, or a tree with `tree_mask` flat `[B * E * E]`)."""
    _refuse_unsupported(is_cross, window, sinks)
    mask_at = 0
    for row in range(seq_lens.shape[0]):
        length, new, start = int(seq_lens[row]), int(extend_lens[row]), int(extend_start[row])
        if new == 0:
            continue
        here = slice(start, start + new)
        slots = req_to_token[int(req_pool_indices[row]), :length].long()
        keys, values = _keys_values(k, v, q.shape[-1], out.shape[-1], key_buffer, value_buffer, slots, here)
        keep = torch.ones(new, length, dtype=torch.bool)
        if tree_mask is not None:
            keep[:, length - new :] = tree_mask.reshape(-1)[mask_at : mask_at + new * new].view(new, new).bool()
            mask_at += new * new
        elif causal:
            keep[:, length - new :] = torch.ones(new, new, dtype=torch.bool).tril()
        out[here] = attend(q[here], keys, values, scale, cap, keep).to(out.dtype)


def _keys_values(
    k: Tensor | None,
    v: Tensor | None,
    key_dim: int,
    value_dim: int,
    key_buffer: Tensor,
    value_buffer: Tensor,
    slots: Tensor,
    here: slice,
) -> tuple[Tensor, Tensor]:
    """Keys and values of a request: the cached prefix, then the rows brought along (or all from the cache)."""
    if k is None or v is None:
        return key_buffer[slots], value_buffer[slots]
    new_k = k.reshape(k.shape[0], -1, key_dim)[here]
    new_v = v.reshape(v.shape[0], -1, value_dim)[here]
    prefix = slots[: len(slots) - new_k.shape[0]]
    if prefix.numel() == 0:
        return new_k, new_v
    return (
        torch.cat([key_buffer[prefix].to(new_k.dtype), new_k]),
        torch.cat([value_buffer[prefix].to(new_v.dtype), new_v]),
    )


def decode_attention_cpu(
    q: Tensor,
    key_buffer: Tensor,
    value_buffer: Tensor,
    _key_scale: float,
    _value_scale: float,
    out: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    loc: Tensor,
    _attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scale: float,
    cap: float,
    is_cross: bool,
    window: int | None,
    _encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One new token a request: write its key and value to the cache, then attend over the whole text."""
    _refuse_unsupported(is_cross, window, sinks)
    if k is not None and v is not None:
        key_buffer[loc.long()] = k.reshape(k.shape[0], -1, key_buffer.shape[-1]).to(key_buffer.dtype)
        value_buffer[loc.long()] = v.reshape(v.shape[0], -1, value_buffer.shape[-1]).to(value_buffer.dtype)
    for row in range(seq_lens.shape[0]):
        slots = req_to_token[int(req_pool_indices[row]), : int(seq_lens[row])].long()
        out[row : row + 1] = attend(q[row : row + 1], key_buffer[slots], value_buffer[slots], scale, cap, None).to(
            out.dtype
        )


def _refuse_unsupported(is_cross: bool, window: int | None, sinks: Tensor | None) -> None:
    if is_cross or sinks is not None or (window or 0) > 0:
        raise NotImplementedError("the CPU stand-in has no cross attention, sliding window or sinks")
