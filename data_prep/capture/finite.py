"""Whether states are finite, at the speed of memory."""

from __future__ import annotations

import torch
from torch import Tensor

# The exponent's bits, all set in infinities and NaNs alone (IEEE 754), as a number of the same size.
EXPONENT = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
}


def all_finite(state: Tensor) -> bool:
    """True when no number of `state` (any shape) is NaN or infinite.

    Many times faster on a CPU than `isfinite().all()`, which takes a second for 250 MB of bfloat16.
    """
    if state.dtype not in EXPONENT:
        return bool(state.isfinite().all())
    integers, exponent = EXPONENT[state.dtype]
    return state.numel() == 0 or int(state.view(integers).bitwise_and(exponent).amax()) < exponent
