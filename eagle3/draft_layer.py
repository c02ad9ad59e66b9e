"""The parts of a draft's one decoder layer; who may see whom is the caller's `attend`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from eagle3.draft_shape import DraftShape
from eagle3.fused import gated_down, rms_norm
from eagle3.rope import rotate
from eagle3.summed import SummedLinear

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
        return rms_norm(x, self.weight, self.eps)


class JointLinear(SummedLinear):
    """A projection of `cat(word, hidden)`, in two parts: `W cat(w, h) = W_w w + W_h h`.

    The word's part is the same in every unrolled step that reads the word, so it is computed once for all of them.
    Both are computed inside this module's forward: under ZeRO-3 a weight exists in full only there.
    """

    def forward(self, x: Tensor, word_part: Tensor | None = None) -> Tensor:
        """`x [n, H]`: a word's part `W_w x [n, out]`, or, given that as `word_part`, the whole with `x` as hidden."""
        half = self.in_features // 2
        if word_part is None:
            return self.product(x, slice(half))
        return self.product(x, slice(half, None), word_part)


class DraftAttention(nn.Module):
    """Llama's projections around attention, on a doubled input."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        width, d = 2 * shape.hidden_size, shape.head_dim
        self.shape = shape
        self.q_proj = JointLinear(width, shape.num_attention_heads * d, bias=False)
        self.k_proj = JointLinear(width, shape.num_key_value_heads * d, bias=False)
        self.v_proj = JointLinear(width, shape.num_key_value_heads * d, bias=False)
        self.o_proj = SummedLinear(shape.num_attention_heads * d, shape.hidden_size, bias=False)

    @property
    def word_widths(self) -> list[int]:
        """Columns of a word's part: of its query, key and value."""
        return [module.out_features for module in (self.q_proj, self.k_proj, self.v_proj)]

    def words(self, x: Tensor) -> Tensor:
        """`x [n, H]`, normed embeddings -> their part of query, key and value, `[n, W]`."""
        return torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)

    def forward(
        self, words: Tensor, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """`words [n, W]`, `x [n, H]`, `cos`/`sin [n, 1, D]` -> `[n, H]`, or `[r, H]` of the asking `rows [r]`."""
        n, d = x.shape[0], self.shape.head_dim
        q_word, k_word, v_word = words.split(self.word_widths, dim=-1)
        k = rotate(self.k_proj(x, k_word).view(n, -1, d), cos, sin)  # [n, Hkv, D]
        v = self.v_proj(x, v_word).view(n, -1, d)  # [n, Hkv, D]
        if rows is not None:
            q_word, x, cos, sin = q_word[rows], x[rows], cos[rows], sin[rows]
        q = rotate(self.q_proj(x, q_word).view(x.shape[0], -1, d), cos, sin)  # [r, Hq, D]
        return self.o_proj(attend(q, k, v).reshape(x.shape[0], -1))


class GatedDown(SummedLinear):
    """The MLP's last product, which takes the gate along: `down(silu(gate) * up)`."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        """`gate`, `up [n, I] -> [n, H]`."""
        return gated_down(gate, up, self.weight, self.opened())


class DraftMLP(nn.Module):
    """Llama's gated MLP: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = SummedLinear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = SummedLinear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = GatedDown(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x [n, H] -> [n, H]`."""
        return self.down_proj(self.gate_proj(x), self.up_proj(x))


class DraftLayer(nn.Module):
    """The one decoder layer; its attention reads the embedding beside the hidden state."""

    def __init__(self, shape: DraftShape, attention: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = attention
        self.mlp = DraftMLP(shape)

    def words(self, embeds: Tensor) -> Tensor:
        """`embeds [n, H]` -> what attention's projections make of them, `[n, W]`."""
        return self.self_attn.words(self.input_layernorm(embeds))  # type: ignore[operator]

    def forward(
        self, words: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """`words [n, W]`, `hidden [n, H]` -> the un-normed output `g [n, H]`, or `[r, H]` of `rows [r]` alone."""
        normed = self.hidden_norm(hidden)  # [n, H]
        hidden = hidden if rows is None else hidden[rows]
        hidden = hidden + self.self_attn(words, normed, cos, sin, attend, rows)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
