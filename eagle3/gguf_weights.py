"""A target given as one GGUF file: the tensors the draft needs, dequantized, and a config from its metadata."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import IntegrityError, RedraftError
from eagle3.safetensors_files import MEND, sampled_bytes

# Names in a GGUF file -> names in a Hugging Face checkpoint.
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# GGUF architectures whose model_type is spelt otherwise.
MODEL_TYPES = {"deepseek2": "deepseek_v3", "qwen3moe": "qwen3_moe", "qwen2moe": "qwen2_moe"}
# config.json key -> GGUF metadata key, after "<architecture>.".
KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}


@contextlib.contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    """On damaged bytes the gguf package raises whatever numpy, struct and the text codecs do."""
    try:
        yield
    except RedraftError:
        raise
    except Exception as err:
        raise IntegrityError("GGUF file truncated or corrupt", where=str(path), why=str(err), mend=MEND) from None


class GGUFTensors:
    """The tensors of one GGUF file under Hugging Face names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def reader(self) -> Any:
        """The open file.

        Raises:
            IntegrityError: not GGUF, or truncated.
        """
        from gguf import GGUFReader

        with _damage_told(self.path):
            return GGUFReader(self.path)

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        with _damage_told(self.path):
            return {TENSORS[t.name]: t for t in self.reader.tensors if t.name in TENSORS}

    @cached_property
    def names(self) -> frozenset[str]:
        """Which of the three tensors the file holds."""
        return frozenset(self._tensors)

    def where(self, name: str) -> str:
        """Path of the file."""
        return str(self.path)

    def read(self, name: str) -> Tensor:
        """Dequantize one tensor to fp32."""
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        with _damage_told(self.path):
            values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
            return values.reshape([int(n) for n in reversed(tensor.shape)])  # GGUF lists the fastest dimension first

    def fingerprint(self) -> str:
        """SHA-256 over the file's size, metadata and 16 evenly spaced blocks of its data."""
        start = min((int(t.data_offset) for t in self.reader.tensors), default=0)
        head = f"{self.path.stat().st_size}\0".encode()
        return hashlib.sha256(head + sampled_bytes(self.path, start)).hexdigest()


def read_gguf_config(files: Any) -> dict[str, Any]:
    """A config.json-like dict from the file's metadata (for folders that hold nothing but the GGUF file).

    Raises:
        IntegrityError: the metadata names no architecture or lacks the model's shape.
    """
    reader = files.reader

    def value(key: str) -> Any:
        field = reader.get_field(key)
        with _damage_told(files.path):
            return None if field is None else field.contents()

    architecture = value("general.architecture")
    config = {key: value(f"{architecture}.{tail}") for key, tail in KEYS.items()}
    needed = [key for key in ("num_hidden_layers", "hidden_size") if config[key] is None]
    if architecture is None or needed:
        why = f"it lacks {', '.join(needed) or 'general.architecture'}"
        mend = "put the model's config.json beside the GGUF file"
        raise IntegrityError("GGUF metadata is not enough", where=str(files.path), why=why, mend=mend)
    vocab = value(f"{architecture}.vocab_size")
    if vocab is None and "model.embed_tokens.weight" in files.names:
        vocab = int(files._tensors["model.embed_tokens.weight"].shape[1])
    kinds = [t.tensor_type.name for t in reader.tensors if len(t.shape) > 1]
    common = max(sorted(set(kinds)), key=kinds.count) if kinds else "unknown"
    plain = common in ("F32", "F16", "BF16")
    config |= {
        "model_type": MODEL_TYPES.get(architecture, architecture),
        "vocab_size": vocab,
        "tie_word_embeddings": "lm_head.weight" not in files.names,
        "dtype": "float32",
        "quantization_config": None if plain else {"quant_method": f"gguf {common}"},
    }
    return {key: entry for key, entry in config.items() if entry is not None}
