"""The draft's shape: what the config sets, and the rest as the target has it."""

from __future__ import annotations

from typing import Any

from eagle3.draft_shape import LATENT_SIZES, DraftShape
from eagle3.errors import ConfigError
from eagle3.target_weights import TargetWeights, rope_parameters
from train.front.config import RedraftConfig


def shape_from(config: RedraftConfig, text: dict[str, Any], rope: dict[str, Any], eps: float) -> DraftShape:
    """Combine the draft's settings with the target's text config.

    Raises:
        ConfigError: a size is nowhere given, or does not fit the others.
    """
    draft, hidden = config.draft, config.target.hidden_size
    heads = draft.num_attention_heads or text.get("num_attention_heads") or max(hidden // 64, 1)
    return DraftShape(
        hidden_size=hidden,
        intermediate_size=draft.intermediate_size or text.get("intermediate_size") or 4 * hidden,
        num_attention_heads=heads,
        **(_latent_sizes(config, text, heads) if draft.kind == "mla" else _head_sizes(config, text, heads)),
        vocab_size=config.target.vocab_size,
        draft_vocab_size=draft.vocab_size,
        num_aux=len(config.build_wiring().aux),
        rms_norm_eps=eps,
        rope=rope,
        max_position_embeddings=int(text.get("max_position_embeddings", 2048)),
        kind=draft.kind,
        fc_norm=draft.fc_norm,
        norm_before_fc=draft.norm_before_fc,
        norm_output=draft.norm_output,
    )


def declared_shape(config: RedraftConfig) -> DraftShape:
    """The shape without a target at hand: what the preset declares."""
    return shape_from(config, {}, {"rope_theta": 10000.0, "rope_scaling": None}, 1e-6)


def target_shape(config: RedraftConfig, weights: TargetWeights) -> DraftShape:
    """The shape for a target that is here: rope, eps and sizes come from its config."""
    return shape_from(config, weights.text_config, rope_parameters(weights.text_config), weights.rms_norm_eps)


def _head_sizes(config: RedraftConfig, text: dict[str, Any], heads: int) -> dict[str, Any]:
    draft = config.draft
    return {
        "num_key_value_heads": draft.num_key_value_heads or text.get("num_key_value_heads") or heads,
        "head_dim": draft.head_dim or text.get("head_dim") or max(config.target.hidden_size // heads, 2),
    }


def _latent_sizes(config: RedraftConfig, text: dict[str, Any], heads: int) -> dict[str, Any]:
    sizes = {name: getattr(config.draft, name) or text.get(name) or 0 for name in LATENT_SIZES}
    missing = [name for name, size in sizes.items() if not size]
    if missing:
        raise ConfigError(
            "latent attention without its sizes",
            where="draft.kind=mla",
            why=f"neither the configuration nor the target's config.json gives {', '.join(missing)}",
            mend=f"set {' '.join(f'draft.{name}=' for name in missing)}, or take draft.kind=llama",
        )
    return {**sizes, "num_key_value_heads": heads, "head_dim": sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]}
