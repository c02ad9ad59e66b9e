"""What the terminal shows: one console, stage headings, progress with rate and time left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

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
    """Show a bar while the block runs; yields `advance(n)`.

    Args:
        label: what is being done.
        total: units in all, or None when unknown.
        unit: what is counted ("tokens", "records").
    """
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


def size_text(count: float) -> str:
    """Bytes in the unit a person would use (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError
