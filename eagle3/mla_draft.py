"""The draft with multi-head latent attention, as targets of the DeepSeek family and Kimi-K2 have it themselves.

The layer is that of `eagle3.draft`; only the attention differs (DeepSeek-AI 2024, "DeepSeek-V2"). With the joined input
`a = cat(embedding, hidden)`:

    q       = q_b(norm(q_a(a)))                        per head: a plain part, and a part to be rotated
    c, r    = split(kv_a(a))                           c: the latent that an engine caches; r: one rotated key for all
    k, v    = split(kv_b(norm(c)))                     per head: a plain key and a value
    score   = (q_plain k + rotate(q_rot) rotate(r)) * head_dim ** -0.5 * yarn's factor

An engine folds `kv_b` into the query and the output and caches `c` and `r` alone; the numbers are the same.
Names and rotary convention are those of SGLang 0.5.23, kimi_k25_eagle3.py, and vLLM 0.32.0, deepseek_eagle3.py.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from eagle3.draft import Eagle3Draft
from eagle3.draft_layer import Attend, DraftLayer, JointLinear, RMSNorm
from eagle3.draft_shape import DraftShape
from eagle3.rope import latent_frequencies, latent_score_factor, rotate_pairs
from eagle3.summed import SummedLinear


class LatentAttention(nn.Module):
    """Latent attention's projections on a doubled input, keys and values expanded to every head."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        width, heads, eps = 2 * shape.hidden_size, shape.num_attention_heads, shape.rms_norm_eps
        self.shape = shape
        self.q_a_proj = JointLinear(width, shape.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(shape.q_lora_rank, eps)
        self.q_b_proj = SummedLinear(shape.q_lora_rank, heads * shape.head_dim, bias=False)
        self.kv_a_proj_with_mqa = JointLinear(width, shape.kv_lora_rank + shape.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank, eps)
        self.kv_b_proj = SummedLinear(
            shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim), bias=False
        )
        self.o_proj = SummedLinear(heads * shape.v_head_dim, shape.hidden_size, bias=False)

    def words(self, x: Tensor) -> Tensor:
        """`x [n, H]`, normed embeddings -> their part of the two latents, `[n, W]`."""
        return torch.cat((self.q_a_proj(x), self.kv_a_proj_with_mqa(x)), dim=-1)

    def forward(
        self, words: Tensor, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """`words [n, W]`, `x [n, H]`, `cos`/`sin [n, 1, R]` -> `[n, H]`, or `[r, H]` of the asking `rows [r]`."""
        low = self.shape.q_lora_rank
        k, v = self._keys(words[:, low:], x, cos, sin)
        words = words[:, :low]
        if rows is not None:
            words, x, cos, sin = words[rows], x[rows], cos[rows], sin[rows]
        plain = self.shape.qk_nope_head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x, words)))
        q = q.view(x.shape[0], -1, self.shape.head_dim)  # [r, Hq, D]
        q = torch.cat((q[..., :plain], rotate_pairs(q[..., plain:], cos, sin)), dim=-1)
        return self.o_proj(attend(q, k, v).reshape(x.shape[0], -1))

    def _keys(self, words: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `[n, Hq, D]` and values `[n, Hq, Dv]`."""
        s = self.shape
        latent, rotated = self.kv_a_proj_with_mqa(x, words).split((s.kv_lora_rank, s.qk_rope_head_dim), dim=-1)
        rotated = rotate_pairs(rotated[:, None], cos, sin)  # [n, 1, R]
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).view(x.shape[0], s.num_attention_heads, -1)
        k, v = both.split((s.qk_nope_head_dim, s.v_head_dim), dim=-1)
        return torch.cat((k, rotated.expand(-1, s.num_attention_heads, -1)), dim=-1), v


class Eagle3MlaDraft(Eagle3Draft):
    """The draft with latent attention; everything around its attention is `Eagle3Draft`'s."""

    kind: ClassVar[str] = "mla"
    layer_name: ClassVar[str] = "layers.0"

    def _add_layer(self, shape: DraftShape) -> None:
        self.layers = nn.ModuleList([DraftLayer(shape, LatentAttention(shape))])

    @property
    def midlayer(self) -> DraftLayer:  # type: ignore[override]
        """The one layer, under the name it has in the other kind of draft."""
        layer = self.layers[0]
        assert isinstance(layer, DraftLayer)
        return layer

    def _frequencies(self, shape: DraftShape) -> tuple[Tensor, float]:
        theta, scaling = shape.rope["rope_theta"], shape.rope["rope_scaling"]
        return latent_frequencies(shape.rotary_dim, theta, scaling, shape.max_position_embeddings)

    def _over_head(self, angle: Tensor) -> Tensor:
        return angle.repeat_interleave(2, dim=-1)

    @property
    def score_scale(self) -> float:
        """Factor on the attention's scores, yarn's share included."""
        return self.shape.head_dim**-0.5 * latent_score_factor(self.shape.rope["rope_scaling"])
