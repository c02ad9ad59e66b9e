"""The reasoning that an assistant message holds itself, told apart from what a chat template puts in."""

from __future__ import annotations

import re

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
KEYS = ("reasoning_content", "thinking")

_EMPTY = re.compile("|".join(rf"\s*(?:{re.escape(a)})?\s*{re.escape(b)}\s*" for a, b in TAGS))
_INLINE = re.compile(
    "|".join(rf"\s*(?:{re.escape(a)})?(?P<r{i}>.*?){re.escape(b)}\s*" for i, (a, b) in enumerate(TAGS)), re.DOTALL
)


def split_reasoning(message: dict) -> tuple[str, str]:
    """(reasoning, answer) of an assistant message, both stripped; the reasoning is "" when it has none.

    Reasoning stands in `reasoning_content` (or `thinking`), or inside think tags at the start of the content.
    """
    content = message.get("content") or ""
    inline = _INLINE.match(content)
    answer = content[inline.end() :] if inline else content
    for key in KEYS:
        if isinstance(message.get(key), str) and message[key].strip():
            return message[key].strip(), answer.strip()
    found = next((text for text in inline.groupdict().values() if text), "") if inline else ""
    return found.strip(), answer.strip()


def inserted_length(body: str, message: dict) -> int:
    """Characters at the start of a rendered turn (generation prompt already cut off) that its message does not hold.

    That is an empty think block, with or without its opening tag (the generation prompt may hold that), and, for a
    message without reasoning, whatever else the template puts before the answer. Real reasoning is never counted.
    """
    reasoning, answer = split_reasoning(message)
    if reasoning:
        return 0
    empty = _EMPTY.match(body)
    start = empty.end() if empty else 0
    if answer and not body.startswith(message.get("content") or "", start):
        start = max(start, body.find(answer, start))
    return start


def reasoning_length(body: str, message: dict) -> int:
    """Characters at the start of a rendered turn up to its answer, or up to the end of the think block without one."""
    reasoning, answer = split_reasoning(message)
    at = body.find(reasoning) if reasoning else -1
    if at < 0 or (answer and body.lstrip().startswith(answer)):
        return 0
    end = at + len(reasoning)
    if answer and body.find(answer, end) >= 0:
        return body.find(answer, end)
    closing = _EMPTY.match(body, end)
    return closing.end() if closing else end
