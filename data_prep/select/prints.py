"""What two prompts are compared by: normalized text, its hash, its shingles, its place in a fair shuffle."""

from __future__ import annotations

import hashlib
import unicodedata

import numpy as np

TURN_BREAK = "\x1e"  # between user turns; no text holds it
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that each power is invertible modulo 2**64


def normalize(text: str) -> str:
    """Text as compared: Unicode NFKC, case folded, each run of white space one blank, ends stripped.

    Punctuation stays: `2 + 3` and `2 * 3` are two questions.
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def text_key(text: str) -> bytes:
    """16 bytes that stand for a normalized text (SHA-256, cut; among 10**9 texts a clash has odds of 10**-21)."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:16]


def draw(seed: int, *parts: str | bytes) -> int:
    """A 64-bit number that depends on seed and parts alone: the place in a shuffle that no order of files changes."""
    digest = hashlib.sha256(f"{seed}".encode())
    for part in parts:
        digest.update(b"\0" + (part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part))
    return int.from_bytes(digest.digest()[:8], "big")


def shingles(text: str, size: int) -> np.ndarray:
    """Hashes of the distinct runs of `size` characters of a normalized text, ascending, [S] uint32.

    A shorter text is one shingle of its own; an empty one has none. Two different runs share a hash with odds of
    2**-32.
    """
    if not text:
        return np.zeros(0, dtype=np.uint32)
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    width = min(size, len(points))
    count = len(points) - width + 1
    hashes = np.full(count, width, dtype=np.uint64)
    for offset in range(width):
        hashes = hashes * _BASE + points[offset : offset + count]
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    return np.unique((hashes >> np.uint64(32)).astype(np.uint32))
