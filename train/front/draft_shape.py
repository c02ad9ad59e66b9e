"""The draft's shape: what the config sets, and the rest as the target has it."""

from __future__ import annotations

from typing import Any

from eagle3.draft import DraftShape
from eagle3.target_weights import TargetWeights, rope_parameters
from train.front.config import RedraftConfig


def shape_from(config: RedraftConfig, text: dict[str, Any], rope: dict[str, Any], eps: float) -> DraftShape:
    """Combine the draft's settings with the target's text config."""
    heads = (
        config.draft.num_attention_heads or text.get("num_attention_heads") or max(config.target.hidden_size // 64, 1)
    )
    return DraftShape(
        hidden_size=config.target.hidden_size,
        intermediate_size=config.draft.intermediate_size
        or text.get("intermediate_size")
        or 4 * config.target.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=config.draft.num_key_value_heads or text.get("num_key_value_heads") or heads,
        head_dim=config.draft.head_dim or text.get("head_dim") or max(config.target.hidden_size // heads, 2),
        vocab_size=config.target.vocab_size,
        draft_vocab_size=config.draft.vocab_size,
        num_aux=len(config.build_wiring().aux),
        rms_norm_eps=eps,
        rope=rope,
        max_position_embeddings=int(text.get("max_position_embeddings", 2048)),
    )


def declared_shape(config: RedraftConfig) -> DraftShape:
    """The shape without a target at hand: what the preset declares."""
    return shape_from(config, {}, {"rope_theta": 10000.0, "rope_scaling": None}, 1e-6)


def target_shape(config: RedraftConfig, weights: TargetWeights) -> DraftShape:
    """The shape for a target that is here: rope, eps and sizes come from its config."""
    return shape_from(config, weights.text_config, rope_parameters(weights.text_config), weights.rms_norm_eps)
