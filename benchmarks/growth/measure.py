"""Time and memory of every point of every axis; the points take turns, so that a slow minute hits all alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.growth.axes import Axis, needed, plain_bytes
from benchmarks.growth.fits import fit
from benchmarks.memory import MALLOC, resident, settle
from benchmarks.step import Case, make_sides
from eagle3.errors import RedraftError

SIDES = ("redraft", "plain")


@dataclass
class Point:
    """One value of one axis on one side.

    Args:
        axis, value: where it stands.
        side: "redraft" or "plain".
        case: the step.
        seconds: of each round.
        bytes: that the step adds to the process at its peak; 0 = not measured.
    """

    axis: str
    value: int
    side: str
    case: Case
    seconds: list[float] = field(default_factory=list)
    bytes: int = 0


def points_of(axes: Sequence[Axis], sides: Sequence[str], limit: int) -> list[Point]:
    """The points of all axes; the plain side only where about `limit` bytes hold what it keeps."""
    return [
        Point(axis.name, value, side, axis.case(value))
        for axis in axes
        for value in axis.values
        for side in sides
        if side != "plain" or plain_bytes(axis.case(value)) <= limit
    ]


def time_in_turns(calls: Sequence[tuple[list[float], Callable[[], Any]]], rounds: int) -> None:
    """Run every call once untimed, then in rounds; each round begins one call further on.

    Args:
        calls: where a call's seconds go, and the call.
        rounds: how often each is timed.
    """
    for _, call in calls:
        call()
    for number in range(rounds):
        first = number * len(calls) // rounds
        for kept, call in (*calls[first:], *calls[:first]):
            start = time.perf_counter()
            call()
            kept.append(time.perf_counter() - start)


def time_points(points: Sequence[Point], rounds: int) -> None:
    """Fill in the seconds."""
    built: dict[Case, dict[str, Callable[[], float]]] = {}
    for point in points:
        if point.case not in built:
            built[point.case] = make_sides(point.case)[0]
    time_in_turns([(point.seconds, built[point.case][point.side]) for point in points], rounds)


def measure_memory(points: Sequence[Point]) -> None:
    """Fill in the bytes: a process of its own builds each point in turn and marks how far one step raises it.

    Raises:
        RedraftError: it failed.
    """
    told = json.dumps([{"side": point.side, "case": asdict(point.case)} for point in points])
    command = [sys.executable, "-m", "benchmarks.growth.measure"]
    done = subprocess.run(
        command, input=told, env={**os.environ, **MALLOC}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RedraftError(
            "the memory run failed", where="benchmarks.growth", why=last, mend="run it alone to see all of its words"
        )
    for point, size in zip(points, json.loads(done.stdout.splitlines()[-1]), strict=True):
        point.bytes = size


def raised_by(case: Case, side: str) -> int:
    """Bytes by which one step of one side raises this process's resident size above what it was built with."""
    run = make_sides(case)[0][side]
    settle()
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def row_of(axis: Axis, side: str, points: Sequence[Point]) -> dict[str, Any] | None:
    """Medians and fits of one side along one axis; None with fewer than two points."""
    mine = [point for point in points if point.axis == axis.name and point.side == side]
    if len(mine) < 2:
        return None
    values, seconds = [point.value for point in mine], [median(point.seconds) for point in mine]
    flops = [needed(point.case) for point in mine]
    row: dict[str, Any] = {
        "axis": axis.name,
        "label": axis.label,
        "side": side,
        "values": values,
        "rounds": [point.seconds for point in mine],
        "seconds": seconds,
        "time": fit(values, seconds).to_dict(),
        "needed_flops": flops,
        "theory": fit(values, flops).to_dict(),
    }
    sizes = [point.bytes for point in mine]
    if min(sizes) > 0:
        row |= {"bytes": sizes, "memory": fit(values, sizes).to_dict()}
    return row


def main() -> int:
    """The process that memory is measured in: cases on stdin, bytes on stdout."""
    print(json.dumps([raised_by(Case(**one["case"]), one["side"]) for one in json.load(sys.stdin)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
