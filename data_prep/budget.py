"""What a run will cost in bytes and parameters, before anything runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data_prep.store.manifest import TOKEN_BYTES
from eagle3.errors import RedraftError
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


@dataclass(frozen=True)
class StoreBudget:
    """Size of a store, in bytes unless said otherwise.

    `memory_bytes` is what a `StoreWriter` holds at most: a full shard being written, and one being filled, each up to
    one sample longer than `shard_tokens`.
    """

    records: int
    tokens: int
    bytes_per_token: int
    total_bytes: int
    largest_sample_bytes: int
    shards: int
    shard_bytes: int
    memory_bytes: int
    free_bytes: int


def store_budget(
    wiring: Wiring, lengths: Sequence[int], shard_tokens: int, folder: Path, dtype_bytes: int = 2
) -> StoreBudget:
    """Size of the store that records of `lengths` tokens will make in `folder` (which need not exist yet).

    File headers are left out: some hundred bytes a shard and two hundred a record.
    """
    per_token = state_bytes_per_token(wiring, dtype_bytes) + TOKEN_BYTES
    tokens, longest = sum(lengths), max(lengths, default=0)
    shard = min(tokens, shard_tokens + longest)
    return StoreBudget(
        records=len(lengths),
        tokens=tokens,
        bytes_per_token=per_token,
        total_bytes=tokens * per_token,
        largest_sample_bytes=longest * per_token,
        shards=-(-tokens // shard_tokens),
        shard_bytes=min(tokens, shard_tokens) * per_token,
        memory_bytes=min(2 * shard, tokens) * per_token,
        free_bytes=free_bytes(folder),
    )


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
            why=f"{gigabytes(needed)} still to be written, {gigabytes(free)} free",
            mend="free space, put the store on another disk, or lower data.max_samples or data.max_length",
        )


def gigabytes(size: int) -> str:
    """`57344000` -> `0.06 GB` (10^9 bytes); from 1000 GB on in TB."""
    return f"{size / 1e12:.1f} TB" if size >= 1e12 else f"{size / 1e9:.2f} GB"
