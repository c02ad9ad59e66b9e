"""What the user sees while training: a bar with rate and time left; without a terminal, a line now and then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from train.waits import ALLOWED

LINE_EVERY = 30.0  # seconds between lines where there is no terminal


class TrainProgress:
    """Progress of the optimizer steps.

    Args:
        done: steps already done when this run starts.
        total: steps of the whole run.
        console: where to write; None shows nothing (all ranks but the first).
    """

    def __init__(self, done: int, total: int, console: Console | None) -> None:
        self.console, self.total, self._rows, self._seconds = console, total, 0, 0.0
        self._bar: Progress | None = None
        self._last_line = float("-inf")
        if console is not None and console.is_terminal:
            self._bar = Progress(
                TextColumn("train"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("train", total=total, completed=done, note="")

    def __enter__(self) -> TrainProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, done: int, row: dict[str, Any], rows: int, seconds: float, waiting: float = 0.0) -> None:
        """Show that `done` steps are done, the last of `rows` positions in `seconds`; `waiting`: for data, a share."""
        self._rows, self._seconds = self._rows + rows, self._seconds + seconds
        if self.console is None:
            return
        rate = self._rows / max(self._seconds, 1e-9)
        note = f"loss {row['loss']:.4f}  acc {row['acc'][0]:.1%}  {rate:,.0f} tokens/s"
        note += f"  waiting for data {waiting:.0%}" if waiting > ALLOWED else ""
        if self._bar:
            self._bar.update(self._task, completed=done, note=note)
        elif time.monotonic() - self._last_line > LINE_EVERY or done == self.total:
            self._last_line = time.monotonic()
            self.console.print(f"train: step {done}/{self.total}  {note}", highlight=False)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self.console is not None:
            self.console.print(line, highlight=False, soft_wrap=True)
