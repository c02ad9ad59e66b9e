"""What the user sees while training: a bar with rate and time left; without a terminal, a line now and then."""

from __future__ import annotations

import time
from datetime import timedelta
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from train.terminal import INDENT, StageConsole
from train.waits import ALLOWED

LINE_EVERY = 30.0  # seconds between lines where there is no terminal
BESIDE_A_BAR = 72  # columns of the counts, the figures and the time left


class TrainProgress:
    """Progress of the optimizer steps.

    Args:
        done: steps already done when this run starts.
        total: steps of the whole run.
        console: where to write; None shows nothing (all ranks but the first).
    """

    def __init__(self, done: int, total: int, console: StageConsole | None) -> None:
        self.console, self.total, self._rows, self._seconds, self._steps = console, total, 0, 0.0, 0
        self._bar: Progress | None = None
        self._last_line = float("-inf")
        if console is not None and console.shows_bars:
            self._bar = Progress(
                TextColumn(INDENT + "step", markup=False),
                BarColumn(bar_width=console.bar_width(BESIDE_A_BAR)),
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
        self._rows, self._seconds, self._steps = self._rows + rows, self._seconds + seconds, self._steps + 1
        if self.console is None:
            return
        rate = self._rows / max(self._seconds, 1e-9)
        loss, acc = row["loss"], row["acc"][0]
        if self._bar:
            told = f"waits {waiting:.0%}" if waiting > ALLOWED else f"acc {acc:.1%}"  # both would not fit
            self._bar.update(self._task, completed=done, note=f"loss {loss:.2f} {told} {rate:,.0f} tok/s")
        elif time.monotonic() - self._last_line > LINE_EVERY or done == self.total:
            self._last_line = time.monotonic()
            line = f"step {done:,} of {self.total:,}: loss {loss:.4f}, accuracy {acc:.1%}, {rate:,.0f} tokens/s"
            line += f", waiting for data {waiting:.0%}" if waiting > ALLOWED else ""
            self.console.print(f"{INDENT}{line}{self._left(done)}")

    def _left(self, done: int) -> str:
        """Time left at the mean pace so far, validations and checkpoints not counted."""
        seconds = (self.total - done) * self._seconds / max(self._steps, 1)
        return f", {timedelta(seconds=round(seconds))} left" if done < self.total else ""

    def say(self, line: str) -> None:
        """Print a line above the bar, under the stage's heading."""
        if self.console is not None:
            self.console.print(f"{INDENT}{line}")
