"""Tasks in order of value until the time is over; what each found is kept before the next one starts."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from eagle3.errors import RedraftError

DONE, WRONG, NO_MEMORY, NO_TIME, FAILED = "done", "wrong", "does not fit", "no time left", "failed"


class Clock:
    """Counts down from the moment it is made.

    Args:
        seconds: what there is in all.
        now: the clock that is read.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._end = now, now() + seconds

    @property
    def left(self) -> float:
        """Seconds left; negative once the time is over."""
        return self._end - self._now()

    @property
    def over(self) -> bool:
        """Whether the time is over."""
        return self.left <= 0


@dataclass(frozen=True)
class Task:
    """One thing to find out.

    Args:
        section: the table that its figures belong to.
        name: what it is, unique in its section.
        least: seconds that it takes at least; not begun with less left.
        run: gives the figures, JSON-able; `wrong` among them says why a check failed. Long ones look at the clock.
    """

    section: str
    name: str
    least: float
    run: Callable[[Clock], dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """What became of a task.

    Args:
        section, name: the task's.
        state: one of DONE, WRONG, NO_MEMORY, NO_TIME, FAILED.
        seconds: how long it took, its preparation included.
        note: one line where it is not done.
        figures: what it found.
    """

    section: str
    name: str
    state: str
    seconds: float = 0.0
    note: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form."""
        return asdict(self)


def run_tasks(tasks: Sequence[Task], clock: Clock, keep: Callable[[list[Outcome]], None]) -> list[Outcome]:
    """Run tasks in order; `keep` is given all outcomes so far after each one, run or left out.

    A task that fails in whatever way does not stop the ones after it: a GPU is often had for minutes only.
    """
    outcomes: list[Outcome] = []
    for task in tasks:
        if clock.left < task.least:
            note = f"it takes {task.least:.0f} s at least"
            outcomes.append(Outcome(task.section, task.name, NO_TIME, note=note))
        else:
            outcomes.append(_attempt(task, clock))
            _tidy()
        keep(outcomes)
    return outcomes


def _attempt(task: Task, clock: Clock) -> Outcome:
    began = time.perf_counter()
    state, note, figures = FAILED, "", {}
    try:
        figures = task.run(clock)
        note = str(figures.get("wrong", ""))
        state = WRONG if note else DONE
    except (torch.OutOfMemoryError, MemoryError) as err:
        state, note = NO_MEMORY, _line(err)
    except RedraftError as err:
        note = str(err)
    except Exception as err:  # a kernel's, a driver's: told, and the other tasks go on
        note = f"{type(err).__name__}: {_line(err)}"
    return Outcome(task.section, task.name, state, time.perf_counter() - began, note, figures)


def _line(err: BaseException) -> str:
    return (str(err).strip().splitlines() or [type(err).__name__])[0][:200]


def _tidy() -> None:
    """Give back what a task held, also what only its exception still held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
