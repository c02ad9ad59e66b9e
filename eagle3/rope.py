"""Rotary position embedding of the draft: one place for its frequencies, in float32 whatever the model's dtype.

Two conventions, those of SGLang, vLLM and transformers: a Llama draft pairs the first half of a head with the second
(`rotate`), a latent-attention draft pairs neighbours (`rotate_pairs`). Scaled frequencies come from transformers'
`ROPE_INIT_FUNCTIONS`.
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


def latent_scaling(rope_scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """The scaling entry of a latent-attention draft, every key of yarn written out, or None.

    Engines take any scaling of such a draft for DeepSeek's yarn (SGLang 0.5.23 and vLLM 0.32.0, deepseek_v2.py), whose
    defaults are not those of other readers; with every key in the file nothing is left to a default.

    Raises:
        ConfigError: another scaling than yarn, a missing key, or an option that DeepSeek's yarn lacks.
    """
    if not rope_scaling:
        return None
    kind = rope_scaling.get("rope_type", rope_scaling.get("type", "default"))
    if kind == "default":
        return None
    lacking = [key for key in _REQUIRED["yarn"] if rope_scaling.get(key) is None]
    if kind not in ("yarn", "deepseek_yarn") or lacking:
        raise _not_latent(f"{kind} lacks {', '.join(lacking)}" if lacking else f"found {kind!r}")
    kept = {
        "factor": float(rope_scaling["factor"]),
        "original_max_position_embeddings": int(rope_scaling["original_max_position_embeddings"]),
        "beta_fast": float(rope_scaling.get("beta_fast") or 32.0),
        "beta_slow": float(rope_scaling.get("beta_slow") or 1.0),
        "mscale": _given(rope_scaling, "mscale", 1.0),
        "mscale_all_dim": _given(rope_scaling, "mscale_all_dim", 0.0),
    }
    own = _latent_factor(kept)
    if rope_scaling.get("truncate") is False:
        raise _not_latent("truncate is false, and engines round yarn's bounds to whole dimensions")
    if not math.isclose(_given(rope_scaling, "attention_factor", own), own, rel_tol=1e-6):
        raise _not_latent(f"attention_factor is {rope_scaling['attention_factor']}, engines take {own:.6g}")
    if _given(rope_scaling, "attn_factor", 1.0) != 1.0:
        raise _not_latent(f"attn_factor is {rope_scaling['attn_factor']}")
    return {"rope_type": "yarn", "type": "yarn", **kept}


def _not_latent(why: str) -> ConfigError:
    return ConfigError(
        "rope scaling that a latent-attention draft cannot have",
        where="rope_scaling",
        why=f"{why}; engines compute DeepSeek's yarn there",
        mend="copy the scaling of a target with latent attention, or set draft.kind=llama",
    )


def latent_score_factor(rope_scaling: dict[str, Any] | None) -> float:
    """What DeepSeek's yarn multiplies onto `head_dim ** -0.5`: `(0.1 mscale_all_dim ln(factor) + 1) ** 2`, or 1."""
    if rope_scaling is None:
        return 1.0
    return _yarn_mscale(rope_scaling["factor"], rope_scaling["mscale_all_dim"]) ** 2


def latent_frequencies(
    rotary_dim: int, rope_theta: float, rope_scaling: dict[str, Any] | None, max_position_embeddings: int
) -> tuple[Tensor, float]:
    """`inverse_frequencies` of a latent-attention draft; the scaling is one that `latent_scaling` returned."""
    if rope_scaling is None:
        return inverse_frequencies(rotary_dim, rope_theta, None, max_position_embeddings)
    plain = {k: v for k, v in rope_scaling.items() if not k.startswith("mscale")}
    plain["attention_factor"] = _latent_factor(rope_scaling)
    return inverse_frequencies(rotary_dim, rope_theta, plain, max_position_embeddings)


def _given(entry: dict[str, Any], key: str, default: float) -> float:
    return default if entry.get(key) is None else float(entry[key])


def _yarn_mscale(factor: float, weight: float) -> float:
    """`0.1 weight ln(factor) + 1`, as DeepSeek's own model code has it; 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _latent_factor(scaling: dict[str, Any]) -> float:
    """DeepSeek yarn's factor on cos and sin."""
    over, under = (_yarn_mscale(scaling["factor"], scaling[key]) for key in ("mscale", "mscale_all_dim"))
    return over / under


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

    parameters = {k: v for k, v in scaling.items() if k not in ("type", "attn_factor")} | {
        "rope_theta": float(rope_theta)
    }
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


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring dimensions: `x [n, heads, D]`; `cos`, `sin [n, 1, D]` hold each angle twice in a row."""
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)  # [n, heads, D]
    return x * cos + turned * sin
