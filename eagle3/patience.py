"""Bounded patience with a server: how long to wait before another try, and what it says when it refuses.

Every client of the product waits by this rule. Pauses double from try to try; each is drawn from the upper half of its
range, so that requests that failed together do not come back as one; what a Retry-After header asks for is waited for,
up to a cap.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

AGAIN = (408, 425, 429)  # of the 4xx, those that say "not now"
AWAY = (502, 503, 504)  # what stands in for a server that is not there
SHOWN = 300  # characters of a server's own message
_dice = random.Random()  # nothing that is kept hangs on it


@dataclass(frozen=True)
class Backoff:
    """Pauses between the tries of one request.

    Args:
        first_s: seconds before the second try; doubled for each further one.
        longest_s: the most that it doubles to.
        asked_s: the most that a Retry-After header is heeded for.
    """

    first_s: float
    longest_s: float = 30.0
    asked_s: float = 300.0

    def pause(self, failed: int, asked_s: float = 0.0) -> float:
        """Seconds to wait after the `failed`-th failure (from 1 on), of which `asked_s` are the server's wish."""
        growing = min(self.first_s * 2.0 ** min(failed - 1, 30), self.longest_s) * _dice.uniform(0.5, 1.0)
        return max(growing, min(asked_s, self.asked_s))


def retry_after(response: httpx.Response) -> float:
    """Seconds that a Retry-After header asks for: a number, or a date (RFC 9110, 10.2.3); 0 without one."""
    text = response.headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max((parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return 0.0


def worth_another_try(status: int) -> bool:
    """Whether an HTTP status may be another one next time."""
    return status in AGAIN or status >= 500


def message_of(response: httpx.Response, secret: str = "") -> str:
    """What a server says about an error, in one line without `secret`: its JSON's message, or the start of its text."""
    try:
        body = response.json()
        error = body.get("error", body) if isinstance(body, dict) else body
        text = error.get("message") or error.get("detail") or error if isinstance(error, dict) else error
    except ValueError:
        text = response.text
    return one_line(str(text), secret) or "no message"


def not_json(response: httpx.Response, secret: str = "") -> str:
    """Why the body of an answer is no JSON, in one clause: another kind of page, or the end is missing."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip()
    if kind and "json" not in kind:
        start = one_line(response.text, secret)[:40]
        return f"it is {kind} and begins with {start!r}: does the address belong to another program?"
    end = one_line(response.text[-SHOWN:], secret)[-20:]
    return f"{len(response.content)} bytes that end in {end!r}"


def one_line(text: str, secret: str = "") -> str:
    """A text from outside in one short line, without a secret that a server may have echoed."""
    if secret:
        text = text.replace(secret, "***")
    return " ".join(text.split())[:SHOWN]
