"""Experts packed to 4-bit integers, as SGLang's loader holds them, back to plain weights."""

from __future__ import annotations

import torch
from torch import Tensor

BITS, PER_WORD, ZERO = 4, 8, 8


def dequantize_packed_experts(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack experts loaded as `[in, out]`, the way the Marlin kernels want them.

    Args:
        packed: int32 `[E, K / 8, N]`: eight neighbouring inputs a word, the first in the lowest four bits, plus 8.
        scale: `[E, K / group, N]`.
        dtype: of the result; the product is made in float32.

    Returns:
        `[E, N, K]`.
    """
    experts, words, outputs = packed.shape
    inputs = words * PER_WORD
    shifts = torch.arange(0, BITS * PER_WORD, BITS, dtype=torch.int32)
    values = (packed.unsqueeze(2) >> shifts.view(1, 1, -1, 1)) & 0xF  # [E, words, 8, N]
    values = values.reshape(experts, inputs, outputs) - ZERO
    factors = scale.float().repeat_interleave(inputs // scale.shape[1], dim=1)
    return (values.float() * factors).transpose(1, 2).contiguous().to(dtype)
