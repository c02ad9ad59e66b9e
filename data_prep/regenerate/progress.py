"""Progress of the command line entry: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY_S = 30.0


@contextlib.contextmanager
def shown_progress(source: Path, console: Console) -> Iterator[Callable[[int], None]]:
    """Yield `advance(n)` over the records of `source`."""
    total = 0
    if source.is_file():
        with source.open("rb") as lines:
            total = sum(1 for line in lines if line.strip())
    if console.is_terminal:
        columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("answers", total=total)
            yield lambda n: bar.advance(task, n)
        return
    done, told = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, told
        done += count
        if done == total or time.monotonic() - told >= EVERY_S:
            told = time.monotonic()
            console.print(f"answers: {done:,} of {total:,}", soft_wrap=True)

    yield advance
