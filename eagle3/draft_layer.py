"""The parts of a draft's one decoder layer; who may see whom is the caller's `attend`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3.draft_shape import DraftShape
from eagle3.rope import rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention over rotated heads: `(q [r, Hq, D], k [n, Hkv, D], v [n, Hkv, Dv]) -> out [r, Hq, Dv]`."""


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last axis, computed in at least float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., H] -> [..., H]`, same dtype."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class DraftAttention(nn.Module):
    """Llama's projections around attention, on a doubled input."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        width, d = 2 * shape.hidden_size, shape.head_dim
        self.shape = shape
        self.q_proj = nn.Linear(width, shape.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(width, shape.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(width, shape.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * d, shape.hidden_size, bias=False)

    def forward(self, a: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """`a [n, 2H]`, `cos`/`sin [n, 1, D]` -> `[n, H]`, or `[r, H]` of the asking `rows [r]`; all are keys."""
        n, d = a.shape[0], self.shape.head_dim
        k = rotate(self.k_proj(a).view(n, -1, d), cos, sin)  # [n, Hkv, D]
        v = self.v_proj(a).view(n, -1, d)  # [n, Hkv, D]
        if rows is not None:
            a, cos, sin = a[rows], cos[rows], sin[rows]
        q = rotate(self.q_proj(a).view(a.shape[0], -1, d), cos, sin)  # [r, Hq, D]
        return self.o_proj(attend(q, k, v).reshape(a.shape[0], -1))


class DraftMLP(nn.Module):
    """Llama's gated MLP: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x [n, H] -> [n, H]`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """The one decoder layer; its attention reads the embedding beside the hidden state."""

    def __init__(self, shape: DraftShape, attention: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = attention
        self.mlp = DraftMLP(shape)

    def forward(
        self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """`embeds`, `hidden [n, H]` -> the un-normed output `g [n, H]`, or `[r, H]` of `rows [r]` alone."""
        a = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)  # [n, 2H]
        hidden = hidden if rows is None else hidden[rows]
        hidden = hidden + self.self_attn(a, cos, sin, attend, rows)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
