"""The grid of the comparison: sizes of the draft, of the batch and of the unrolling."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from eagle3.config import require
from eagle3.draft_shape import DraftShape

VOCAB = 49152  # the target's vocabulary
DECAY = 0.8  # weight of step k is DECAY ** k, on every side
AUX_SITES = 3
HIDDEN = {576: (9, 3, 1536), 1024: (16, 4, 2816), 2048: (32, 8, 5632)}  # heads of 64, key heads, width of the MLP
DRAFT_VOCAB, LENGTHS, STEPS = (8192, 32768), (512, 2048), (3, 7)
# (hidden, draft vocabulary, length, K): every value of every axis, within what one core does in 25 minutes.
CHOSEN = (
    (576, 8192, 512, 3),
    (576, 32768, 512, 7),
    (576, 8192, 2048, 7),
    (1024, 32768, 512, 3),
    (2048, 32768, 512, 3),
)


@dataclass(frozen=True)
class Case:
    """One comparison.

    Args:
        hidden: width H of target and draft; heads are 64 wide.
        draft_vocab: Vd.
        length: tokens of the longest document, and of each group of documents.
        steps: unrolled steps K.
        sequences: how many groups of `length` tokens make the batch of one optimizer step.
        lengths: "mixed" (documents as long, relative to the longest, as the demo's) or "full" (of `length` each).
        share: tokens to be learnt, of all; 0 = as in the demo's documents, 1 = all that have a next token.
        vocab: the target's vocabulary V.
        device, dtype: where and in what every side trains.
        seed: of weights and data.
    """

    hidden: int
    draft_vocab: int
    length: int
    steps: int
    sequences: int = 1
    lengths: str = "mixed"
    share: float = 0.0
    vocab: int = VOCAB
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.hidden > 0 and self.hidden % 64 == 0, "--hidden", self.hidden, "a multiple of 64")
        require(0 < self.draft_vocab < self.vocab, "--draft-vocab", self.draft_vocab, f"1 to {self.vocab - 1}")
        require(1 <= self.steps <= 16, "--steps", self.steps, "1 to 16")
        require(self.length >= 4 * self.steps + 4, "--length", self.length, f"at least {4 * self.steps + 4}")
        require(self.sequences >= 1, "--sequences", self.sequences, "a positive integer")
        require(self.lengths in ("mixed", "full"), "--lengths", self.lengths, "mixed or full")
        require(0 <= self.share <= 1, "--share", self.share, "0 (as in the demo's data) to 1")

    @property
    def name(self) -> str:
        """Short form for progress lines and errors."""
        return f"hidden {self.hidden}, Vd {self.draft_vocab}, {self.length} tokens, K {self.steps}"

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return self.length * self.sequences

    def shape(self) -> DraftShape:
        """Sizes of the draft that every side trains."""
        heads, key_heads, width = HIDDEN.get(self.hidden) or _sizes(self.hidden)
        return DraftShape(
            hidden_size=self.hidden,
            intermediate_size=width,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            head_dim=64,
            vocab_size=self.vocab,
            draft_vocab_size=self.draft_vocab,
            num_aux=AUX_SITES,
            rms_norm_eps=1e-5,
            rope={"rope_theta": 100000.0},
            max_position_embeddings=4096,
        )


def _sizes(hidden: int) -> tuple[int, int, int]:
    """Heads, key heads (a quarter, a third, a half or all of them) and MLP width of another hidden size."""
    heads = hidden // 64
    groups = next(g for g in (4, 3, 2, 1) if heads % g == 0)
    return heads, heads // groups, 2 * hidden + 256 * round(2 * hidden / 768)


Cell = tuple[int, int, int, int]  # hidden, draft vocabulary, length, K


def grid(given: tuple[list[int] | None, ...], full: bool) -> list[Cell]:
    """The cells to measure.

    Args:
        given: values asked for on each axis of a `Cell`; None = whatever there is.
        full: choose among all cells of the grid, not only among `CHOSEN`.

    Returns:
        those that have the values asked for; all combinations of them where every axis is given, or where none has.
    """
    axes: tuple[tuple[int, ...], ...] = (tuple(HIDDEN), DRAFT_VOCAB, LENGTHS, STEPS)
    pool = _product(axes) if full else list(CHOSEN)
    found = [cell for cell in pool if all(not want or x in want for x, want in zip(cell, given, strict=True))]
    if found and not all(given):
        return found
    return _product(tuple(tuple(want or known[:1]) for want, known in zip(given, axes, strict=True)))


def _product(axes: tuple[tuple[int, ...], ...]) -> list[Cell]:
    hidden, vocab, length, steps = axes
    return list(itertools.product(hidden, vocab, length, steps))


def to_json(case: Case) -> dict[str, Any]:
    """What a worker needs to build its model: the case and the draft's sizes."""
    return {"case": asdict(case), "shape": case.shape().to_dict(), "decay": DECAY}
