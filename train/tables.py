"""Tables that training only reads: the target's embedding and head, in as little memory as their values need."""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
_ROWS = 1024  # looked at together


def frozen_table(table: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """`table` on `device`, in `dtype` or in 16 bits where every value is the same in them.

    A target is nearly always saved in 16 bits. Training in float32 then reads its embedding and its head from half of
    the memory that float32 copies would take; what is read of them is widened, which is exact.
    """
    if dtype.itemsize > 2:
        dtype = next((half for half in HALVES if _holds(half, table)), dtype)
    return table.to(device, dtype)


def _holds(half: torch.dtype, table: Tensor) -> bool:
    if table.dtype == half:
        return True
    return all(torch.equal(rows.to(half).to(rows.dtype), rows) for rows in table.split(_ROWS))
