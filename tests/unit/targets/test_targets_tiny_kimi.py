"""The tiny Kimi: loads everywhere, has learnt its corpus, and its sites differ where a wiring would be off by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.targets import tiny_kimi
from data_prep.targets.folder import is_built
from eagle3.target_weights import TargetWeights, rope_parameters


@pytest.fixture(scope="module")
def loaded(tiny_kimi_path: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_kimi_path, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(tiny_kimi_path, local_files_only=True)


def test_shape_and_engine_keys(tiny_kimi_path: Path) -> None:
    weights = TargetWeights(tiny_kimi_path)
    assert (weights.model_type, weights.num_layers, weights.hidden_size) == ("deepseek_v3", 61, 64)
    assert weights.vocab_size == tiny_kimi.VOCAB
    config = json.loads((tiny_kimi_path / "config.json").read_text())
    for key, value in tiny_kimi.ENGINE_KEYS.items():
        assert config[key] == value
    assert config["first_k_dense_replace"] == 1 and config["tie_word_embeddings"] is False
    rope = rope_parameters(config)
    assert rope["rope_theta"] == 50000.0 and rope["rope_scaling"]["rope_type"] == "yarn"
    assert config["rope_scaling"] == rope["rope_scaling"]


def test_loads_whole_and_reads_the_same_tensors(tiny_kimi_path: Path, loaded: tuple[Any, Any]) -> None:
    from transformers import DeepseekV3ForCausalLM

    _, info = DeepseekV3ForCausalLM.from_pretrained(tiny_kimi_path, local_files_only=True, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    model, weights = loaded[0], TargetWeights(tiny_kimi_path)
    assert torch.equal(weights.embedding(), model.model.embed_tokens.weight)
    assert torch.equal(weights.final_norm(), model.model.norm.weight)
    assert torch.equal(weights.head(), model.lm_head.weight)


def test_weights_hold_bf16_values(loaded: tuple[Any, Any]) -> None:
    for name, weight in loaded[0].named_parameters():
        assert weight.dtype == torch.float32 and torch.equal(weight, weight.bfloat16().float()), name


def test_training_helped_and_answers_make_sense(tiny_kimi_path: Path, loaded: tuple[Any, Any]) -> None:
    losses = json.loads((tiny_kimi_path / "training.json").read_text())
    assert losses["loss_before"] > 6.0  # near ln(1024) = 6.9
    assert losses["loss_after"] < 1.0
    model, tokenizer = loaded
    prompt = [{"role": "user", "content": "What is the opposite of hot?"}]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, return_tensors="pt")
    out = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    text = tokenizer.decode(out)
    assert text.startswith("</think>The opposite of") and text.endswith(".<|im_end|>"), text


def test_neighbouring_sites_differ_at_the_wired_layers(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    prompt = [{"role": "user", "content": "Tell me about the otter."}]
    ids = tokenizer.apply_chat_template(prompt, return_dict=False, return_tensors="pt")
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    for site in (2, 30, 58):
        change = (states[site + 1] - states[site]).norm() / states[site].norm()
        assert change > 0.03, (site, float(change))


def test_made_once_for_one_recipe(tiny_kimi_path: Path) -> None:
    stamp = (tiny_kimi_path / "model.safetensors").stat().st_mtime_ns
    assert tiny_kimi.make_tiny_kimi(tiny_kimi_path) == tiny_kimi_path
    assert (tiny_kimi_path / "model.safetensors").stat().st_mtime_ns == stamp
    assert not is_built(tiny_kimi_path, tiny_kimi.recipe(tiny_kimi.STEPS + 1, 0))


def test_short_training_is_deterministic(tmp_path: Path) -> None:
    one, two = (tiny_kimi.make_tiny_kimi(tmp_path / name, steps=2) for name in ("one", "two"))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert (one / "training.json").read_bytes() == (two / "training.json").read_bytes()
