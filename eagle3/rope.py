"""Rotary position embedding of the draft: one place for its frequencies, in float32 whatever the model's dtype.

The convention is Llama's (first half / second half of a head are the pair), as in SGLang, vLLM and transformers.
Scaled frequencies come from transformers' `ROPE_INIT_FUNCTIONS`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3.errors import ConfigError

SCALINGS = ("default", "linear", "llama3", "yarn")
_IGNORED_BY_ENGINES = ("mscale", "mscale_all_dim")


def served_scaling(rope_scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """The scaling entry that the draft is trained and served with, or None for plain rotary embedding.

    `type` and `rope_type` are both written, because engines read either. `mscale` and `mscale_all_dim` are dropped:
    an engine's Llama draft applies yarn's own attention factor `0.1 ln(factor) + 1` and ignores the two, while
    transformers would divide by them, so with them inside the file training and serving would disagree.

    Raises:
        ConfigError: a scaling that depends on the length of the sequence, or an unknown one.
    """
    if not rope_scaling:
        return None
    kind = rope_scaling.get("rope_type", rope_scaling.get("type", "default"))
    if kind == "deepseek_yarn":
        kind = "yarn"
    if kind not in SCALINGS:
        raise ConfigError(
            "rope scaling that the draft cannot copy",
            where="rope_scaling.rope_type",
            why=f"found {kind!r}, known are {', '.join(SCALINGS)}",
            mend="give the draft one of these scalings",
        )
    if kind == "default":
        return None
    kept = {k: v for k, v in rope_scaling.items() if k not in (*_IGNORED_BY_ENGINES, "rope_theta", "type", "rope_type")}
    return {"rope_type": kind, "type": kind, **kept}


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
    try:
        config = LlamaConfig(
            head_dim=head_dim,
            hidden_size=head_dim,
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=max_position_embeddings,
            rope_parameters=parameters,
        )
        inv_freq, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    except (KeyError, TypeError, ValueError) as err:
        raise ConfigError(
            "incomplete rope scaling", where="rope_scaling", why=str(err), mend="copy the target's rope_scaling whole"
        ) from None
    return inv_freq.float(), float(factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads: `x [n, heads, D]` by `cos`, `sin [n, 1, D]` of the rows' positions."""
    first, second = x.chunk(2, dim=-1)  # [n, heads, D/2] each
    return x * cos + torch.cat((-second, first), dim=-1) * sin
