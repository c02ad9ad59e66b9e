"""Bytes as a person reads them."""

from __future__ import annotations


def size_text(count: float) -> str:
    """Bytes in the unit a person would use (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError
