"""Routed experts stored as packed 4-bit integers (compressed-tensors' `pack-quantized`), as Kimi-K2.5 ships them.

A quantized `Linear [out, in]` is three tensors:

* `weight_packed` int32 `[out, in / 8]`: eight values a word, the first in the lowest four bits, stored as value + 8;
* `weight_scale` float `[out, in / group]`: one factor for `group` neighbouring inputs;
* `weight_shape` int `[2]`: `out, in`.

The weight is value * scale. Source of the layout: compressed-tensors 0.20.1, `compressors/pack_quantized`, and the
tensor names of moonshotai/Kimi-K2.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import IntegrityError
from eagle3.target_identity import describe_quantization
from eagle3.target_weights import text_config_of

BITS, PER_WORD, ZERO = 4, 8, 8


@dataclass(frozen=True)
class PackedInt4:
    """The one scheme that is read: symmetric int4 with a scale for each group of inputs.

    Args:
        group: neighbouring inputs that share a scale.
    """

    group: int


def packed_scheme(config: dict[str, Any], where: str) -> PackedInt4 | None:
    """The scheme that a config.json declares, at its top or in its text model; None where it declares none.

    Args:
        config: config.json.
        where: its path, for the error.

    Raises:
        IntegrityError: a quantization that is not read here, in one line that names it.
    """
    text = text_config_of(config)
    quant = config.get("quantization_config") or text.get("quantization_config")
    if not quant:
        return None
    groups = list((quant.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") or {}) if len(groups) == 1 else {}
    found = {
        "quant_method": quant.get("quant_method"),
        "format": (groups[0].get("format") if groups else None) or quant.get("format"),
        "type": weights.get("type"),
        "num_bits": weights.get("num_bits"),
        "strategy": weights.get("strategy"),
        "symmetric": weights.get("symmetric"),
        "dynamic": bool(weights.get("dynamic")),
        "actorder": weights.get("actorder"),
        "input_activations": (groups[0].get("input_activations") if groups else None),
    }
    wanted = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "type": "int",
        "num_bits": BITS,
        "strategy": "group",
        "symmetric": True,
        "dynamic": False,
        "actorder": None,
        "input_activations": None,
    }
    wrong = [f"{name} is {found[name]!r}, expected {wanted[name]!r}" for name in wanted if found[name] != wanted[name]]
    if len(groups) != 1:
        wrong = [f"{len(groups)} config_groups, expected 1"]
    if wrong:
        raise IntegrityError(
            "cannot read this quantization",
            where=where,
            why=f"{describe_quantization(config, text)}: {'; '.join(wrong[:2])}",
            mend="capture and measure with SGLang (capture.backend=sglang, eval.engine=sglang)",
        )
    return PackedInt4(int(weights["group_size"]))


def unpack_int4(packed: Tensor, columns: int) -> Tensor:
    """Take the values out of their words.

    Args:
        packed: int32 `[out, ceil(columns / 8)]`.
        columns: inputs of the weight; what a last word holds beyond them is padding.

    Returns:
        int8 `[out, columns]`, each in -8..7.
    """
    shifts = torch.arange(0, BITS * PER_WORD, BITS, dtype=torch.int32, device=packed.device)
    values = (packed.unsqueeze(-1) >> shifts) & 0xF  # [out, words, 8]; an arithmetic shift, masked
    return (values.flatten(1)[:, :columns] - ZERO).to(torch.int8)


def dequantize_int4(packed: Tensor, scale: Tensor, shape: tuple[int, int], scheme: PackedInt4, where: str) -> Tensor:
    """The weight that the packed form stands for.

    Args:
        packed: int32 `[out, in / 8]`.
        scale: float `[out, in / group]`.
        shape: `(out, in)`, from `weight_shape`.
        scheme: how it was packed.
        where: file and tensor, for the error.

    Returns:
        float32 `[out, in]`, exact: a 4-bit integer times a bf16 scale needs 12 bits of mantissa.

    Raises:
        IntegrityError: the three tensors do not fit together.
    """
    rows, columns = shape
    words, groups = -(-columns // PER_WORD), -(-columns // scheme.group)
    if tuple(packed.shape) != (rows, words) or tuple(scale.shape) != (rows, groups) or packed.dtype != torch.int32:
        why = (
            f"packed {packed.dtype} {list(packed.shape)} and scale {list(scale.shape)} for a weight of {list(shape)} "
            f"in groups of {scheme.group}"
        )
        mend = "download or copy the target again; config.json and its weights must come from one source"
        raise IntegrityError("a quantized weight does not fit together", where=where, why=why, mend=mend)
    factors = scale.float().repeat_interleave(scheme.group, dim=1)[:, :columns]
    return unpack_int4(packed, columns).float() * factors
