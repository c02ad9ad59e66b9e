"""Reasoning told from the answer, where the server did not do it: a server without a reasoning parser gives one text.

What the text looks like depends on how the prompt ends. A template that prefills `<think>` leaves only `</think>` in
the text, or nothing when the answer was cut off while reasoning; one that prefills an empty block leaves no tag at all,
and a `</think>` in the text is then a word like any other.
"""

from __future__ import annotations

from enum import Enum

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


class Prefill(Enum):
    """How the prompt leaves the reasoning."""

    OPEN = "open"  # inside a think block
    CLOSED = "closed"  # after an empty one
    NONE = "none"  # the template says nothing of it
    UNKNOWN = "unknown"


def prefill_of(prompt: str) -> Prefill:
    """How a rendered prompt, or its last characters, leaves the reasoning."""
    end = prompt.rstrip()
    if any(end.endswith(opening) for opening, _ in TAGS):
        return Prefill.OPEN
    return Prefill.CLOSED if any(end.endswith(closing) for _, closing in TAGS) else Prefill.NONE


def split_text(text: str, prefill: Prefill) -> tuple[str, str]:
    """(reasoning, answer) of a text that no parser has split; together with the tags they are the whole text.

    Reasoning that was never closed is reasoning to its end, as the engines' own parsers have it.
    """
    for opening, closing in TAGS:
        body = text.lstrip()
        led = body.startswith(opening)
        body = body[len(opening) :] if led else text
        inside, found, after = body.partition(closing)
        if led:
            return inside, after
        if found and prefill in (Prefill.OPEN, Prefill.UNKNOWN) and opening not in inside:
            return inside, after
    return (text, "") if prefill is Prefill.OPEN else ("", text)


def closes(text: str) -> bool:
    """Whether reasoning ends in a text."""
    return any(closing in text for _, closing in TAGS)
