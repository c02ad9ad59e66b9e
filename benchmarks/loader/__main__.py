"""How long steps of a GPU's length wait for their data, from stores far larger than memory.

    python -m benchmarks.loader [--kinds holes raw lossless fp8 int8] [--workers 0 1 2] [--step-seconds S]

Each case runs in a process of its own: the real loader on a store of Kimi-K2.5's dimensions, against steps of a given
length (by default what the plan's arithmetic gives for one H200 and as many rows), which keep a processor busy. `holes`
is a raw store of files with nothing in them, ten times as large as the memory; the others list few encoded records
often enough to be as large, and the page cache is made to forget what was read. The line `plain` is the plain way:
records copied out, joined and packed, one step ahead, in a thread.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.loader.drive import PLAIN, Case, run
from benchmarks.loader.need import needs, preset, rows_per_second
from benchmarks.loader.stores import SPARSE, Shape, make_store, total_memory
from benchmarks.side_by_side import machine, machine_line, publish
from eagle3.command_line import Parser, one_line_errors
from eagle3.config import require
from eagle3.errors import RedraftError
from eagle3.state_codec import CODECS

EXAMPLES = """
python -m benchmarks.loader
python -m benchmarks.loader --kinds lossless fp8 --workers 1 2 --no-plain --sleep --steps 12
"""


def measure(case: Case) -> dict[str, Any]:
    """Run a case in a process of its own.

    Raises:
        RedraftError: it failed; its own words stand above.
    """
    command = [sys.executable, "-m", "benchmarks.loader", "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RedraftError("a case failed", where=f"{case.kind}, {case.workers} workers", mend="see above")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def as_table(result: dict[str, Any]) -> Table:
    """One line a case."""
    first = result["cases"][0]["case"]
    rows = first["documents"] * (first["shape"]["tokens"] - 1)
    table = Table(
        title=f"loader: {first['steps']} steps of {first['step_seconds']:.3f} s on {rows:,} rows of "
        f"{first['shape']['sites'] + 1} x {first['shape']['hidden']}, store {result['store_bytes'] / 2**30:,.0f} GiB, "
        f"memory {result['memory_bytes'] / 2**30:,.0f} GiB",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        caption=machine_line(result["machine"]),
        caption_justify="left",
    )
    headings = ("store", "workers", "wait", "median", "p99", "max ms", "MB/s", "worker", "core", "MiB", "each")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "store" else "right", no_wrap=True)
    for one in result["cases"]:
        case, rate = one["case"], one["worker_bytes_per_s"]
        each = max(one["worker_bytes"], default=0)
        table.add_row(
            case["kind"],
            "plain" if case["workers"] == PLAIN else str(case["workers"]),
            f"{one['share']:.2%}",
            *(f"{one[name] * 1e3:,.1f}" for name in ("median", "p99", "max")),
            f"{one['bytes_per_s'] / 1e6:,.0f}",
            *((f"{rate / 1e6:,.0f}", f"{one['cpu_bytes_per_s'] / 1e6:,.0f}") if rate else ("-", "-")),
            f"{(one['own_bytes'] + one['ring_bytes']) / 2**20:,.0f}",
            f"{each / 2**20:,.0f}" if each else "-",
        )
    return table


def needs_table(found: list[dict[str, Any]]) -> Table:
    """What a node needs, one line a codec."""
    table = Table(title="8 H200 at Kimi-K2.5's dimensions", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for heading in ("store", "rate by", "tok/s", "disk GB/s", "states GB/s", "cores"):
        table.add_column(heading, justify="left" if heading in ("store", "rate by") else "right", no_wrap=True)
    for one in found:
        workers = "-" if one["workers"] is None else f"{one['workers']:.1f}"
        cells = (f"{one['rows_per_s']:,.0f}", f"{one['disk_gb_s']:.2f}", f"{one['states_gb_s']:.2f}", workers)
        table.add_row(one["codec"], one["source"], *cells)
    return table


def best_rates(cases: list[dict[str, Any]]) -> dict[str, float]:
    """Codec -> the most bytes of states that a second of a processor gave."""
    rates: dict[str, float] = {}
    for one in cases:
        if one["cpu_bytes_per_s"]:
            kind = one["case"]["kind"]
            rates[kind] = max(rates.get(kind, 0.0), one["cpu_bytes_per_s"])
    return rates


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m benchmarks.loader",
        description=(__doc__ or "").splitlines()[0],
        examples=EXAMPLES,
    )
    parser.add_argument("--kinds", nargs="+", default=[SPARSE, *CODECS], choices=[SPARSE, *CODECS], help="of store")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="train.loader_workers, one a case")
    parser.add_argument("--no-plain", action="store_true", help="leave out the plain way")
    parser.add_argument("--hidden", type=int, default=7168, help="width of the target")
    parser.add_argument("--sites", type=int, default=3, help="aux states, beside the teacher's")
    parser.add_argument("--tokens", type=int, default=1024, help="of a record")
    parser.add_argument("--documents", type=int, default=4, help="records a step")
    parser.add_argument("--steps", type=int, default=40, help="timed steps")
    parser.add_argument("--step-seconds", type=float, help="of a step; by default one H200's by the plan's arithmetic")
    parser.add_argument("--sleep", action="store_true", help="sleep through a step instead of keeping a processor busy")
    parser.add_argument("--times-memory", type=float, default=10.0, help="size of the stores")
    parser.add_argument("--distinct", type=int, default=8, help="encoded records that are really there")
    parser.add_argument("--prefetch-steps", type=int, default=4, help="train.prefetch_steps")
    parser.add_argument("--prefetch-mib", type=int, default=2048, help="train.prefetch_mib")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for loader.txt and loader.json")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    """All cases, and what follows for a node."""
    for name in ("hidden", "sites", "tokens", "documents", "distinct"):
        require(getattr(args, name) > 0, f"--{name}", getattr(args, name), "a positive integer")
    require(args.steps > 2, "--steps", args.steps, "3 or more")
    config, shape = preset(), Shape(args.sites, args.hidden, args.tokens)
    seconds = args.step_seconds
    if seconds is None:
        seconds = args.documents * (args.tokens - 1) / rows_per_second(config)
    size = int(args.times_memory * total_memory())
    args.out.mkdir(parents=True, exist_ok=True)
    facts, cases = machine(torch.device("cpu")), []
    folder = Path(tempfile.mkdtemp(prefix=".loader-", dir=args.out))  # the disk that a run would use
    try:
        for kind in args.kinds:
            store = make_store(folder / kind, kind, shape, size, args.distinct)
            for workers in [*([] if args.no_plain else [PLAIN]), *args.workers]:
                ahead = (args.prefetch_steps, args.prefetch_mib)
                case = Case(
                    str(store), kind, shape, args.documents, workers, args.steps, seconds, not args.sleep, *ahead
                )
                cases.append(measure(case))
                print(f"{kind}, {workers} workers: waited {cases[-1]['share']:.2%}", file=sys.stderr, flush=True)
            shutil.rmtree(store)
    finally:
        shutil.rmtree(folder)
    found = needs(config, best_rates(cases))
    return {"machine": facts, "store_bytes": size, "memory_bytes": total_memory(), "cases": cases, "needs": found}


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 on an expected failure, told in one line."""
    args = parse(argv)
    if args.case:
        print(json.dumps(run(Case.from_dict(json.loads(args.case)))))
        return 0
    result = run_all(args)
    publish(as_table(result), result, args.out, "loader")
    Console(highlight=False).print(needs_table(result["needs"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
