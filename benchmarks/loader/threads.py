"""Threads or processes for decoding: what two of each give, and what one costs a thread that runs Python.

    python -m benchmarks.loader.threads

`two`: bytes two decoders give together beside what one gives alone. `python`: how often a thread adds two numbers with
torch, as a training loop launches small work, while one decoder runs, beside what it does alone. The sides take turns.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from benchmarks.side_by_side import machine, machine_line, publish
from eagle3.command_line import Parser, one_line_errors
from eagle3.state_codec import CODECS

ROWS = 512


def decode_for(codec: str, width: int, seconds: float, done: Any = None) -> int:
    """Decode one state again and again; how many times. It begins when all that take part are ready."""
    torch.set_num_threads(1)
    state = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    parts, out, times = CODECS[codec].encode(state), torch.empty_like(state), 0
    CODECS[codec].decode_into(parts, out)
    if done is not None:
        done.wait()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        CODECS[codec].decode_into(parts, out)
        times += 1
    return times


def launch_for(seconds: float) -> int:
    """Add two numbers with torch again and again; how many times."""
    a, times, end = torch.zeros(1), 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        a.add_(1.0)
        times += 1
    return times


def beside(kind: str, count: int, codec: str, width: int, seconds: float, meanwhile: Callable[[], int]) -> list[int]:
    """Run `count` decoders as threads or processes, and `meanwhile` here; all counts, this thread's first."""
    spawn = multiprocessing.get_context("spawn")
    ready: Any = threading.Barrier(count + 1) if kind == "threads" else spawn.Barrier(count + 1)
    answers: Any = [] if kind == "threads" else spawn.SimpleQueue()
    make: Any = threading.Thread if kind == "threads" else spawn.Process
    workers = [make(target=_tell, args=(answers, codec, width, seconds, ready)) for _ in range(count)]
    for worker in workers:
        worker.start()
    ready.wait()
    own = meanwhile()
    if kind == "threads":
        for worker in workers:
            worker.join()
        return [own, *answers]
    counts = [answers.get() for _ in workers]
    for worker in workers:
        worker.join()
    return [own, *counts]


def _tell(answers: Any, codec: str, width: int, seconds: float, ready: Any) -> None:
    times = decode_for(codec, width, seconds, ready)
    (answers.append if isinstance(answers, list) else answers.put)(times)


def measure(codec: str, width: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Ratios of each round."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        alone, quiet = decode_for(codec, width, seconds), launch_for(seconds)
        for kind in ("threads", "processes"):
            two = beside(kind, 2, codec, width, seconds, lambda: 0)
            one = beside(kind, 1, codec, width, seconds, lambda: launch_for(seconds))
            found.setdefault(f"two {kind}", []).append(sum(two) / alone)
            found.setdefault(f"python beside {kind}", []).append(one[0] / quiet)
    return {"ratios": found, "medians": {name: statistics.median(values) for name, values in found.items()}}


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = Parser(
        prog="python -m benchmarks.loader.threads",
        description=(__doc__ or "").splitlines()[0],
        examples="python -m benchmarks.loader.threads --seconds 2 --rounds 5",
    )
    parser.add_argument("--hidden", type=int, default=7168, help="width of the target")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for the result")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    facts, width = machine(torch.device("cpu")), args.hidden
    result = {codec: measure(codec, width, args.seconds, args.rounds) for codec in CODECS}
    table = Table(title=f"decoders of states {width} wide", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.caption, table.caption_justify = machine_line(facts), "left"
    table.add_column("")
    for name in next(iter(result.values()))["medians"]:
        table.add_column(name, justify="right")
    for codec, one in result.items():
        table.add_row(codec, *(f"{value:.2f}" for value in one["medians"].values()))
    publish(table, {"machine": facts, "codecs": result}, args.out, "loader_threads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
