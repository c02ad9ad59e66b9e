"""The sizes that are varied, one at a time, around one small case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.flops import needed_work, step_flops
from benchmarks.step import Case, random_batch, random_draft
from eagle3.draft_shape import DraftShape

BASE = Case(
    steps=4,
    length=512,
    documents=1,
    hidden=256,
    vocab=8192,
    draft_vocab=2048,
    supervised=0.5,
    device="cpu",
    dtype="float32",
)


@dataclass(frozen=True)
class Axis:
    """One size and the values it takes.

    Args:
        name: on the command line.
        label: in tables and pictures.
        values: ascending.
        case: the case of a value.
    """

    name: str
    label: str
    values: tuple[int, ...]
    case: Callable[[int], Case]


def axes(base: Case = BASE) -> list[Axis]:
    """Every size of a training step."""
    rows = 4096 * base.length // 512
    lengths = tuple(base.length * scale // 2 for scale in (1, 2, 4, 8, 16))
    words = tuple(base.draft_vocab * scale for scale in (1, 2, 4, 8, 16, 32))
    return [
        Axis("length", "rows of the one document", lengths, lambda n: replace(base, length=n)),
        Axis(
            "cut",
            f"rows of a document, {rows:,} in all",
            lengths,
            lambda n: replace(base, length=n, documents=rows // n),
        ),
        Axis("steps", "unrolled steps K", (1, 2, 3, 4, 5, 6, 7, 8), lambda n: replace(base, steps=n)),
        Axis(
            "draft_vocab",
            f"draft vocabulary Vd, target's {words[-1]:,}",
            words,
            lambda n: replace(base, draft_vocab=n, vocab=words[-1]),
        ),
        Axis(
            "vocab",
            f"target vocabulary V, draft's {base.draft_vocab:,}",
            tuple(base.vocab * scale for scale in (1, 2, 4, 8, 16)),
            lambda n: replace(base, vocab=n),
        ),
        Axis(
            "hidden",
            "hidden size H",
            tuple(base.hidden * n // 2 for n in (1, 2, 3, 4)),
            lambda n: replace(base, hidden=n),
        ),
    ]


def chosen(names: Sequence[str], base: Case = BASE) -> list[Axis]:
    """The axes of these names."""
    return [axis for axis in axes(base) if axis.name in names]


def shape_of(case: Case) -> DraftShape:
    """The shape of a case's draft; nothing is allocated."""
    with torch.device("meta"):
        whole = random_draft(replace(case, vocab=case.draft_vocab, device="meta"))  # no choice of words to compute
    return replace(whole.shape, vocab_size=case.vocab)


def needed(case: Case) -> float:
    """Operations that a case's step cannot do without (`benchmarks.flops`)."""
    torch.manual_seed(case.seed)
    return step_flops(shape_of(case), needed_work(random_batch(case), case.steps))["total"]


def plain_bytes(case: Case) -> int:
    """About what the plain step keeps: per step its attention matrices (scores, shares) and logits, in float32."""
    heads = case.hidden // 64
    matrices = case.steps * case.documents * heads * case.length**2 * 3
    logits = case.documents * case.length * (case.draft_vocab * (3 * case.steps + 2) + 2 * case.vocab)
    return 4 * (matrices + logits)


def sizes_of(case: Case) -> dict[str, Any]:
    """What a table says of the base case."""
    return {
        "K": case.steps,
        "rows": case.length * case.documents,
        "H": case.hidden,
        "V": case.vocab,
        "Vd": case.draft_vocab,
        "supervised": case.supervised,
    }
