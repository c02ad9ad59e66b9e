"""A quantized checkpoint's text model, ready for transformers: names without the wrapper, experts dequantized.

Nothing here needs a quantization library or the checkpoint's own Python: transformers has the architecture, and the
packed weights are unpacked while they are read (`eagle3.packed_experts`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import IntegrityError
from eagle3.packed_experts import PackedInt4, dequantize_int4
from eagle3.safetensors_files import SafetensorsTensors
from eagle3.target_weights import text_config_of

WRAPPER = "language_model."  # before every name of the text model in a checkpoint that wraps one
VISION = ("vision_tower.", "mm_projector.", "vision_model.", "multi_modal_projector.", "visual.")
SAME_ARCHITECTURE = {"kimi_k2": "deepseek_v3"}  # a text model's own type: the type that transformers has it under
MEND = "download or build the target again"


def text_model_config(config: dict[str, Any], where: str) -> Any:
    """The text model's configuration as a transformers object, without the quantization.

    Args:
        config: the checkpoint's config.json.
        where: its path, for the error.

    Raises:
        IntegrityError: transformers has no such text model.
    """
    from transformers import AutoConfig

    text = {
        key: value for key, value in text_config_of(config).items() if key not in ("quantization_config", "auto_map")
    }
    kind = str(text.pop("model_type", ""))
    try:
        return AutoConfig.for_model(SAME_ARCHITECTURE.get(kind, kind), **text)
    except ValueError as err:
        why = f"text model type {kind!r}: {str(err)[:200]}"
        mend = "capture and measure with SGLang (capture.backend=sglang, eval.engine=sglang)"
        raise IntegrityError("transformers has no such text model", where=where, why=why, mend=mend) from None


def dequantized_text_weights(path: Path, scheme: PackedInt4, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every weight of the text model, by the name it has in a checkpoint of the text model alone.

    Args:
        path: the checkpoint's folder.
        scheme: how its packed weights are packed.
        dtype: of the packed weights once unpacked; the others stay as stored.

    Raises:
        IntegrityError: a packed weight lacks one of its parts, parts do not fit, or a file is damaged.
    """
    files = SafetensorsTensors(path)
    wrapped = any(name.startswith(WRAPPER) for name in files.names)
    weights = {}
    with files.opened() as read:
        for name in sorted(files.names):
            own = name.removeprefix(WRAPPER) if wrapped else name
            stem, _, tail = own.rpartition(".")
            belongs = tail in ("weight_scale", "weight_shape") and _beside(name, "weight_packed") in files.names
            if belongs or (wrapped and name.startswith(VISION)):
                continue
            if tail == "weight_packed":
                weights[f"{stem}.weight"] = _dequantized(files, read, name, scheme).to(dtype)
            else:
                weights[own] = read(name)
    return weights


def _beside(name: str, tail: str) -> str:
    return f"{name.rpartition('.')[0]}.{tail}"


def _dequantized(files: SafetensorsTensors, read: Callable[[str], Tensor], name: str, scheme: PackedInt4) -> Tensor:
    """One packed weight `[out, in]` in float32."""
    parts = {tail: _beside(name, tail) for tail in ("weight_scale", "weight_shape")}
    for part in parts.values():
        if part not in files.names:
            raise IntegrityError(f"missing tensor {part}", where=files.where(name), why=f"{name} needs it", mend=MEND)
    rows, columns = (int(size) for size in read(parts["weight_shape"]).tolist())
    where = f"{files.where(name)}: {name}"
    return dequantize_int4(read(name), read(parts["weight_scale"]), (rows, columns), scheme, where)
