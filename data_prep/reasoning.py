"""The reasoning that an assistant message holds itself, told apart from what a chat template puts in."""

from __future__ import annotations

import re
from dataclasses import dataclass

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
KEYS = ("reasoning_content", "thinking")

_OPENED = re.compile("|".join(rf"{re.escape(a)}\s*$" for a, _ in TAGS))
_CLOSED = re.compile("|".join(rf"{re.escape(b)}\s*$" for _, b in TAGS))
_EMPTY = re.compile("|".join(rf"\s*(?:{re.escape(a)})?\s*{re.escape(b)}" for a, b in TAGS))
_INLINE = re.compile(
    "|".join(rf"\s*(?:{re.escape(a)})?(?P<r{i}>.*?){re.escape(b)}" for i, (a, b) in enumerate(TAGS)), re.DOTALL
)


@dataclass(frozen=True)
class Words:
    """What the assistant itself wrote in one message.

    Args:
        reasoning: its thoughts, "" when it has none.
        answer: what it said after them.
    """

    reasoning: str
    answer: str


def opens_thoughts(prompt: str) -> bool:
    """Whether a generation prompt leaves the model inside a think block."""
    return _OPENED.search(prompt) is not None


def closing_tag(prompt: str) -> str:
    """The tag that ends the think block which a generation prompt opens; "" when it opens none."""
    return next((b for a, b in TAGS if prompt.rstrip().endswith(a)), "")


def own_words(message: dict, prompt: str = "") -> Words:
    """The words of an assistant message, letter for letter.

    Reasoning stands in `reasoning_content` (or `thinking`), or before a closing think tag in the content. After a
    prompt that closes the think block there is no reasoning in the content: a tag in it is a word like others.

    Args:
        message: OpenAI-style.
        prompt: the text that the server gave the model to go on from.
    """
    content = message.get("content") or ""
    for key in KEYS:
        if isinstance(message.get(key), str) and message[key].strip():
            return Words(message[key], content)
    inline = None if _CLOSED.search(prompt) else _INLINE.match(content)
    if inline is None:
        return Words("", content)
    reasoning = next((text for text in inline.groupdict().values() if text is not None), "")
    return Words(reasoning if reasoning.strip() else "", content[inline.end() :])


def empty_block(body: str) -> int:
    """Characters of an empty think block at the start of a rendered turn, or of its rest after the prompt's part."""
    found = _EMPTY.match(body)
    return found.end() if found else 0


def inserted_length(body: str, words: Words) -> int:
    """Characters at the start of a rendered turn (generation prompt already cut off) that its message does not hold.

    That is an empty think block, with or without its opening tag (the generation prompt may hold that), and, for a
    message without reasoning, whatever else the template puts before the answer. Real reasoning is never counted.
    """
    if words.reasoning:
        return 0
    start = empty_block(body)
    at = -1
    if words.answer.strip():
        at = body.find(words.answer, start)
        at = at if at >= 0 else body.find(words.answer.strip(), start)
    return at if at >= 0 else start + (_blank(body, start) if start else 0)


def reasoning_length(body: str, words: Words) -> int:
    """Characters at the start of a rendered turn up to its answer, or up to the end of the think block without one."""
    reasoning, answer = words.reasoning.strip(), words.answer.strip()
    at = body.find(reasoning) if reasoning else -1
    if at < 0 or (answer and body.lstrip().startswith(answer)):
        return 0
    end = at + len(reasoning)
    if answer and body.find(answer, end) >= 0:
        return body.find(answer, end)
    end += empty_block(body[end:])
    return end + _blank(body, end)


def _blank(text: str, start: int) -> int:
    """Characters of white space at a place."""
    return len(text) - start - len(text[start:].lstrip())
