"""What the terminal shows: one console, progress with rate and time left, paths as short as they can be."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from train.terminal import INDENT, StageConsole, seconds_text

console = StageConsole()
BESIDE_A_BAR = 68  # columns of the label, the counts, the rate and the time left


class RateColumn(ProgressColumn):
    """Units done per second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        """The task's own estimate of its speed."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{rate_text(speed)} {self.unit}/s", style="progress.data.speed")


def rate_text(rate: float) -> str:
    """Units a second: whole from ten up."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


@contextlib.contextmanager
def progress_bar(label: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """Show progress while the block runs; yields `advance(n)`. In a log file it is a line now and then.

    Args:
        label: what is being done.
        total: units in all, or None when unknown.
        unit: what is counted ("tokens", "records").
    """
    if not console.shows_bars:
        logged = LoggedProgress(label, total, unit)
        yield logged.advance
        logged.end()
        return
    columns = (
        TextColumn(INDENT + "{task.description}", markup=False),
        BarColumn(bar_width=console.bar_width(BESIDE_A_BAR)),
        MofNCompleteColumn(),
        RateColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        task = progress.add_task(label, total=total)
        yield lambda n: progress.advance(task, n)


class LoggedProgress:
    """Progress for output that is no terminal: one line every `EVERY` seconds, and one at the end (`end`)."""

    EVERY = 20.0

    def __init__(self, label: str, total: int | None, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self.started = self.told = time.monotonic()

    def advance(self, count: int) -> None:
        """Count `count` more units."""
        self.done += count
        now = time.monotonic()
        if now - self.told >= self.EVERY and self.done != self.total:
            self.told = now
            rate = self._rate(now)
            left = f", {timedelta(seconds=round((self.total - self.done) / rate))} left" if self.total and rate else ""
            self._say(f"{rate_text(rate)}/s{left}")

    def end(self) -> None:
        """Say what was done in all, and how long it took."""
        now = time.monotonic()
        self._say(f"{rate_text(self._rate(now))}/s, {seconds_text(now - self.started)}")

    def _rate(self, now: float) -> float:
        return self.done / max(now - self.started, 1e-9)

    def _say(self, rest: str) -> None:
        count = f"{self.done:,}" + (f" of {self.total:,}" if self.total else "")
        console.print(f"{INDENT}{self.label}: {count} {self.unit}, {rest}")


def shown_path(path: Path | str) -> str:
    """A path as it is shortest: from the working folder, where it lies under it or is nearer that way."""
    text = str(path)
    if "://" in text or not os.path.isabs(text):
        return text
    near = os.path.relpath(text)
    return near if len(near) < len(text) else text
