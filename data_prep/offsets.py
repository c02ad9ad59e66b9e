"""Where each token stands in the text it came from, for fast and for slow tokenizers.

A fast tokenizer says so itself. A slow one does not, but every special token is a landmark: the k-th name of a special
token in the text and the k-th special id in the tokens are the same one. Chat templates put these at the borders of
turns, so a border is found by its landmark; a border between two landmarks by encoding the stretch before it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import Any, Protocol

from eagle3.errors import DataError

MAX_TOKENS_PER_PIECE = 16  # a character outside the vocabulary spreads over a few byte tokens, never over many


class Placement(Protocol):
    """The tokens of a text and where they stand in it."""

    ids: list[int]

    def index(self, char: int) -> int:
        """Number of the first token that starts at character `char` or after it; len(ids) behind the last."""


class _Spans:
    """Tokens whose first characters are all known, in ascending order."""

    def __init__(self, ids: list[int], starts: list[int]) -> None:
        self.ids, self.starts = ids, starts

    def index(self, char: int) -> int:
        return bisect_left(self.starts, char)


class _Landmarks:
    """Tokens of which the special ones alone are placed; others are placed where they are asked for."""

    def __init__(
        self, encoder: TextEncoder, text: str, ids: list[int], marks: list[tuple[int, int, int]], where: str
    ) -> None:
        """`marks`: (first character, character after, token number) of each special token, in order."""
        self.encoder, self.text, self.ids, self.marks, self.where = encoder, text, ids, marks, where
        self.firsts = [mark[0] for mark in marks]

    def index(self, char: int) -> int:
        at = bisect_left(self.firsts, char)  # marks before `char`
        if at < len(self.firsts) and self.firsts[at] == char:
            return self.marks[at][2]
        _, start, number = self.marks[at - 1] if at else (0, 0, -1)
        first = number + 1  # the token at character `start`
        if char <= start:
            return first
        stretch = self.encoder.encode(self.text[start:char])
        if self.ids[first : first + len(stretch)] == stretch:
            return first + len(stretch)
        end, last = (self.marks[at][0], self.marks[at][2]) if at < len(self.marks) else (len(self.text), len(self.ids))
        spans = spell(self.encoder.tokenizer, self.ids[first:last], self.text[start:end], self.where)
        return first + bisect_left([start + a for a, _ in spans], char)


class TextEncoder:
    """Encodes rendered chats as servers do: names of special tokens become these tokens, none is added.

    SGLang renders a chat to text and encodes it with no further argument where the tokenizer adds no tokens of its own
    (`serving_chat.py`); slow tokenizers are several times faster that way.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.fast = bool(getattr(tokenizer, "is_fast", False))
        added = {str(token): index for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        self.special = dict(sorted(added.items(), key=lambda item: -len(item[0])))  # the longest name first
        self._names = re.compile("|".join(map(re.escape, self.special)) or r"(?!)")
        self._plain = not self.fast and self._plain_encode_adds_nothing()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        if self._plain:
            return list(self.tokenizer.encode(text))
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def place(self, text: str, where: str) -> Placement:
        """Encode a text and say where its tokens stand. Tokens that share one character share its place.

        Raises:
            DataError: a slow tokenizer's tokens do not spell the text, so that no place can be trusted.
        """
        if self.fast:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            return _Spans(list(encoded["input_ids"]), [int(a) for a, _ in encoded["offset_mapping"]])
        ids = self.encode(text)
        marks = self._landmarks(text, ids)
        if marks is not None:
            return _Landmarks(self, text, ids, marks, where)
        return _Spans(ids, [a for a, _ in spell(self.tokenizer, ids, text, where)])

    def _plain_encode_adds_nothing(self) -> bool:
        for text in ("", "a " + "".join(self.special) + " b"):
            if list(self.tokenizer.encode(text)) != list(self.tokenizer(text, add_special_tokens=False)["input_ids"]):
                return False
        return True

    def _landmarks(self, text: str, ids: list[int]) -> list[tuple[int, int, int]] | None:
        """Where the special tokens stand; None where text and tokens do not hold the same ones."""
        found = list(self._names.finditer(text))
        special = set(self.special.values())
        numbers = [number for number, token in enumerate(ids) if token in special]
        if not found or [self.special[match.group()] for match in found] != [ids[number] for number in numbers]:
            return None
        return [(match.start(), match.end(), number) for match, number in zip(found, numbers, strict=True)]


def spell(tokenizer: Any, ids: list[int], text: str, where: str) -> list[tuple[int, int]]:
    """Spans of `ids` in `text`, found by decoding token after token along the text.

    Tokens are gathered until they decode to what stands at the cursor: byte tokens of one character come together.
    """
    spans: list[tuple[int, int]] = []
    pending: list[int] = []
    cursor = 0
    for token in ids:
        pending.append(token)
        piece = tokenizer.decode(pending, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if piece and text.startswith(piece, cursor):
            spans += [(cursor, cursor + len(piece))] * len(pending)
            cursor += len(piece)
            pending = []
        elif len(pending) > MAX_TOKENS_PER_PIECE:
            break
    if pending or cursor != len(text):
        raise DataError(
            "tokens cannot be placed in the text",
            where=where,
            why=f"{type(tokenizer).__name__} has no offsets and its tokens leave the text at character {cursor}",
            mend="use the fast tokenizer of this model",
        )
    return spans
