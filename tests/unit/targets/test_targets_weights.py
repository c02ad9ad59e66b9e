"""TargetWeights: every layout gives the model's own tensors; every damage is one line that names file and tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.errors import IntegrityError
from eagle3.target_weights import TargetWeights

V, H = 11, 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": H,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def tensors(prefix: str = "model.", head: str = "lm_head.weight") -> dict[str, torch.Tensor]:
    """Distinct embedding, norm and head, and decoys that a search by name ending would take for them."""
    generator = torch.Generator().manual_seed(1)
    out = {
        f"{prefix}embed_tokens.weight": torch.randn(V, H, generator=generator).bfloat16(),
        f"{prefix}norm.weight": torch.randn(H, generator=generator).bfloat16(),
        f"{prefix}layers.2.embed_tokens.weight": torch.zeros(V, H).bfloat16(),
        f"{prefix}layers.2.shared_head.norm.weight": torch.zeros(H).bfloat16(),
        "vision_tower.norm.weight": torch.zeros(H).bfloat16(),
    }
    if head:
        out[head] = torch.randn(V, H, generator=generator).bfloat16()
    return out


def write(folder: Path, shards: dict[str, dict[str, torch.Tensor]], config: dict[str, Any], index: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in shards.items():
        save_file(content, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    if index:
        weight_map = {name: file for file, content in shards.items() for name in content}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def sharded(folder: Path) -> Path:
    whole = tensors()
    first = {k: v for k, v in whole.items() if "lm_head" not in k}
    shards = {"a-00001.safetensors": first, "a-00002.safetensors": {"lm_head.weight": whole["lm_head.weight"]}}
    return write(folder, shards, CONFIG, index=True)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("model.language_model.model.", "model.language_model.lm_head.weight"),
        ("language_model.", "language_model.lm_head.weight"),
    ],
)
def test_layouts_give_the_right_tensors(tmp_path: Path, prefix: str, head: str, index: bool) -> None:
    whole = tensors(prefix, head)
    weights = TargetWeights(write(tmp_path, {"model.safetensors": whole}, CONFIG, index))
    assert torch.equal(weights.embedding(), whole[f"{prefix}embed_tokens.weight"])
    assert torch.equal(weights.final_norm(), whole[f"{prefix}norm.weight"])
    assert torch.equal(weights.head(), whole[head])


def test_shards_without_index_are_searched(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model.safetensors.index.json").unlink()
    assert torch.equal(TargetWeights(tmp_path).head(), tensors()["lm_head.weight"])


def test_nested_text_config_is_read_and_outer_tie_flag_ignored(tmp_path: Path) -> None:
    text = {k: v for k, v in CONFIG.items() if k != "architectures"} | {"model_type": "deepseek_v3"}
    config = {"architectures": ["K"], "model_type": "kimi_k25", "tie_word_embeddings": True, "text_config": text}
    prefix, head = "language_model.model.", "language_model.lm_head.weight"
    weights = TargetWeights(write(tmp_path, {"model.safetensors": tensors(prefix, head)}, config, index=False))
    assert (weights.model_type, weights.text_model_type, weights.vocab_size) == ("kimi_k25", "deepseek_v3", V)
    assert torch.equal(weights.head(), tensors(prefix, head)[head])
    assert weights.identity().name == "K"


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_nested_model_may_be_tied_and_lie_in_shards(tmp_path: Path, prefix: str, index: bool) -> None:
    """The text model says tied, the wrapper says nothing; embedding and norm lie in two files."""
    config = {"model_type": "wrapper", "text_config": CONFIG | {"tie_word_embeddings": True}}
    whole = tensors(prefix, head="")
    norm = {k: v for k, v in whole.items() if k == f"{prefix}norm.weight"}
    shards = {"b-1.safetensors": {k: v for k, v in whole.items() if k not in norm}, "b-2.safetensors": norm}
    weights = TargetWeights(write(tmp_path, shards, config, index))
    assert torch.equal(weights.embedding(), whole[f"{prefix}embed_tokens.weight"])
    assert torch.equal(weights.head(), weights.embedding())
    assert torch.equal(weights.final_norm(), norm[f"{prefix}norm.weight"])


@pytest.mark.parametrize("flag", [True, None])
def test_tied_head_is_the_embedding(tmp_path: Path, flag: bool | None) -> None:
    config = {k: v for k, v in CONFIG.items() if k != "tie_word_embeddings"}
    config |= {} if flag is None else {"tie_word_embeddings": flag}
    weights = TargetWeights(write(tmp_path, {"model.safetensors": tensors(head="")}, config, index=False))
    assert torch.equal(weights.head(), weights.embedding())


def test_missing_head_of_an_untied_model_is_refused(tmp_path: Path) -> None:
    weights = TargetWeights(write(tmp_path, {"model.safetensors": tensors(head="")}, CONFIG, index=False))
    with pytest.raises(IntegrityError, match=r"missing tensor lm_head\.weight") as err:
        weights.head()
    assert "\n" not in str(err.value) and str(tmp_path) in str(err.value)


def test_tied_flag_beside_another_head_is_refused(tmp_path: Path) -> None:
    config = CONFIG | {"tie_word_embeddings": True}
    weights = TargetWeights(write(tmp_path, {"model.safetensors": tensors()}, config, index=False))
    with pytest.raises(IntegrityError, match="which head is right"):
        weights.head()


def test_absent_shard_is_named_with_a_tensor(tmp_path: Path) -> None:
    (sharded(tmp_path) / "a-00002.safetensors").unlink()
    with pytest.raises(IntegrityError, match=r"a-00002\.safetensors.*lm_head\.weight"):
        TargetWeights(tmp_path)


def test_truncated_shard_is_named_with_a_tensor(tmp_path: Path) -> None:
    path = sharded(tmp_path) / "a-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    weights = TargetWeights(tmp_path)
    assert torch.equal(weights.embedding(), tensors()["model.embed_tokens.weight"])  # the other shard is whole
    for read in (weights.head, weights.identity):
        with pytest.raises(IntegrityError, match=r"truncated.*a-00002\.safetensors.*lm_head\.weight"):
            read()


def test_index_that_places_a_tensor_in_the_wrong_file(tmp_path: Path) -> None:
    index = sharded(tmp_path) / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] | {"lm_head.weight": "a-00001.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(IntegrityError, match=r"missing tensor lm_head\.weight.*a-00001\.safetensors"):
        TargetWeights(tmp_path).head()


def test_pointer_file_header_cut_and_foreign_file(tmp_path: Path) -> None:
    path = sharded(tmp_path) / "a-00002.safetensors"
    whole = path.read_bytes()
    cases = {b"version https://git-lfs.github.com/spec/v1\n": "Git LFS", whole[:20]: "truncated", b"": "truncated"}
    for content, words in cases.items():
        path.write_bytes(content)
        with pytest.raises(IntegrityError, match=words):
            TargetWeights(tmp_path).head()


def test_tensor_of_another_shape_and_quantized_head(tmp_path: Path) -> None:
    weights = TargetWeights(write(tmp_path / "a", {"m.safetensors": tensors()}, CONFIG | {"vocab_size": 12}, False))
    with pytest.raises(IntegrityError, match=r"embed_tokens.*\[11, 8\].*\[12, 8\]"):
        weights.embedding()
    packed = tensors(head="") | {"lm_head.weight_packed": torch.zeros(V, 1, dtype=torch.int32)}
    with pytest.raises(IntegrityError, match=r"quantized.*lm_head\.weight_packed"):
        TargetWeights(write(tmp_path / "b", {"m.safetensors": packed}, CONFIG, False)).head()
    whole = tensors() | {"lm_head.weight": torch.zeros(V, H, dtype=torch.int8)}
    with pytest.raises(IntegrityError, match=r"quantized.*int8"):
        TargetWeights(write(tmp_path / "c", {"m.safetensors": whole}, CONFIG, False)).head()


def test_folder_absent_empty_or_without_config(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="folder not found"):
        TargetWeights(tmp_path / "none")
    with pytest.raises(IntegrityError, match="no weights"):
        TargetWeights(tmp_path)
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(IntegrityError, match=r"config\.json"):
        TargetWeights(tmp_path)


def test_real_model_saved_by_transformers(tiny_llama_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama_path, local_files_only=True)
    weights = TargetWeights(tiny_llama_path)
    assert torch.equal(weights.embedding(), model.get_input_embeddings().weight)
    assert torch.equal(weights.final_norm(), model.model.norm.weight)
    assert torch.equal(weights.head(), model.get_output_embeddings().weight)
    assert not torch.equal(weights.head(), weights.embedding())
    shape = (weights.num_layers, weights.hidden_size, weights.vocab_size, weights.rms_norm_eps)
    assert shape == (8, 64, 320, model.config.rms_norm_eps)


def test_fingerprint_tells_weights_apart_and_survives_a_copy(tiny_llama_path: Path, tmp_path: Path) -> None:
    original = TargetWeights(tiny_llama_path).identity()
    copy = tmp_path / "copy"
    shutil.copytree(tiny_llama_path, copy)
    assert TargetWeights(copy).identity() == original
    state = load_file(copy / "model.safetensors")
    state = {name: tensor + 0.01 for name, tensor in state.items()}
    save_file(state, copy / "model.safetensors", metadata={"format": "pt"})
    changed = TargetWeights(copy).identity()
    assert len(original.differences(changed)) == 1
    assert "weights_fingerprint" in original.differences(changed)[0]
