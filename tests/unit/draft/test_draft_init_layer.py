"""Starting the draft's layer from the target's last one: whole, its MLP, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3.config import DraftConfig
from eagle3.draft import DraftCache
from eagle3.draft_init import fresh_draft
from eagle3.draft_shape import DraftShape
from eagle3.errors import ConfigError, IntegrityError
from eagle3.target_weights import TargetWeights
from eagle3.vocab import build_draft_vocab

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 40,
}


@pytest.fixture
def target(tmp_path: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=3, rms_norm_eps=1e-5, rope_theta=500.0, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms too: a copy that is left out must show
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "target")
    return model


def shape(**changes: int) -> DraftShape:
    rest = {"draft_vocab_size": 17, "num_aux": 3, "rms_norm_eps": 1e-5, "rope": {"rope_theta": 500.0}}
    return DraftShape(**{**SIZES, **rest, "max_position_embeddings": 64, **changes})


def start(layer: dict[str, Tensor], init_layer: str, sizes: DraftShape | None = None):
    config = DraftConfig(vocab_size=17, init_fc="last", init_layer=init_layer)
    ends = {"embedding": torch.randn(40, 16), "head": torch.randn(40, 16), "final_norm": torch.rand(16)}
    return fresh_draft(sizes or shape(), build_draft_vocab(torch.arange(40), 17), config, **ends, seed=3, layer=layer)


def test_the_draft_begins_as_the_targets_last_layer(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """Fed what enters the last layer, it gives what leaves it: same attention, same rotation, same MLP."""
    draft = start(TargetWeights(tmp_path / "target").last_layer(), "target")
    states = torch.randn(7, 16)
    with torch.no_grad():
        positions = torch.arange(7)
        mask = torch.full((7, 7), float("-inf")).triu(1)[None, None]
        rotary = target.model.rotary_emb(states[None], positions[None])
        expected = target.model.layers[2](states[None], attention_mask=mask, position_embeddings=rotary)
        expected = expected[0] if isinstance(expected, tuple) else expected
        features = torch.cat((torch.randn(7, 32), states), dim=-1)
        tokens = torch.randint(0, 40, (7,))
        found = draft.serve_step(draft.fuse(features), tokens, positions, DraftCache())
    torch.testing.assert_close(found, expected.reshape(7, 16), rtol=1e-5, atol=1e-5)


def test_the_mlp_alone_leaves_attention_silent(target: LlamaForCausalLM, tmp_path: Path) -> None:
    layer = TargetWeights(tmp_path / "target").last_layer()
    draft = start(layer, "target_mlp")
    assert not draft.midlayer.self_attn.o_proj.weight.any()
    assert torch.equal(draft.midlayer.mlp.up_proj.weight, layer["mlp.up_proj.weight"])
    states = torch.randn(5, 16)
    with torch.no_grad():
        last = target.model.layers[2]
        expected = states + last.mlp(last.post_attention_layernorm(states))
        features = torch.cat((torch.zeros(5, 32), states), dim=-1)
        found = draft.serve_step(draft.fuse(features), torch.arange(5), torch.arange(5), DraftCache())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_other_sizes_and_other_layers_are_refused(target: LlamaForCausalLM, tmp_path: Path) -> None:
    layer = TargetWeights(tmp_path / "target").last_layer()
    with pytest.raises(ConfigError, match=r"mlp\.gate_proj"):
        start(layer, "target_mlp", shape(intermediate_size=32))
    with pytest.raises(ConfigError, match=r"self_attn\.q_proj"):
        start(layer, "target", shape(num_attention_heads=8))
    latent = {name: value for name, value in layer.items() if "q_proj" not in name}
    with pytest.raises(ConfigError, match="not a plain Llama layer"):
        start(latent, "target")
    with pytest.raises(ConfigError, match=r"draft\.init_layer"):
        DraftConfig(init_layer="first").validate()
    with pytest.raises(ConfigError, match=r"draft\.init_layer"):
        DraftConfig(kind="mla", init_layer="target").validate()


def test_only_the_last_layers_float_tensors_are_read(target: LlamaForCausalLM, tmp_path: Path) -> None:
    weights = TargetWeights(tmp_path / "target")
    layer, last = weights.last_layer(), target.model.layers[2].state_dict()
    assert layer.keys() == last.keys() and all(torch.equal(layer[name], last[name]) for name in last)
    stored = load_file(tmp_path / "target" / "model.safetensors")
    packed = {"model.layers.2.mlp.up_proj.weight_packed": torch.ones(4, 4, dtype=torch.int32)}
    save_file({**stored, **packed}, tmp_path / "target" / "model.safetensors")
    again = TargetWeights(tmp_path / "target")
    assert set(packed) <= again.files.names and again.last_layer().keys() == last.keys()
    weights.is_gguf = True
    with pytest.raises(IntegrityError, match="GGUF"):
        weights.last_layer()
