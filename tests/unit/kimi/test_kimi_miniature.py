"""The miniature of Kimi-K2.5: laid out as the real checkpoint, loaded strictly, and it speaks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kimi import int4, layout, make_miniature
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data_prep.capture.hf import HFCapture
from eagle3.errors import IntegrityError
from eagle3.hf_model import load_target
from eagle3.packed_experts import PackedInt4, dequantize_int4, packed_scheme, unpack_int4
from eagle3.target_weights import TargetWeights, rope_parameters
from eagle3.wiring import Site, Wiring

GATE = "language_model.model.layers.31.mlp.experts.2.gate_proj"


@pytest.fixture(scope="module")
def model(kimi_mini_path: Path) -> nn.Module:
    return load_target(kimi_mini_path, "cpu", torch.float32, with_head=True)


@pytest.fixture(scope="module")
def tokenizer(kimi_mini_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(kimi_mini_path, trust_remote_code=True)


def stored(folder: Path, name: str) -> Tensor:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(folder / index[name], framework="pt") as handle:
        return handle.get_tensor(name)


def test_names_dtypes_and_shards_are_the_real_checkpoints(kimi_mini_path: Path) -> None:
    index = json.loads((kimi_mini_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 3
    for name, dtype in {
        "language_model.model.embed_tokens.weight": torch.bfloat16,
        "language_model.lm_head.weight": torch.bfloat16,
        "language_model.model.layers.60.mlp.gate.e_score_correction_bias": torch.float32,
        f"{GATE}.weight_packed": torch.int32,
        f"{GATE}.weight_scale": torch.bfloat16,
        f"{GATE}.weight_shape": torch.int32,
        "language_model.model.layers.0.mlp.gate_proj.weight": torch.bfloat16,
        "language_model.model.layers.7.mlp.shared_experts.down_proj.weight": torch.bfloat16,
        "vision_tower.encoder.blocks.0.wqkv.weight": torch.bfloat16,
        "mm_projector.proj.2.weight": torch.bfloat16,
    }.items():
        assert stored(kimi_mini_path, name).dtype == dtype, name
    assert f"{GATE}.weight" not in index and "language_model.model.layers.0.mlp.gate.weight" not in index
    config = json.loads((kimi_mini_path / "config.json").read_text())
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"] and config["model_type"] == "kimi_k25"
    assert config["text_config"]["quantization_config"] == layout.QUANTIZATION and "quantization_config" not in config
    rope = rope_parameters(config["text_config"])
    assert rope["rope_theta"] == 50000.0 and rope["rope_scaling"]["factor"] == 64.0


def test_target_weights_read_the_nested_layout(kimi_mini_path: Path, model: Any) -> None:
    weights = TargetWeights(kimi_mini_path)
    identity = weights.identity()
    assert (identity.model_type, identity.num_layers, identity.hidden_size) == ("kimi_k25", 61, 64)
    assert (weights.text_model_type, weights.tied) == ("deepseek_v3", False)
    assert identity.quantization == "compressed-tensors int4 group 32"
    assert torch.equal(weights.embedding().float(), model.model.embed_tokens.weight)
    assert torch.equal(weights.final_norm().float(), model.model.norm.weight)
    assert torch.equal(weights.head().float(), model.lm_head.weight)
    assert not torch.equal(weights.head(), weights.embedding())


def by_bits(packed: Tensor, scale: Tensor, columns: int) -> Tensor:
    """The weight, value by value, from the bits of each word as text."""
    rows = []
    for words, factors in zip(packed.tolist(), scale.float().tolist(), strict=True):
        bits = "".join(f"{word & 0xFFFFFFFF:032b}"[::-1] for word in words)  # the first bit is the lowest one
        values = [int(bits[4 * k : 4 * k + 4][::-1], 2) - 8 for k in range(columns)]
        rows.append([value * factors[k // 32] for k, value in enumerate(values)])
    return torch.tensor(rows)


def test_packed_experts_are_what_their_bits_say(kimi_mini_path: Path, model: Any) -> None:
    experts = model.model.layers[31].mlp.experts
    found = {
        "gate_proj": experts.gate_up_proj[2, :32],
        "up_proj": experts.gate_up_proj[2, 32:],
        "down_proj": experts.down_proj[2],
    }
    for part, weight in found.items():
        stem = GATE.replace("gate_proj", part)
        packed, scale = stored(kimi_mini_path, f"{stem}.weight_packed"), stored(kimi_mini_path, f"{stem}.weight_scale")
        assert tuple(stored(kimi_mini_path, f"{stem}.weight_shape").tolist()) == tuple(weight.shape)
        assert torch.equal(weight, by_bits(packed, scale, weight.shape[1])), part


def test_unpacking_takes_every_value_and_no_padding() -> None:
    values = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)[:, :27]
    padded = nn.functional.pad(values, (0, 5))
    assert torch.equal(unpack_int4(int4.pack(padded), 27), values)
    scale = torch.rand(3, 1).bfloat16()
    weight = dequantize_int4(int4.pack(padded), scale, (3, 27), PackedInt4(32), "here")
    assert torch.equal(weight, by_bits(int4.pack(padded), scale, 27))
    with pytest.raises(IntegrityError, match=r"does not fit together \[here\]"):
        dequantize_int4(int4.pack(padded), scale, (3, 40), PackedInt4(32), "here")


def test_unpacking_is_the_reference_librarys() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    values = torch.randint(-8, 8, (48, 96), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    packed = helpers.pack_to_int32(values, 4)
    assert torch.equal(packed, int4.pack(values)) and torch.equal(unpack_int4(packed, 96), values)


def test_it_speaks_with_a_thought_and_without(model: Any, tokenizer: Any, kimi_mini_path: Path) -> None:
    losses = json.loads((kimi_mini_path / "training.json").read_text())
    assert losses["loss_before"] > 6.0 and losses["loss_after"] < 1.0
    prompt = [{"role": "user", "content": "What is the opposite of hot?"}]
    for thinking in (False, True):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, thinking=thinking)
        ids = torch.tensor([tokenizer.encode(text)])
        stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
        out = model.generate(ids, max_new_tokens=80, do_sample=False, eos_token_id=stop)[0, ids.shape[1] :]
        answer = tokenizer.decode(out.tolist())
        assert answer.endswith(".<|im_end|>") and "The opposite of" in answer, answer
        assert ("</think>" in answer) == thinking and answer.startswith("The user says: What is") == thinking, answer


def test_neighbouring_sites_differ_where_a_wiring_would_be_off_by_one(model: Any, tokenizer: Any) -> None:
    ids = torch.tensor([tokenizer.encode("<|im_user|>user<|im_middle|>Who is the potter?<|im_end|>")])
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    for site in (2, 30, 58):
        assert (states[site + 1] - states[site]).norm() / states[site].norm() > 0.03, site


def test_capture_gives_the_models_own_states(kimi_mini_path: Path, model: Any, tokenizer: Any) -> None:
    wiring = Wiring((Site(3), Site(31), Site(59)), "final", "kimi_k25", 61, 64)
    capture = HFCapture(kimi_mini_path, wiring, device="cpu", compute_dtype="float32", out_dtype=torch.float32)
    tokens = tokenizer.encode("<|im_user|>user<|im_middle|>Who is the potter?<|im_end|>")
    (one,) = capture.run([("r", tokens, [0] * len(tokens))])
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        normed = model.model.norm(one.final)
    for site in wiring.aux:
        torch.testing.assert_close(one.sites[site.name], states[site.layer][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(normed, states[61][0], atol=1e-5, rtol=1e-5)


def test_the_end_of_a_turn_comes_from_generation_config(model: Any, tokenizer: Any) -> None:
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.config.eos_token_id == tokenizer.convert_tokens_to_ids("[EOS]")


def test_bfloat16_keeps_the_rotary_frequencies(kimi_mini_path: Path, model: Any) -> None:
    rounded = load_target(kimi_mini_path, "cpu", torch.bfloat16)
    assert rounded.lm_head.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert torch.equal(rounded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)  # type: ignore[union-attr]


def test_an_unreadable_quantization_is_one_clear_line(tmp_path: Path, kimi_mini_path: Path) -> None:
    config = json.loads((kimi_mini_path / "config.json").read_text())
    assert packed_scheme(config, "x") == PackedInt4(32)
    assert packed_scheme({"model_type": "llama"}, "x") is None
    weights = config["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]
    for key, value in {"num_bits": 8, "symmetric": False, "type": "float", "actorder": "group"}.items():
        kept, weights[key] = weights[key], value
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(IntegrityError, match=rf"(?s)cannot read this quantization.*{key} is {value!r}") as error:
            load_target(tmp_path, "cpu", torch.float32)
        assert "\n" not in str(error.value)
        weights[key] = kept


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (f"{GATE}.weight_scale", "missing tensor .*gate_proj.weight_scale"),
        ("language_model.model.layers.31.self_attn.o_proj.weight", "1 tensors are missing, first .*o_proj.weight"),
        ("language_model.lm_head.weight", "1 tensors are missing, first lm_head.weight"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(
    tmp_path: Path, kimi_mini_path: Path, lost: str, message: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(kimi_mini_path, folder)
    file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][lost]
    (folder / "model.safetensors.index.json").unlink()
    tensors = load_file(file)
    del tensors[lost]
    save_file(tensors, file)
    with pytest.raises(IntegrityError, match=message):
        load_target(folder, "cpu", torch.float32, with_head=True)


def test_a_tensor_of_another_model_is_refused(tmp_path: Path, kimi_mini_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(kimi_mini_path, folder)
    (folder / "model.safetensors.index.json").unlink()
    save_file({"language_model.model.layers.60.bias": torch.ones(4)}, folder / "model-more.safetensors")
    with pytest.raises(IntegrityError, match=r"1 tensors are not the text model's, first model\.layers\.60\.bias"):
        load_target(folder, "cpu", torch.float32)


def test_made_once_for_one_recipe(kimi_mini_path: Path) -> None:
    stamp = (kimi_mini_path / "config.json").stat().st_mtime_ns
    assert make_miniature.make_miniature(kimi_mini_path) == kimi_mini_path
    assert (kimi_mini_path / "config.json").stat().st_mtime_ns == stamp
