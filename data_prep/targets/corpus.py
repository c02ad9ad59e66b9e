"""The text that tiny targets learn from: `corpus.txt`, small conversations written for this project (Apache-2.0).

Format: conversations separated by a blank line; a line that starts with `user: ` or `assistant: ` opens a message,
and any other line continues the message above it.
"""

from __future__ import annotations

import re
from pathlib import Path

from eagle3.errors import DataError

CORPUS = Path(__file__).with_name("corpus.txt")


def read_corpus(path: Path = CORPUS) -> list[list[dict[str, str]]]:
    """Read the conversations as lists of `{"role", "content"}` messages.

    Raises:
        DataError: a conversation does not start with `user: ` or `assistant: `.
    """
    blocks = path.read_text(encoding="utf-8").strip().split("\n\n")
    return [_messages(block, f"{path}, conversation {number}") for number, block in enumerate(blocks, start=1)]


def _messages(block: str, where: str) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    for line in block.split("\n"):
        opening = re.match(r"(user|assistant): ", line)
        if opening:
            messages.append({"role": opening.group(1), "content": line[opening.end() :]})
        elif messages:
            messages[-1]["content"] += "\n" + line
        else:
            raise DataError(
                "not a conversation", where=where, why=f"it starts with {line!r}", mend="start with 'user: '"
            )
    return messages
