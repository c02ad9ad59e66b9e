"""What a run will cost in bytes and parameters, before anything runs."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3.errors import RedraftError
from eagle3.sizes import size_text
from eagle3.state_codec import CODECS
from eagle3.wiring import Wiring

LOSSLESS = (0.67, 0.69)  # share of raw bytes that lossless leaves, as measured on two targets (docs/benchmarks.md)


def state_bytes_per_token(wiring: Wiring, dtype_bytes: int = 2) -> int:
    """Bytes of hidden states a token: the stored sites and the teacher. Kimi-K2.5's native wiring: 57,344."""
    return (len(wiring.stored_sites) + 1) * wiring.hidden_size * dtype_bytes


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of one stored token, its id and mask apart.

    Args:
        low, high: equal where the codec's size does not depend on the content.
        formula: how they come about.
    """

    low: int
    high: int
    formula: str


def bytes_per_token(wiring: Wiring, codec: str = "raw", dtype: str = "bfloat16") -> TokenBytes:
    """What the hidden states of one token take on disk under a codec (`eagle3.state_codec`).

    The lossless codec's range is what was measured on hidden states; its bound, which disk checks use, is the raw size.
    """
    states, width = len(wiring.stored_sites) + 1, wiring.hidden_size
    raw = state_bytes_per_token(wiring, getattr(torch, dtype).itemsize)
    text = f"{states} x {width:,} x {raw // states // width}"
    if codec == "lossless":
        low, high = LOSSLESS
        return TokenBytes(round(raw * low), round(raw * high), f"{text} x {low} to {high}")
    if codec == "raw":
        return TokenBytes(raw, raw, text)
    parts = CODECS[codec].parts(dtype, width)
    size = states * sum(part.row_bytes for part in parts)
    rows = " + ".join(f"{part.row_bytes:,}" for part in parts)
    return TokenBytes(size, size, f"{states} x ({rows})")


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk that holds, or will hold, `folder`."""
    folder = Path(os.path.abspath(folder))
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_space(folder: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        RedraftError: fewer than `needed` bytes are free.
    """
    free = free_bytes(folder)
    if free < needed:
        raise RedraftError(
            "not enough disk space for the hidden states",
            where=str(folder),
            why=f"{size_text(needed)} still to be written, {size_text(free)} free",
            mend="free space, put the store on another disk, or lower data.max_samples or data.max_length",
        )
