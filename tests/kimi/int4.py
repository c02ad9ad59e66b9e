"""Symmetric 4-bit quantization in compressed-tensors' `pack-quantized` form; the other direction of packed_experts."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
Quantized = tuple[Tensor, Tensor]  # values int8 [out, in], scales bf16 [out, in / GROUP]


def quantize(weight: Tensor) -> Quantized:
    """Round `[out, in]` to 4-bit integers with one bf16 scale for 32 neighbouring inputs.

    The scale is the largest magnitude over 7.5, as compressed-tensors' min-max observer has it.

    Returns:
        values int8 `[out, in]` in -8..7, scales bf16 `[out, in / 32]`.
    """
    grouped = weight.float().unflatten(1, (-1, GROUP))  # [out, groups, 32]
    scale = (grouped.abs().amax(dim=2) / 7.5).clamp_min(1e-8).to(torch.bfloat16)
    values = (grouped / scale.float().unsqueeze(2)).round().clamp(-8, 7)
    return values.flatten(1).to(torch.int8), scale


def dequantize(values: Tensor, scale: Tensor) -> Tensor:
    """The float32 weight `[out, in]` that values and scales stand for."""
    return (values.float().unflatten(1, (-1, GROUP)) * scale.float().unsqueeze(2)).flatten(1)


def pack(values: Tensor) -> Tensor:
    """Eight int4 values a word, offset by 8, the first in the lowest bits: int32 `[out, in / 8]`."""
    words = (values.to(torch.int64) + 8).unflatten(1, (-1, 8))  # [out, words, 8]
    word = (words << torch.arange(0, 32, 4)).sum(dim=2)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def packed_tensors(name: str, values: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """The three tensors of one quantized linear layer, named as the checkpoint names them."""
    shape = torch.tensor(values.shape, dtype=torch.int32)
    return {f"{name}.weight_packed": pack(values), f"{name}.weight_scale": scale, f"{name}.weight_shape": shape}
