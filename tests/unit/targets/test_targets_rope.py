"""What a draft copies from its target about positions: every spelling, nothing lost, the same angles far out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.checkpoint import save_served
from eagle3.draft import Eagle3Draft
from eagle3.draft_build import build_draft
from eagle3.draft_shape import DraftShape
from eagle3.target_weights import rope_parameters, text_config_of
from eagle3.vocab import build_draft_vocab
from eagle3.wiring import Site, Wiring

YARN = {
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 0.9,
    "mscale_all_dim": 0.6,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SIZES = {"max_position_embeddings": 262144, "rms_norm_eps": 3e-6}
OLD = {"rope_theta": 50000.0, "rope_scaling": {"type": "yarn", **YARN}}
NEW = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, **YARN}}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def draft_for(text: dict[str, Any], kind: str) -> Eagle3Draft:
    """A draft that copies the target's positions and epsilon."""
    rope = rope_parameters(text)
    sizes = {"head_dim": 24, **LATENT} if kind == "mla" else {"head_dim": 32}
    plain = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 20, "draft_vocab_size": 20, "num_aux": 3}
    shape = DraftShape(
        **{**plain, **HEADS, **sizes},
        kind=kind,
        rms_norm_eps=rope["rms_norm_eps"],
        rope=rope,
        max_position_embeddings=rope["max_position_embeddings"],
    )
    return build_draft(shape)


def engine_table(config: dict[str, Any], width: int, position: int) -> tuple[Tensor, Tensor]:
    """cos and sin `[width / 2]` as an engine computes them from a draft's config.json, with yarn written out once more.

    SGLang 0.5.23, rotary_embedding/yarn.py and rope_variant.py: a latent draft's factor is the quotient of the two
    mscales, another's is `0.1 ln(factor) + 1`, each times `attn_factor`; the ramp runs between whole dimensions.
    """
    base, entry = config["rope_theta"], config["rope_scaling"]

    def dimension(turns: float) -> float:
        return width * math.log(entry["original_max_position_embeddings"] / (turns * 2 * math.pi)) / 2 / math.log(base)

    low, high = math.floor(dimension(entry["beta_fast"])), math.ceil(dimension(entry["beta_slow"]))
    ramp = ((torch.arange(width // 2) - max(low, 0)) / (min(high, width - 1) - max(low, 0))).clamp(0, 1)
    plain = base ** -(torch.arange(0, width, 2) / width)
    angle = position * (plain / entry["factor"] * ramp + plain * (1 - ramp))

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(entry["factor"]) + 1.0

    latent = "kv_lora_rank" in config
    factor = mscale(entry["mscale"]) / mscale(entry["mscale_all_dim"]) if latent else mscale(1.0)
    factor *= entry.get("attn_factor", 1.0)
    return angle.cos() * factor, angle.sin() * factor


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("spelling", [OLD, NEW, {**OLD, **NEW}], ids=["old", "new", "both"])
def test_every_spelling_keeps_every_key(spelling: dict[str, Any], nested: bool) -> None:
    text = {**SIZES, **spelling}
    found = rope_parameters(text_config_of({"model_type": "wrapper", "text_config": text} if nested else text))
    scaling = found.pop("rope_scaling")
    assert found == {"rope_theta": 50000.0, **SIZES}
    assert scaling == {"rope_type": "yarn", "type": "yarn", **YARN}


def test_an_entry_for_each_attention_type_gives_that_of_full_attention() -> None:
    both = {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}, "sliding_attention": {}}
    found = rope_parameters({**SIZES, "rope_parameters": both})
    assert found["rope_theta"] == 1e6 and found["rope_scaling"]["factor"] == 4.0


def test_no_scaling_is_no_scaling() -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    assert rope_parameters({"rope_parameters": plain})["rope_scaling"] is None
    assert rope_parameters({"rope_theta": 1e4, "rope_scaling": None})["rope_scaling"] is None


@pytest.mark.parametrize("spelling", [OLD, NEW], ids=["old", "new"])
def test_a_latent_draft_turns_as_its_target_does(tmp_path: Path, spelling: dict[str, Any]) -> None:
    """Position 8192: the target in transformers, the draft, and an engine that reads the folder written for it."""
    text = {"model_type": "deepseek_v3", **HEADS, **LATENT, **SIZES, **spelling, "hidden_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(text))
    rotary = DeepseekV3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    draft = draft_for(text, "mla")
    torch.testing.assert_close(draft._inv_freq, rotary.inv_freq, rtol=1e-6, atol=0)
    ours = [x[0, 0, ::2] for x in draft.rope(torch.tensor([8192]), torch.float32)]
    theirs = [x[0, 0, :8] for x in rotary(torch.zeros(1), torch.tensor([[8192]]))]
    engines = engine_table(written(draft, tmp_path), 16, 8192)
    for mine, target, engine in zip(ours, theirs, engines, strict=True):
        torch.testing.assert_close(mine, target, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine, engine, rtol=1e-3, atol=1e-3)  # float32 angles of thousands


def test_a_llama_draft_of_a_latent_target_turns_as_the_engine_does(tmp_path: Path) -> None:
    """The target's frequencies over a width of its own; the mscales are in the file as the factor they stand for."""
    draft = draft_for({**SIZES, **OLD}, "llama")
    config = written(draft, tmp_path)
    assert "mscale" not in config["rope_scaling"] and config["rms_norm_eps"] == 3e-6
    ours = [x[0, 0, :16] for x in draft.rope(torch.tensor([8192]), torch.float32)]
    for mine, engine in zip(ours, engine_table(config, 32, 8192), strict=True):
        torch.testing.assert_close(mine, engine, rtol=1e-3, atol=1e-3)


def test_a_llama_target_and_its_draft_turn_alike(tmp_path: Path) -> None:
    text = {"model_type": "llama", **HEADS, "hidden_size": 64, "head_dim": 32, **SIZES}
    text["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}
    (tmp_path / "config.json").write_text(json.dumps(text))
    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    draft = draft_for(text, "llama")
    torch.testing.assert_close(draft._inv_freq, rotary.inv_freq, rtol=1e-6, atol=0)
    for mine, theirs in zip(
        draft.rope(torch.tensor([8192]), torch.float32), rotary(torch.zeros(1), torch.tensor([[8192]])), strict=True
    ):
        torch.testing.assert_close(mine[0], theirs[0], rtol=1e-5, atol=1e-5)


def written(draft: Eagle3Draft, folder: Path) -> dict[str, Any]:
    """The config.json of a folder saved for that draft."""
    wiring = Wiring((Site(2), Site(5), Site(9)), "final", "llama", 12, 16)
    vocab = build_draft_vocab(torch.ones(20), 20)
    save_served(folder / "served", draft, wiring, target={}, convention_name="sglang-0.5.23", vocab=vocab)
    return json.loads((folder / "served" / "config.json").read_text())
