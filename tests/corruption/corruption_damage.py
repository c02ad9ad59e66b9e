"""Damage to one file of a folder, and its undoing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FLIP, CUT, SWAP = "bit flipped", "cut short", "swapped"


@dataclass(frozen=True)
class Damage:
    """What is done to a folder.

    Args:
        kind: a flipped bit, a file cut short, or two files under each other's names.
        file: relative path of the file damaged.
        at: the bit that is flipped, or the bytes that are left.
        other: relative path of the file it is swapped with.
    """

    kind: str
    file: str
    at: int = 0
    other: str = ""

    @property
    def words(self) -> str:
        """For a list."""
        if self.kind == FLIP:
            return f"bit {self.at % 8} of byte {self.at // 8} of {self.file}"
        return f"{self.file} cut to {self.at} bytes" if self.kind == CUT else f"{self.file} and {self.other} swapped"

    def plant(self, folder: Path) -> None:
        """Do it."""
        path = folder / self.file
        content = path.read_bytes()
        if self.kind == FLIP:
            byte = self.at // 8
            path.write_bytes(content[:byte] + bytes([content[byte] ^ 1 << self.at % 8]) + content[byte + 1 :])
        elif self.kind == CUT:
            path.write_bytes(content[: self.at])
        else:
            other = folder / self.other
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)


def draw(dice: random.Random, folder: Path, files: Sequence[str], pairs: Sequence[tuple[str, str]]) -> Damage:
    """A random damage: of ten, eight flipped bits; every file as likely as any other, every bit of it likewise.

    Args:
        dice: where chance comes from.
        folder: holds the files.
        files: relative paths of those that may be damaged.
        pairs: those that may be taken for one another.
    """
    roll = dice.random()
    if pairs and roll < 0.1:
        file, other = dice.choice(pairs)
        if (folder / file).read_bytes() != (folder / other).read_bytes():
            return Damage(SWAP, file, other=other)
    file = dice.choice(files)
    size = (folder / file).stat().st_size
    if roll < 0.2:
        return Damage(CUT, file, dice.randrange(size))
    return Damage(FLIP, file, dice.randrange(8 * size))
