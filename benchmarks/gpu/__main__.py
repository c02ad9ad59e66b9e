"""Numerics, matrix rate, training step at Kimi-K2.5's dimensions, extraction and copies, within a few minutes.

    python -m benchmarks.gpu [--device cuda] [--minutes 8] [--only step]
    python -m benchmarks.gpu --device cpu --small

Results stand in `runs/bench/gpu.txt` and `gpu.json` after every case. Exit codes: 0 every case that was begun is done
and right; 1 some case failed or is wrong (the results say which); 2 bad arguments; 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engines import process_group
from benchmarks.gpu.plan import SECTIONS, Plan
from benchmarks.gpu.report import publish
from benchmarks.gpu.synthetic import KIMI, SMALL
from benchmarks.gpu.timebox import FAILED, WRONG, Clock, Outcome, run_tasks
from benchmarks.side_by_side import machine, open_device
from eagle3.command_line import Parser, one_line_errors
from eagle3.config import require

NO_GPU = 3


EXAMPLES = """
python -m benchmarks.gpu --minutes 4
python -m benchmarks.gpu --device cpu --small
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m benchmarks.gpu",
        description=(__doc__ or "").splitlines()[0],
        examples=EXAMPLES,
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu with --small")
    parser.add_argument("--minutes", type=float, default=8.0, help="no case is begun that would end later")
    parser.add_argument("--small", action="store_true", help="tiny dimensions: shows that the script works")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for gpu.txt and gpu.json")
    return parser.parse_args(argv)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the module's docstring has the exit codes."""
    args = parse(argv)
    clock = Clock(60 * args.minutes)
    require(args.minutes > 0, "--minutes", args.minutes, "a positive number")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("no GPU here: the script stands ready; try it with --device cpu --small", file=sys.stderr)
        return NO_GPU
    device = open_device(args.device)
    name = device.type
    require(name == "cuda" or args.small, "--device", args.device, "cuda, or add --small: Kimi's sizes need a GPU")
    outcomes = run(args, device, clock)
    return 1 if any(one.state in (FAILED, WRONG) for one in outcomes) else 0


def run(args: argparse.Namespace, device: torch.device, clock: Clock) -> list[Outcome]:
    """Everything that was asked for, as far as the time goes."""
    began = time.perf_counter()
    sizes = SMALL if args.small else KIMI
    with process_group(device) as (world, engine):
        title = f"on a GPU, at {sizes.name}'s dimensions" if not args.small else f"small dimensions on {device.type}"
        head: dict[str, Any] = {"title": title, "machine": machine(device), "engine": engine, "minutes": args.minutes}
        text = ""

        def keep(outcomes: list[Outcome]) -> None:
            nonlocal text
            text = publish({**head, "seconds": time.perf_counter() - began}, outcomes, args.out)
            last = outcomes[-1]
            print(f"{last.section}, {last.name}: {last.state} in {last.seconds:.1f} s", flush=True)

        outcomes = run_tasks(Plan(sizes, device, world, args.out).tasks(tuple(args.only)), clock, keep)
    print(f"\n{text}written: {args.out / 'gpu'}.txt and .json")
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
