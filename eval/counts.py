"""Whether a server's counts can be true, before they are pooled into an accept length."""

from __future__ import annotations

from dataclasses import replace

from eagle3.errors import RedraftError
from eval.engines.base import Ask, BatchRun, Generation


def checked(run: BatchRun, asks: list[Ask], num_steps: int) -> BatchRun:
    """The batch of a draft, with each continuation whose counts cannot be true turned into a failure that says why."""
    failures = dict(run.failures)
    generations: list[Generation | None] = []
    for ask, made in zip(asks, run.generations, strict=True):
        why = impossible(made, num_steps) if made is not None else None
        if why is not None:
            failures[ask.id] = why
        elif made is None:
            failures.setdefault(ask.id, "no answer, and no reason was given")
        generations.append(made if why is None else None)
    return replace(run, generations=generations, failures=failures)


def impossible(made: Generation, num_steps: int) -> str | None:
    """Why the counts of a drafted continuation cannot be true, in one line; None when they can.

    The first token comes from the prefill, and a verify emits what it kept and one more. The last verify may be cut by
    the length limit or an end token, and servers that overlap steps run one more; hence two verifies of slack.
    """
    if not made.tokens:
        return "no tokens came back"
    if not made.verifies:
        # One token needs no verify step.
        return None if len(made.tokens) == 1 else "no verify step was counted: the server ran without the draft"
    slack = 2 * (num_steps + 1)
    expected = 1 + made.verifies + made.correct
    rules = (
        (made.correct <= num_steps * made.verifies, f"more kept than {num_steps} a verify"),
        (made.correct <= made.proposed, "more kept than proposed"),
        (sum(made.correct_histogram) == made.verifies, "the histogram holds another number of verifies"),
        (
            sum(kept * count for kept, count in enumerate(made.correct_histogram)) == made.correct,
            "the histogram holds another number of kept proposals",
        ),
        (abs(len(made.tokens) - expected) <= slack, f"{len(made.tokens)} tokens where about {expected} must come"),
    )
    for true, words in rules:
        if not true:
            figures = f"{made.verifies} verifies, {made.correct} kept, {made.proposed} proposed"
            return f"the server's counts cannot be true: {words} ({figures}, histogram {made.correct_histogram})"
    return None


def checked_plain(run: BatchRun, asks: list[Ask]) -> BatchRun:
    """The batch without a draft.

    Raises:
        RedraftError: verify steps were counted, so a draft took part.
    """
    for ask, made in zip(asks, run.generations, strict=True):
        if made is not None and made.verifies:
            raise RedraftError(
                "the server for plain decoding speculates",
                where=ask.id,
                why=f"{made.verifies} verify steps were counted",
                mend="point eval.server.baseline_url at a server of the target without a draft, or set "
                "eval.baseline=false",
            )
    failures = dict(run.failures)
    for ask, made in zip(asks, run.generations, strict=True):
        if made is None:
            failures.setdefault(ask.id, "no answer, and no reason was given")
    return replace(run, failures=failures)
