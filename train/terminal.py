"""The console of all stages: lines that stay lines in a file, and hang under themselves at the width of a terminal."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TextIO

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

INDENT = "      "  # of what a stage says, under its heading


class StageConsole(Console):
    """A console for lines that begin with white space: in a file they stay whole, on a terminal their rest is indented.

    Such a line is plain text: brackets in paths and names are no markup, unless it is asked for.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, **settings)

    def print(self, *objects: Any, **how: Any) -> None:
        """As rich prints, but for a single line of text that begins with white space."""
        if len(objects) != 1 or not isinstance(objects[0], str) or not objects[0].startswith(" "):
            super().print(*objects, **how)
            return
        line, markup = objects[0], how.pop("markup", False)
        body = line.lstrip(" ")
        if not self.is_terminal:
            super().print(line, markup=markup, soft_wrap=True, **how)
            return
        text = Text.from_markup(body) if markup else Text(body)
        super().print(Padding(text, (0, 0, 0, len(line) - len(body)), expand=False), **how)

    @property
    def shows_bars(self) -> bool:
        """Whether a bar can be drawn over itself: on a terminal that moves its cursor."""
        return self.is_terminal and not self.is_dumb_terminal

    def bar_width(self, beside: int) -> int:
        """Columns left for a bar with `beside` columns of text, from 8 to 24."""
        return max(8, min(24, self.width - beside))


def settle(stream: TextIO) -> None:
    """Show the cursor again and clear the line: a bar of another process may have been cut off in the middle."""
    if stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        stream.write("\x1b[?25h\r\x1b[K")
        stream.flush()


def seconds_text(seconds: float) -> str:
    """A duration as a person would say it: `3 s`, `0:02:05`."""
    return f"{seconds:.0f} s" if seconds < 100 else str(timedelta(seconds=round(seconds)))
