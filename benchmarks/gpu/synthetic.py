"""Drafts, teachers and batches of any size, random, made where they are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from eagle3.draft_build import build_draft
from eagle3.draft_shape import DraftShape
from eagle3.ttt import PackedBatch
from eagle3.vocab import build_draft_vocab
from train.losses import TeacherHead
from train.model import TrainParts


@dataclass(frozen=True)
class Sizes:
    """What the script measures at.

    Args:
        name: of these sizes.
        hidden, vocab: of the target.
        intermediates: of the draft's MLP, the usual one first.
        draft_vocabs: the usual one first.
        heads, head_dim: of a draft with Llama's attention.
        latent: sizes of latent attention.
        length: rows of the one document of a training case.
        packed: documents, and rows of each, of the packed case.
        steps: unrolled steps K.
        target_layers, target_intermediate: of the random target that states are extracted from.
        documents: conversations that are extracted.
        square: side of the large square product.
        repeats: timed steps of a training case.
    """

    name: str
    hidden: int
    vocab: int
    intermediates: tuple[int, int]
    draft_vocabs: tuple[int, int]
    heads: int
    head_dim: int
    latent: dict[str, int]
    length: int
    packed: tuple[int, int]
    steps: tuple[int, int]
    target_layers: int
    target_intermediate: int
    documents: int
    square: int
    repeats: int

    def shape(self, kind: str = "llama", intermediate: int = 0, draft_vocab: int = 0) -> DraftShape:
        """A draft's shape; zeros mean the usual sizes."""
        key = sum(self.latent[part] for part in ("qk_nope_head_dim", "qk_rope_head_dim"))
        latent: dict[str, Any] = {"kind": "mla", **self.latent, "head_dim": key}
        return DraftShape(
            hidden_size=self.hidden,
            intermediate_size=intermediate or self.intermediates[0],
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            vocab_size=self.vocab,
            draft_vocab_size=draft_vocab or self.draft_vocabs[0],
            num_aux=3,
            rms_norm_eps=1e-6,
            rope={"rope_theta": 50000.0},
            max_position_embeddings=max(self.length, 4096),
            **(latent if kind == "mla" else {"head_dim": self.head_dim}),
        )


KIMI = Sizes(
    name="Kimi-K2.5",
    hidden=7168,
    vocab=163_840,
    intermediates=(12_288, 18_432),
    draft_vocabs=(32_000, 163_840),
    heads=64,
    head_dim=128,
    latent={
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    length=4096,
    packed=(8, 2048),
    steps=(4, 7),
    target_layers=4,
    target_intermediate=18_432,
    documents=8,
    square=8192,
    repeats=5,
)
SMALL = Sizes(
    name="small",
    hidden=128,
    vocab=1024,
    intermediates=(192, 256),
    draft_vocabs=(256, 1024),
    heads=4,
    head_dim=32,
    latent={
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    length=128,
    packed=(4, 64),
    steps=(4, 7),
    target_layers=4,
    target_intermediate=256,
    documents=6,
    square=256,
    repeats=3,
)


def random_parts(shape: DraftShape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> TrainParts:
    """A random draft and a teacher's head that seldom prefers a token the draft lacks, as a real one."""
    torch.manual_seed(seed)
    with device:
        draft = build_draft(shape).to(dtype)
        head = torch.randn(shape.vocab_size, shape.hidden_size, dtype=dtype) / shape.hidden_size**0.5
    if not shape.full_vocab:
        vocab = build_draft_vocab(torch.randint(0, 100, (shape.vocab_size,)), shape.draft_vocab_size)
        draft.d2t.copy_(vocab.d2t)
        draft.t2d.copy_(vocab.t2d)
    head.mul_(torch.where(draft.t2d, 1.0, 0.1).to(dtype)[:, None])
    norm = torch.ones(shape.hidden_size, dtype=dtype, device=device)
    return TrainParts(draft, TeacherHead(norm, head, shape.rms_norm_eps))


def random_batch(
    shape: DraftShape, lengths: list[int], device: torch.device, dtype: torch.dtype, supervised: float = 1.0
) -> PackedBatch:
    """Documents of these lengths; of each the last rows are supervised, but the very last, as an answer is."""
    masks = []
    for length in lengths:
        mask = torch.zeros(length, dtype=torch.bool)
        mask[length - max(1, round(supervised * length)) : -1] = True
        masks.append(mask)
    rows = sum(lengths)
    return PackedBatch(
        features=torch.randn(rows, shape.num_aux * shape.hidden_size, device=device, dtype=dtype),
        token_ids=torch.randint(0, shape.vocab_size, (rows,), device=device),
        teacher=torch.randn(rows, shape.hidden_size, device=device, dtype=dtype),
        loss_mask=torch.cat(masks).to(device),
        doc_lengths=list(lengths),
    )
