"""What every benchmark shares: two sides timed in turns, and a result kept as a table and as JSON."""

from __future__ import annotations

import io
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from eagle3.atomic import write_json, write_text
from eagle3.errors import ConfigError


@dataclass(frozen=True)
class Pair:
    """Seconds of two sides that took turns: round `i` ran side a, then side b.

    Args:
        a, b: seconds of each round.
    """

    a: list[float]
    b: list[float]

    @property
    def medians(self) -> tuple[float, float]:
        """Median seconds of a and of b."""
        return statistics.median(self.a), statistics.median(self.b)

    @property
    def ratio(self) -> float:
        """Median of a over median of b: how many times as long a takes."""
        return self.medians[0] / self.medians[1]

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest ratio a / b of a single round."""
        ratios = [a / b for a, b in zip(self.a, self.b, strict=True)]
        return min(ratios), max(ratios)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form with the figures derived from the seconds."""
        return {**asdict(self), "medians": self.medians, "ratio": self.ratio, "spread": self.spread}


def take_turns(a: Callable[[], Any], b: Callable[[], Any], rounds: int, device: torch.device) -> Pair:
    """Time `a` and `b` alternately, so that a machine that slows down slows both.

    Args:
        a, b: the sides; both should have run once before, untimed.
        rounds: how often each is timed.
        device: where they run; on a GPU the queue is emptied before each reading of the clock.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for side, kept in zip((a, b), seconds, strict=True):
            _wait(device)
            start = time.perf_counter()
            side()
            _wait(device)
            kept.append(time.perf_counter() - start)
    return Pair(*seconds)


def open_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ConfigError: there is no such device here.
    """
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as err:
        raise ConfigError(
            "no such device", where="--device", why=f"{name}: {str(err).splitlines()[0]}", mend="use cpu"
        ) from None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def machine_line(facts: dict[str, Any]) -> str:
    """The same in one line, for under a table."""
    return (
        f"{facts['device']}, {facts['cpus']} CPUs, {facts['threads']} threads, "
        f"load {facts['load_at_start']:.1f} at start, torch {facts['torch']}"
    )


WIDTH = 110  # columns of a table


def publish(table: Table, result: dict[str, Any], out: Path, name: str) -> None:
    """Print the table and write `NAME.txt` and `NAME.json` to folder `out`."""
    text = io.StringIO()
    Console(file=text, width=WIDTH, force_terminal=False).print(table)
    lines = "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
    write_text(out / f"{name}.txt", lines)
    write_json(out / f"{name}.json", result)
    console = Console(highlight=False)
    if console.width < WIDTH:  # rich would cut the figures off
        print(lines, end="")
    else:
        console.print(table)
    print(f"written: {out / name}.txt and .json")
