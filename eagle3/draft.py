"""The EAGLE-3 draft model: one Llama decoder layer over the token's embedding and the target's fused states.

    h = fc(cat of the target's aux states)            first step; later steps feed the draft's own output
    a = cat(input_layernorm(embed(token)), hidden_norm(h))
    h = h + o_proj(attention(q(a), k(a), v(a)))       the residual is the un-normed h; q, k, v in two parts, `words`
    g = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(g))                         g itself, un-normed, feeds the next step
                                                      (norm(g), with EAGLE 3.1's `norm_output`)

(Li et al. 2025, "EAGLE-3"; the same order stands in EAGLE's training code and in SGLang's and vLLM's Llama draft.)
Parameter names are those of the served folder, so the state dict *is* the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3.config import require
from eagle3.draft_layer import Attend, DraftAttention, DraftLayer, RMSNorm
from eagle3.draft_shape import DraftShape
from eagle3.rope import inverse_frequencies

__all__ = ["Attend", "DraftCache", "DraftHead", "DraftShape", "Eagle3Draft"]


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
        self._values: Tensor | None = None  # [capacity, Hkv, Dv]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add `[n, Hkv, D]` and `[n, Hkv, Dv]`; return all keys and values so far, `[length, Hkv, ...]`."""
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
    """The draft with Llama's attention; its state dict has the served folder's names.

    Buffers: `d2t [Vd] int64` (target id = draft id + d2t[draft id]) and `t2d [V] bool` (target ids the draft knows).
    `embed_tokens` is the target's embedding and is never trained. `eagle3.draft_build` picks the class for a shape.
    """

    kind: ClassVar[str] = "llama"
    layer_name: ClassVar[str] = "midlayer"  # what the one decoder layer's names begin with
    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        require(shape.kind == self.kind, "draft.kind", shape.kind, f"{self.kind} for this class")
        self.shape = shape
        self.fc = nn.Linear(shape.num_aux * shape.hidden_size, shape.hidden_size, bias=False)
        if shape.norm_before_fc:
            self.input_norm = RMSNorm(shape.num_aux * shape.hidden_size, shape.rms_norm_eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(shape.hidden_size, shape.rms_norm_eps) for _ in range(shape.num_aux))
        self._add_layer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = DraftHead(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.embed_tokens.weight.requires_grad_(False)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(shape.vocab_size) < shape.draft_vocab_size)
        # Plain attributes, not buffers: casting the model must not round the frequencies.
        self._inv_freq, self._rope_factor = self._frequencies(shape)

    def _add_layer(self, shape: DraftShape) -> None:
        self.midlayer = DraftLayer(shape, DraftAttention(shape))

    def _frequencies(self, shape: DraftShape) -> tuple[Tensor, float]:
        theta, scaling = shape.rope["rope_theta"], shape.rope["rope_scaling"]
        return inverse_frequencies(shape.rotary_dim, theta, scaling, shape.max_position_embeddings)

    @property
    def score_scale(self) -> float:
        """Factor on the attention's scores."""
        return self.shape.head_dim**-0.5

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`positions [n] int64` -> cos, sin `[n, 1, D]` in `dtype` (D: the rotated width), computed in float32."""
        angle = positions.float()[:, None] * self._inv_freq.to(positions.device)  # [n, D/2]
        angle = self._over_head(angle)[:, None]  # [n, 1, D]
        return (angle.cos() * self._rope_factor).to(dtype), (angle.sin() * self._rope_factor).to(dtype)

    def _over_head(self, angle: Tensor) -> Tensor:
        """`[n, D/2] -> [n, D]`: each angle at both dimensions of its pair."""
        return torch.cat((angle, angle), dim=-1)

    def fuse(self, features: Tensor) -> Tensor:
        """`features [..., A*H]`, aux states in the wiring's order -> `[..., H]`."""
        if self.shape.norm_before_fc:
            features = self.input_norm(features)
        if self.shape.fc_norm:
            states = features.chunk(self.shape.num_aux, dim=-1)  # A x [..., H]
            features = torch.cat([norm(x) for norm, x in zip(self.fc_norm, states, strict=True)], dim=-1)
        return self.fc(features)

    def step(
        self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """One pass of the layer: `hidden [n, H]`, `token_ids [n]`, `positions [n]` -> `g [n, H]`.

        `g` feeds the next step as it is: un-normed, or normed with `norm_output`.
        With `rows [r]` only those ask and are returned, `[r, H]`; all `n` still serve as keys.
        """
        return self.advance(hidden, self.words(token_ids, hidden.dtype), positions, attend, rows)

    def words(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The share of tokens in the layer's projections, whichever step reads them: `[n]` int64 -> `[n, W]`."""
        return self.midlayer.words(self.embed_tokens(token_ids).to(dtype))

    def advance(
        self, hidden: Tensor, words: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """`step` for tokens whose share `words [n, W]` is there already."""
        cos, sin = self.rope(positions, hidden.dtype)
        g = self.midlayer(words, hidden, cos, sin, attend, rows)
        return self.norm(g) if self.shape.norm_output else g

    def head_input(self, g: Tensor) -> Tensor:
        """What the head reads of a step's output: `g [..., H] -> [..., H]`, normed."""
        return g if self.shape.norm_output else self.norm(g)

    def logits(self, g: Tensor) -> Tensor:
        """`g [..., H]` -> logits over the draft vocabulary `[..., Vd]`."""
        return self.lm_head(self.head_input(g))

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
            `g [n, H]`: `logits(g)` proposes, `g` feeds the next step.
        """

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.append(k, v)  # [L, Hkv, D], [L, Hkv, Dv]
            return _causal(q, keys, values, self.score_scale)

        return self.step(hidden, token_ids, positions, attend)


def _causal(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of the last `n` of `L` tokens: `q [n, Hq, D]`, `keys`, `values [L, Hkv, ...]` -> `[n, Hq, Dv]`."""
    n, total = q.shape[0], keys.shape[0]
    mask = None
    if n > 1:
        rows = torch.arange(total - n, total, device=q.device)
        mask = rows[:, None] >= torch.arange(total, device=q.device)  # [n, L]
    groups = q.shape[1] // keys.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1).transpose(0, 1)[None] for x in (keys, values))  # [1, Hq, L, ...]
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, scale=scale)  # [1, Hq, n, Dv]
    return out[0].transpose(0, 1)
