"""What a run will cost in bytes and parameters, before anything runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3.config import DraftConfig
from eagle3.errors import RedraftError
from eagle3.wiring import Wiring

TOKEN_BYTES = 5  # int32 id and uint8 mask
OPTIMIZER_BYTES = 16  # per trained parameter: bf16 weight and gradient, fp32 master weight and Adam's two moments


def state_bytes_per_token(wiring: Wiring, dtype_bytes: int = 2) -> int:
    """Bytes of hidden states a token: the stored sites and the teacher. Kimi-K2.5's native wiring: 57,344."""
    return (len(wiring.stored_sites) + 1) * wiring.hidden_size * dtype_bytes


@dataclass(frozen=True)
class StoreBudget:
    """Size of a store, in bytes unless said otherwise.

    `memory_bytes` is what the writer holds at most: a full shard being written, and one being filled, each up to
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


@dataclass(frozen=True)
class DraftBudget:
    """Parameters of a draft and the bytes of training it with Adam in mixed precision (activations not counted).

    `frozen` is the embedding, which the served draft takes from the target.
    """

    fc: int
    attention: int
    mlp: int
    norms: int
    lm_head: int
    frozen: int

    @property
    def trained(self) -> int:
        """Trained parameters."""
        return self.fc + self.attention + self.mlp + self.norms + self.lm_head

    @property
    def training_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer, over all ranks of ZeRO 1-3."""
        return OPTIMIZER_BYTES * self.trained + 2 * self.frozen


def draft_budget(wiring: Wiring, draft: DraftConfig, vocab_size: int) -> DraftBudget:
    """Count a one-layer EAGLE-3 draft; `draft`'s sizes must be filled in (no zeros meaning "as the target").

    Args:
        wiring: gives the width of `fc`'s input.
        draft: heads, intermediate size and draft vocabulary.
        vocab_size: the target's vocabulary.

    Raises:
        RedraftError: a size is still zero.
    """
    for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        if getattr(draft, name) <= 0:
            raise RedraftError(
                "the draft's shape is not known yet", where=f"draft.{name}", mend="set it, or give the target"
            )
    h, heads = wiring.hidden_size, draft.num_attention_heads * draft.head_dim
    pairs = draft.num_key_value_heads * draft.head_dim
    return DraftBudget(
        fc=wiring.feature_width * h,
        attention=2 * h * (heads + 2 * pairs) + heads * h,
        mlp=3 * h * draft.intermediate_size,
        norms=4 * h,
        lm_head=draft.vocab_size * h,
        frozen=vocab_size * h,
    )
