"""Edit a source at places given by syntax-tree nodes, leaving every other byte as it is."""

from __future__ import annotations

import ast
from itertools import accumulate


class SourceEdits:
    """Edits of one file, collected first and applied together.

    Args:
        source: the file's bytes (UTF-8, as Python reads them); line ends are kept.
    """

    def __init__(self, source: bytes) -> None:
        self.source = source
        lines = source.splitlines(keepends=True)
        self._starts = [0, *accumulate(len(line) for line in lines)]
        self.newline = "\r\n" if b"\r\n" in source else "\n"
        self._edits: list[tuple[int, int, bytes]] = []

    def insert_before(self, node: ast.stmt, lines: list[str]) -> None:
        """Put `lines` on lines of their own above a statement, at its indentation."""
        at = self._starts[node.lineno - 1]
        self._edits.append((at, at, self._block(node, lines)))

    def insert_after(self, node: ast.stmt, lines: list[str]) -> None:
        """Put `lines` on lines of their own below a statement, at its indentation."""
        at = self._starts[(node.end_lineno or node.lineno)]
        lead = b"" if self.source[:at].endswith(b"\n") else self.newline.encode()
        self._edits.append((at, at, lead + self._block(node, lines)))

    def replace(self, node: ast.expr, text: str) -> None:
        """Put `text` in place of an expression; `{}` in it stands for the expression's own text."""
        start, end = self._span(node)
        own = self.source[start:end].decode()
        self._edits.append((start, end, text.replace("{}", own).encode()))

    def replace_statement(self, node: ast.stmt, lines: list[str]) -> None:
        """Put `lines` in place of the lines of a statement."""
        start, end = self._lines_of(node)
        self._edits.append((start, end, self._block(node, lines)))

    def move_before(self, node: ast.stmt, target: ast.stmt, lines: list[str]) -> None:
        """Move the lines of a statement above another one of the same block, under `lines` (comments)."""
        start, end = self._lines_of(node)
        at = self._starts[target.lineno - 1]
        moved = self._block(node, lines) + self.source[start:end] + self.newline.encode()
        gap = len(self.source[end:]) - len(self.source[end:].lstrip(b"\r\n"))  # the blank lines below it go too
        self._edits.append((start, end + gap, b""))
        self._edits.append((at, at, moved))

    def result(self) -> bytes:
        """The edited source."""
        out = self.source
        for start, end, text in sorted(self._edits, key=lambda one: one[0], reverse=True):
            out = out[:start] + text + out[end:]
        return out

    def _span(self, node: ast.expr) -> tuple[int, int]:
        """Bytes of an expression; the tree counts columns in UTF-8 bytes."""
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)

    def _lines_of(self, node: ast.stmt) -> tuple[int, int]:
        return self._starts[node.lineno - 1], self._starts[node.end_lineno or node.lineno]

    def _block(self, node: ast.stmt, lines: list[str]) -> bytes:
        indent = " " * node.col_offset
        return "".join((f"{indent}{line}" if line else "") + self.newline for line in lines).encode()
