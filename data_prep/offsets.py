"""Where each token stands in the text it came from, for fast and for slow tokenizers."""

from __future__ import annotations

from typing import Any

from eagle3.errors import DataError

MAX_TOKENS_PER_PIECE = 16  # a character outside the vocabulary spreads over a few byte tokens, never over many


def tokenize_with_offsets(tokenizer: Any, text: str, where: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a rendered chat and the span [start, end) of characters that each stands for.

    No special token is added: a chat template writes its own. Tokens that share one character share its span.

    Raises:
        DataError: a slow tokenizer's tokens do not spell the text, so that no span can be trusted.
    """
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [(int(a), int(b)) for a, b in encoded["offset_mapping"]]
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return ids, spell(tokenizer, ids, text, where)


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
