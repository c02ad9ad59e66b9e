"""Token sequences to probe with: a few texts under the target's tokenizer, or a store's own records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eagle3.errors import DataError

# Prose, code, a list and another script, of different lengths: neighbouring layers must differ on each of them.
TEXTS = (
    "The lighthouse keeper wrote the same line in his book every evening: wind from the west, two ships, no rain. "
    "On the last day of October he wrote nothing, and the ships noticed before anyone on the shore did.",
    "def middle(numbers):\n    ordered = sorted(numbers)\n    half = len(ordered) // 2\n"
    "    if len(ordered) % 2:\n        return ordered[half]\n    return (ordered[half - 1] + ordered[half]) / 2\n",
    "Three things to pack for a week of walking: 1. dry socks, one pair more than seems sensible; 2. a paper map; "
    "3. something salty. Everything else can be borrowed, bought, or done without.",
    "Q: A train leaves at 9:40 and arrives at 13:05. How long is the journey?\nA: From 9:40 to 13:05 is 3 hours and "
    "25 minutes, since 9:40 plus 3 hours is 12:40, and 25 minutes more is 13:05.",
    "Die Brücke über den Fluss ist seit dem Frühjahr gesperrt, deshalb fahren die Busse einen Umweg durch die "
    "Altstadt. 雨が降ると、川の水はすぐに高くなる。",
    "To whom it may concern: the key under the blue pot opens the shed, not the house. Please water the tomatoes on "
    "Tuesday and Friday, and leave the radio on, because the cat prefers company.",
)


def text_prompts(target: Path, count: int, max_tokens: int, trust_remote_code: bool = False) -> list[list[int]]:
    """Token ids of `count` texts under the target's tokenizer, each at most `max_tokens` long.

    Raises:
        DataError: the folder has no tokenizer that loads; or more texts are asked for than there are.
    """
    if not 0 < count <= len(TEXTS):
        raise DataError("no such number of prompts", where="--prompts", why=f"found {count}", mend=_choose(count))
    tokenizer = load_tokenizer(target, trust_remote_code)
    return [list(tokenizer(text)["input_ids"])[:max_tokens] for text in TEXTS[:count]]


def _choose(count: int) -> str:
    return f"choose 1 to {len(TEXTS)}" + (", or --store for more" if count > 0 else "")


def load_tokenizer(target: Path, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer, from disk alone.

    Raises:
        DataError: it does not load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(target), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as err:  # tokenizers raise a dozen kinds
        raise DataError(
            "cannot load the target's tokenizer",
            where=str(target),
            why=f"{type(err).__name__}: {str(err)[:200]}",
            mend="put the tokenizer's files beside the weights, or take tokens from a store with --store",
        ) from None


def random_prompts(vocab_size: int, count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Random token ids: enough to tell sites apart where there is no tokenizer."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (tokens,), generator=generator).tolist() for _ in range(count)]
