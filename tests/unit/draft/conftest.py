"""Small drafts and batches for the draft's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from eagle3.draft import Eagle3Draft
from eagle3.draft_build import build_draft
from eagle3.draft_shape import DraftShape
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
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
LATENT = {
    "kind": "mla",
    "num_key_value_heads": 6,
    "head_dim": 12,
    "q_lora_rank": 10,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rope": {"rope_theta": 10000.0, "rope_scaling": YARN},
}
NEWER = {"fc_norm": True, "norm_output": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-3.1": {**NEWER, "norm_before_fc": True},
    "mla": LATENT,
    "mla-3.1": {**LATENT, **NEWER},
}


@pytest.fixture(params=sorted(VARIANTS))
def variant(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Sizes and switches of each kind of draft, for `make_draft(**variant)`."""
    return dict(VARIANTS[request.param])


@pytest.fixture
def latent() -> dict[str, Any]:
    """Sizes of a draft with latent attention."""
    return dict(LATENT)


@pytest.fixture
def make_draft() -> Callable[..., Eagle3Draft]:
    """`make_draft(dtype=float64, seed=0, **sizes)`: a random draft whose norms are not all ones."""

    def make(dtype: torch.dtype = torch.float64, seed: int = 0, **sizes: Any) -> Eagle3Draft:
        torch.manual_seed(seed)
        draft = build_draft(DraftShape(**{**SIZES, **sizes})).to(dtype)
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
