"""What the terminal shows: one console, stage headings, progress with rate and time left."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

console = Console(highlight=False)


class RateColumn(ProgressColumn):
    """Units done per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        """The task's own estimate of its speed."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} {self.unit}/s", style="progress.data.speed")


@contextlib.contextmanager
def progress_bar(label: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """Show progress while the block runs; yields `advance(n)`. In a log file it is a line now and then.

    Args:
        label: what is being done.
        total: units in all, or None when unknown.
        unit: what is counted ("tokens", "records").
    """
    if not console.is_terminal:
        yield LoggedProgress(label, total, unit).advance
        return
    columns = (
        TextColumn("      {task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        RateColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        task = progress.add_task(label, total=total)
        yield lambda n: progress.advance(task, n)


class LoggedProgress:
    """Progress for output that is no terminal: one line every `EVERY` seconds, and one at the end."""

    EVERY = 20.0

    def __init__(self, label: str, total: int | None, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self.started = self.told = time.monotonic()

    def advance(self, count: int) -> None:
        """Count `count` more units."""
        self.done += count
        now = time.monotonic()
        if self.done == self.total or now - self.told >= self.EVERY:
            self.told = now
            rate = self.done / max(now - self.started, 1e-9)
            line = f"      {self.label}: {self.done:,}"
            if self.total:
                left = timedelta(seconds=round((self.total - self.done) / rate)) if rate else "?"
                line += f" of {self.total:,} {self.unit}, {rate:,.{0 if rate >= 10 else 1}f}/s, {left} left"
            console.print(line, soft_wrap=True)


def shown_path(path: Path | str) -> str:
    """A path as it is shortest: from the working folder, where it lies under it or is nearer that way."""
    text = str(path)
    if "://" in text or not os.path.isabs(text):
        return text
    near = os.path.relpath(text)
    return near if len(near) < len(text) else text
