"""How the cost of a training step grows with each size, of training with processes, of extraction with tokens.

    python -m benchmarks.growth [--axes length steps] [--rounds 5] [--no-plain] [--no-memory]

One small case is varied along one size at a time. All points take turns over rounds. Exponents are fitted to the
medians; beside them stands the exponent that the needed operations have over the same points (`benchmarks.flops`).
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group

from benchmarks.growth.axes import BASE, axes, chosen, sizes_of
from benchmarks.growth.measure import SIDES, measure_memory, points_of, row_of, time_points
from benchmarks.growth.report import fits_table, picture, points_table, processes_table
from benchmarks.growth.whole import measure_extraction, measure_processes
from benchmarks.side_by_side import machine, machine_line
from eagle3.atomic import write_json, write_text
from eagle3.command_line import Parser, one_line_errors
from eagle3.config import require

WHOLE = ("extraction", "processes")


EXAMPLES = """
python -m benchmarks.growth
python -m benchmarks.growth --axes length steps --no-memory
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m benchmarks.growth",
        description=(__doc__ or "").splitlines()[0],
        examples=EXAMPLES,
    )
    names = [*(axis.name for axis in axes()), *WHOLE]
    parser.add_argument(
        "--axes",
        nargs="+",
        choices=names,
        default=names,
        metavar="AXIS",
        help=f"sizes to vary, one at a time: {', '.join(names)}",
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--no-plain", action="store_true", help="redraft's step alone")
    parser.add_argument("--no-memory", action="store_true", help="times alone")
    parser.add_argument(
        "--plain-gib", type=float, default=1.5, help="the plain step runs where it keeps less than this"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for growth.txt, .json and .png")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for."""
    wanted = chosen(args.axes)
    sides = SIDES[:1] if args.no_plain else SIDES
    points = points_of(wanted, sides, int(args.plain_gib * 2**30))
    result: dict[str, Any] = {"machine": machine(torch.device("cpu")), "rounds": args.rounds, "base": sizes_of(BASE)}
    if points and not args.no_memory:
        print(f"memory: {len(points)} points", flush=True)
        measure_memory(points)
    if points:
        print(f"time: {len(points)} points, {args.rounds} rounds", flush=True)
        time_points(points, args.rounds)
    rows = [row_of(axis, side, points) for axis in wanted for side in sides]
    args.out.mkdir(parents=True, exist_ok=True)
    if "extraction" in args.axes:
        print("extraction", flush=True)
        rows.append(measure_extraction(args.rounds, args.out))
    result["rows"] = [row for row in rows if row is not None]
    if "processes" in args.axes:
        result["processes"] = measure_processes(args.rounds, args.out)
    return result


def publish(result: dict[str, Any], out: Path) -> None:
    """Print the tables; write them, all figures and the picture."""
    base = ", ".join(f"{name} {size:,}" for name, size in result["base"].items())
    tables: list[Any] = [f"around {base}; {result['rounds']} rounds; {machine_line(result['machine'])}", ""]
    if result["rows"]:
        tables += ["exponent +- standard error (between the two largest)", fits_table(result["rows"]), ""]
        tables += ["points: median seconds, their spread, MiB that the step adds", points_table(result["rows"])]
        picture(result["rows"], out / "growth.png")
    if "processes" in result:
        title = "training processes, one thread each, the same global batch"
        tables += ["", title, processes_table(result["processes"])]
    text = io.StringIO()
    Console(file=text, width=120, force_terminal=False, highlight=False).print(Group(*tables))
    write_text(out / "growth.txt", "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n")
    write_json(out / "growth.json", result)
    print(text.getvalue())
    print(f"written: {out / 'growth'}.txt, .json and .png")


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 on an expected failure, told in one line."""
    args = parse(argv)
    require(args.rounds > 0, "--rounds", args.rounds, "a positive integer")
    result = measure(args)
    publish(result, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
