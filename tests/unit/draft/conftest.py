"""Small drafts and batches for the draft's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from eagle3.draft import DraftShape, Eagle3Draft
from eagle3.ttt import PackedBatch
from eagle3.vocab import build_draft_vocab

torch.set_num_threads(2)

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "draft_vocab_size": 40,
    "num_aux": 3,
    "rms_norm_eps": 1e-5,
    "rope": {"rope_theta": 10000.0, "rope_scaling": None},
    "max_position_embeddings": 256,
}


@pytest.fixture
def make_draft() -> Callable[..., Eagle3Draft]:
    """`make_draft(dtype=float64, seed=0, **sizes)`: a random draft whose norms are not all ones."""

    def make(dtype: torch.dtype = torch.float64, seed: int = 0, **sizes: Any) -> Eagle3Draft:
        torch.manual_seed(seed)
        draft = Eagle3Draft(DraftShape(**{**SIZES, **sizes})).to(dtype)
        with torch.no_grad():
            for name, parameter in draft.named_parameters():
                spread = 0.3 if "norm" in name else 0.25
                parameter.copy_(torch.randn_like(parameter) * spread + ("norm" in name))
        if not draft.shape.full_vocab:
            counts = torch.randint(0, 9, (draft.shape.vocab_size,))
            vocab = build_draft_vocab(counts, draft.shape.draft_vocab_size)
            draft.d2t.copy_(vocab.d2t)
            draft.t2d.copy_(vocab.t2d)
        return draft

    return make


@pytest.fixture
def make_batch() -> Callable[..., PackedBatch]:
    """`make_batch(lengths, seed=0, share=0.5)`: random documents with a random loss mask."""

    def make(lengths: list[int], seed: int = 0, share: float = 0.5, dtype: torch.dtype = torch.float64) -> PackedBatch:
        torch.manual_seed(seed)
        n, h = sum(lengths), SIZES["hidden_size"]
        return PackedBatch(
            features=torch.randn(n, 3 * h, dtype=dtype),
            token_ids=torch.randint(0, SIZES["vocab_size"], (n,)),
            teacher=torch.randn(n, h, dtype=dtype),
            loss_mask=torch.rand(n) < share,
            doc_lengths=lengths,
        )

    return make
