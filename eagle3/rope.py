"""Rotary position embedding of the draft: one place for its frequencies, in float32 whatever the model's dtype.

The convention is Llama's (first half / second half of a head are the pair), as in SGLang, vLLM and transformers.
Scaled frequencies come from transformers' `ROPE_INIT_FUNCTIONS`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import ConfigError

_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {"linear": (), "llama3": (), "yarn": ("beta_fast", "beta_slow", "truncate")}


def served_scaling(rope_scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """The scaling entry that the draft is trained and served with, or None for plain rotary embedding.

    `type` and `rope_type` are both written, because engines read either. Only keys that everybody reads alike are
    kept. Yarn's `mscale` and `mscale_all_dim`, which latent-attention targets carry, are read by transformers and
    by some engine builds only; with them in the file, training and serving would disagree. They are replaced by
    the factor on cos and sin that they stand for: `attention_factor`, which transformers reads, and `attn_factor`,
    which engines multiply onto yarn's own `0.1 ln(factor) + 1` (Peng et al. 2023).

    Raises:
        ConfigError: a scaling that depends on the length of the sequence, an unknown one, or a missing key.
    """
    if not rope_scaling:
        return None
    kind = rope_scaling.get("rope_type", rope_scaling.get("type", "default"))
    if kind == "deepseek_yarn":
        kind = "yarn"
    if kind == "default":
        return None
    if kind not in _REQUIRED:
        raise ConfigError(
            "rope scaling that the draft cannot copy",
            where="rope_scaling.rope_type",
            why=f"found {kind!r}, known are {', '.join(_REQUIRED)}",
            mend="give the draft one of these scalings",
        )
    missing = [key for key in _REQUIRED[kind] if rope_scaling.get(key) is None]
    if missing:
        why = f"{kind} lacks {', '.join(missing)}"
        raise ConfigError("incomplete rope scaling", where="rope_scaling", why=why, mend="copy the target's whole")
    kept = {key: rope_scaling[key] for key in (*_REQUIRED[kind], *_OPTIONAL[kind]) if rope_scaling.get(key) is not None}
    if kind == "yarn":
        kept |= _yarn_factors(rope_scaling)
    return {"rope_type": kind, "type": kind, **kept}


def _yarn_factors(rope_scaling: dict[str, Any]) -> dict[str, float]:
    """The keys that make everybody multiply cos and sin alike; none when that is yarn's own factor."""
    log = math.log(max(float(rope_scaling["factor"]), 1.0))
    own = 0.1 * log + 1.0
    mscale, all_dim = rope_scaling.get("mscale"), rope_scaling.get("mscale_all_dim")
    if rope_scaling.get("attention_factor") is not None:
        total = float(rope_scaling["attention_factor"])
    elif mscale and all_dim:
        total = (0.1 * mscale * log + 1.0) / (0.1 * all_dim * log + 1.0)
    else:
        total = own * float(rope_scaling.get("attn_factor", 1.0))
    return {} if math.isclose(total, own) else {"attention_factor": total, "attn_factor": total / own}


def inverse_frequencies(
    head_dim: int, rope_theta: float, rope_scaling: dict[str, Any] | None, max_position_embeddings: int
) -> tuple[Tensor, float]:
    """Return `(inv_freq [head_dim / 2] float32, factor on cos and sin)`.

    Raises:
        ConfigError: an unknown scaling, or one whose keys are missing.
    """
    scaling = served_scaling(rope_scaling)
    if scaling is None:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
        return 1.0 / (float(rope_theta) ** exponent), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {k: v for k, v in scaling.items() if k != "type"} | {"rope_theta": float(rope_theta)}
    config = LlamaConfig(
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=max_position_embeddings,
        rope_parameters=parameters,
    )
    with torch.device("cpu"):
        inv_freq, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    return inv_freq.float(), float(factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads: `x [n, heads, D]` by `cos`, `sin [n, 1, D]` of the rows' positions."""
    first, second = x.chunk(2, dim=-1)  # [n, heads, D/2] each
    return x * cos + torch.cat((-second, first), dim=-1) * sin
