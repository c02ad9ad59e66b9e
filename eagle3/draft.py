"""The EAGLE-3 draft model: one Llama decoder layer over the token's embedding and the target's fused states.

    h = fc(cat of the target's aux states)            first step; later steps feed the draft's own output
    a = cat(input_layernorm(embed(token)), hidden_norm(h))
    h = h + o_proj(attention(q(a), k(a), v(a)))       the residual is the un-normed h
    g = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(g))                         g itself, un-normed, feeds the next step

(Li et al. 2025, "EAGLE-3"; the same order stands in EAGLE's training code and in SGLang's and vLLM's Llama draft.)
Parameter names are those of the served folder, so the state dict *is* the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3.config import require
from eagle3.rope import inverse_frequencies, rotate, served_scaling

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention over rotated heads: `(q [r, Hq, D], k [n, Hkv, D], v [n, Hkv, D]) -> out [r, Hq, D]`."""


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a draft.

    Args:
        hidden_size: width H of the target and the draft.
        intermediate_size: width of the MLP.
        num_attention_heads, num_key_value_heads, head_dim: attention sizes; the first a multiple of the second.
        vocab_size: the target's vocabulary V.
        draft_vocab_size: rows of the draft's head; V = no `d2t`.
        num_aux: aux sites A; `fc` reads A * H.
        rms_norm_eps: epsilon of every norm.
        rope: `{"rope_theta": float, "rope_scaling": dict | None}`.
        max_position_embeddings: positions that the served config announces.

    Raises:
        ConfigError: a size that is not positive or does not divide.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_aux: int
    rms_norm_eps: float
    rope: dict[str, Any]
    max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_aux"):
            require(getattr(self, name) > 0, f"draft.{name}", getattr(self, name), "a positive integer")
        groups = self.num_attention_heads % self.num_key_value_heads == 0
        require(groups, "draft.num_key_value_heads", self.num_key_value_heads, "a divisor of num_attention_heads")
        require(self.head_dim > 0 and self.head_dim % 2 == 0, "draft.head_dim", self.head_dim, "an even number")
        fits = 0 < self.draft_vocab_size <= self.vocab_size
        require(fits, "draft.vocab_size", self.draft_vocab_size, f"1 to the target's {self.vocab_size}")
        object.__setattr__(self, "rope", _clean_rope(self.rope))

    @property
    def full_vocab(self) -> bool:
        """Whether the draft's head covers the target's whole vocabulary."""
        return self.draft_vocab_size == self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form; `DraftShape(**d)` reads it back."""
        return asdict(self)


def _clean_rope(rope: dict[str, Any]) -> dict[str, Any]:
    return {"rope_theta": float(rope["rope_theta"]), "rope_scaling": served_scaling(rope.get("rope_scaling"))}


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
    """The projections around attention; who may see whom is the caller's `attend`."""

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

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = DraftAttention(shape)
        self.mlp = DraftMLP(shape)

    def forward(
        self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """`embeds`, `hidden [n, H]` -> the un-normed output `g [n, H]`, or `[r, H]` of `rows [r]` alone."""
        a = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)  # [n, 2H]
        hidden = hidden if rows is None else hidden[rows]
        hidden = hidden + self.self_attn(a, cos, sin, attend, rows)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftHead(nn.Linear):
    """The draft's head. Given a `reader`, it hands out its weight *inside* its own forward.

    A loss that needs the weight itself, not only its product, must read it there: under ZeRO-3 a weight exists
    in full only while its module's forward runs.
    """

    def forward(self, hidden: Tensor, reader: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
        """`hidden [n, H] -> logits [n, Vd]`, or `reader(hidden, weight [Vd, H])`."""
        return super().forward(hidden) if reader is None else reader(hidden, self.weight)


class DraftCache:
    """Rotated keys and values of the tokens the draft has read, for one sequence."""

    def __init__(self) -> None:
        self.length = 0
        self._keys: Tensor | None = None  # [capacity, Hkv, D]
        self._values: Tensor | None = None  # [capacity, Hkv, D]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add `[n, Hkv, D]` and return all keys and values so far, `[length, Hkv, D]`."""
        end = self.length + keys.shape[0]
        self._keys, self._values = self._grown(self._keys, keys, end), self._grown(self._values, values, end)
        self._keys[self.length : end], self._values[self.length : end] = keys, values
        self.length = end
        return self._keys[:end], self._values[:end]

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} tokens to {length}")
        self.length = length

    def _grown(self, buffer: Tensor | None, like: Tensor, needed: int) -> Tensor:
        if buffer is not None and buffer.shape[0] >= needed:
            return buffer
        grown = like.new_empty((max(2 * needed, 64), *like.shape[1:]))
        if buffer is not None:
            grown[: self.length] = buffer[: self.length]
        return grown


class Eagle3Draft(nn.Module):
    """The draft; its state dict has the served folder's names.

    Buffers: `d2t [Vd] int64` (target id = draft id + d2t[draft id]) and `t2d [V] bool` (target ids the draft knows).
    `embed_tokens` is the target's embedding and is never trained.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.num_aux * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = DraftLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = DraftHead(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.embed_tokens.weight.requires_grad_(False)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(shape.vocab_size) < shape.draft_vocab_size)
        # Plain attributes, not buffers: casting the model must not round the frequencies.
        self._inv_freq, self._rope_factor = inverse_frequencies(
            shape.head_dim, shape.rope["rope_theta"], shape.rope["rope_scaling"], shape.max_position_embeddings
        )

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`positions [n] int64` -> cos, sin `[n, 1, D]` in `dtype`, computed in float32."""
        angle = positions.float()[:, None] * self._inv_freq.to(positions.device)  # [n, D/2]
        angle = torch.cat((angle, angle), dim=-1)[:, None]  # [n, 1, D]
        return (angle.cos() * self._rope_factor).to(dtype), (angle.sin() * self._rope_factor).to(dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """`features [..., A*H]`, aux states in the wiring's order -> `[..., H]`."""
        return self.fc(features)

    def step(
        self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """One pass of the layer: `hidden [n, H]`, `token_ids [n]`, `positions [n]` -> `g [n, H]` (un-normed).

        With `rows [r]` only those ask and are returned, `[r, H]`; all `n` still serve as keys.
        """
        cos, sin = self.rope(positions, hidden.dtype)
        return self.midlayer(self.embed_tokens(token_ids).to(hidden.dtype), hidden, cos, sin, attend, rows)

    def logits(self, g: Tensor) -> Tensor:
        """`g [..., H]` -> logits over the draft vocabulary `[..., Vd]`."""
        return self.lm_head(self.norm(g))

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft vocabulary ids -> target ids, any shape, int64."""
        return draft_ids + self.d2t[draft_ids]

    def serve_step(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, cache: DraftCache) -> Tensor:
        """Read `n` further tokens of one sequence, as a server does.

        Args:
            hidden: `[n, H]`; `fuse(features)` for tokens the target has read, else the `g` of the step before.
            token_ids: `[n]` int64; row with features of token `t` takes token `t + 1`.
            positions: `[n]` int64; that row's position is `t`.
            cache: grows by `n`; crop it to drop tokens that were refused.

        Returns:
            `g [n, H]`, un-normed: `logits(g)` proposes, `g` feeds the next step.
        """

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.append(k, v)  # [L, Hkv, D]
            return _causal(q, keys, values)

        return self.step(hidden, token_ids, positions, attend)


def _causal(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of the last `n` of `L` tokens: `q [n, Hq, D]`, `keys`/`values [L, Hkv, D]` -> `[n, Hq, D]`."""
    n, total = q.shape[0], keys.shape[0]
    mask = None
    if n > 1:
        rows = torch.arange(total - n, total, device=q.device)
        mask = rows[:, None] >= torch.arange(total, device=q.device)  # [n, L]
    groups = q.shape[1] // keys.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1).transpose(0, 1)[None] for x in (keys, values))  # [1, Hq, L, D]
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask)  # [1, Hq, n, D]
    return out[0].transpose(0, 1)
