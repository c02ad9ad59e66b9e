"""Whether a text goes round in circles: such a text is easy to predict, and teaches a draft little."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Sequence

LOOPING = 0.5  # a text loops when fewer than this share of its bigrams are distinct
LOOPING_TOKENS = 16  # shorter texts are never said to loop
TAIL_TOKENS = 512  # of a longer text its end is judged: a loop, once entered, lasts; long prose repeats bigrams anyway
_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힣]|[^\W぀-ヿ㐀-鿿가-힣]+|[^\w\s]")


def unique_bigrams(tokens: Sequence[Hashable]) -> float:
    """Distinct bigrams over all bigrams; 1.0 for fewer than two tokens."""
    pairs = list(itertools.pairwise(tokens))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def is_looping(tokens: Sequence[Hashable]) -> bool:
    """Whether a generated text repeats itself, judged by its last `TAIL_TOKENS` tokens."""
    tail = tokens[-TAIL_TOKENS:]
    return len(tail) >= LOOPING_TOKENS and unique_bigrams(tail) < LOOPING


def words(text: str) -> list[str]:
    """Pieces to judge a text by where its tokens are not known: words, signs, single CJK characters."""
    return _WORD.findall(text)
