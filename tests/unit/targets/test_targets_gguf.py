"""A target given as one GGUF file, written here with the `gguf` package's own writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3.errors import IntegrityError
from eagle3.target_weights import TargetWeights

V, H = 10, 32


def write_gguf(path: Path, tied: bool, quantized: bool = False) -> dict[str, np.ndarray]:
    import gguf

    random = np.random.default_rng(0)
    content = {
        "token_embd.weight": random.standard_normal((V, H)).astype(np.float32),
        "output_norm.weight": random.standard_normal(H).astype(np.float32),
    }
    if not tied:
        content["output.weight"] = random.standard_normal((V, H)).astype(np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_embedding_length(H)
    writer.add_context_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, values in content.items():
        if quantized and values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return content


def test_plain_file_gives_tensors_and_config(tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "m.gguf", tied=False)
    weights = TargetWeights(tmp_path)
    assert torch.equal(weights.embedding(), torch.from_numpy(content["token_embd.weight"]))
    assert torch.equal(weights.final_norm(), torch.from_numpy(content["output_norm.weight"]))
    assert torch.equal(weights.head(), torch.from_numpy(content["output.weight"]))
    assert (weights.model_type, weights.num_layers, weights.hidden_size, weights.vocab_size) == ("llama", 3, H, V)
    assert weights.rms_norm_eps == pytest.approx(1e-5)
    assert weights.text_config["rope_theta"] == 5000.0
    assert weights.identity().quantization == "none"


def test_quantized_and_tied(tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "m.gguf", tied=True, quantized=True)
    weights = TargetWeights(tmp_path)
    want = torch.from_numpy(content["token_embd.weight"])
    assert (weights.embedding() - want).abs().max() < want.abs().max() / 100  # 8 bits
    assert torch.equal(weights.head(), weights.embedding())
    assert weights.identity().quantization == "gguf Q8_0"


def test_truncated_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tied=False)
    whole = path.read_bytes()
    for size in (0, 30, len(whole) - 64):
        path.write_bytes(whole[:size])
        with pytest.raises(IntegrityError, match=r"truncated or corrupt.*m\.gguf") as err:
            TargetWeights(tmp_path).embedding()
        assert "\n" not in str(err.value)
