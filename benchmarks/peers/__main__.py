"""The training steps of SpecForge and speculators beside ours, on the same draft and data, in turns.

    python -m benchmarks.peers [--full] [--hidden 576] [--length 512] [--steps 3 7] [--device cuda]

Every side computes in a process of its own, in its own environment (`make peers`). Their losses and gradients must
agree with ours before anything is timed. `docs/benchmarks.md` says how each peer is used.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.cases import Case, grid
from benchmarks.peers.measure import Budget, measure
from benchmarks.peers.sides import PEERS, open_sides
from benchmarks.peers.table import as_table, profile_lines
from benchmarks.side_by_side import machine, open_device, publish
from eagle3.command_line import Parser, one_line_errors
from eagle3.config import require

EXAMPLES = """
python -m benchmarks.peers
python -m benchmarks.peers --hidden 2048 --steps 7 --device cuda
python -m benchmarks.peers --set speculators.head=frozen specforge.batching=padded
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m benchmarks.peers",
        description=(__doc__ or "").splitlines()[0],
        examples=EXAMPLES,
    )
    parser.add_argument("--full", action="store_true", help="all 24 cells of the grid")
    parser.add_argument("--hidden", type=int, nargs="+", help="widths (576 1024 2048)")
    parser.add_argument("--draft-vocab", type=int, nargs="+", help="draft vocabularies (8192 32768)")
    parser.add_argument("--length", type=int, nargs="+", help="tokens of the longest document (512 2048)")
    parser.add_argument("--steps", type=int, nargs="+", help="unrolled steps K (3 7)")
    parser.add_argument("--sequences", type=int, default=1, help="groups of --length tokens in a batch")
    parser.add_argument(
        "--lengths", choices=["mixed", "full"], default="mixed", help="documents as in the demo, or full"
    )
    parser.add_argument("--share", type=float, default=0.0, help="tokens to be learnt (0: as in the demo's documents)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, at most")
    parser.add_argument("--case-seconds", type=float, default=120, help="rounds beyond the third end before this")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="trainers to compare with")
    parser.add_argument("--set", nargs="+", default=[], metavar="SIDE.KEY=VALUE", help="a setting of a side")
    parser.add_argument("--profile", action="store_true", help="tell which operators take the time of a step")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="auto: bfloat16 on GPUs"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--threads", type=int, default=0, help="of each side (0: OMP_NUM_THREADS, or torch's choice)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for peers.txt and peers.json")
    return parser.parse_args(argv)


def cases(args: argparse.Namespace, dtype: str) -> list[Case]:
    """The cells asked for.

    Raises:
        ConfigError: a size that cannot be.
    """
    cells = grid((args.hidden, args.draft_vocab, args.length, args.steps), args.full)
    shared: dict[str, Any] = {"sequences": args.sequences, "lengths": args.lengths, "share": args.share}
    return [Case(*cell, **shared, device=args.device, dtype=dtype, seed=args.seed) for cell in cells]


def run(args: argparse.Namespace) -> None:
    """Measure case after case; the result is written after each."""
    require(args.rounds > 0, "--rounds", args.rounds, "a positive integer")
    device = open_device(args.device)
    dtype = args.dtype if args.dtype != "auto" else ("bfloat16" if device.type == "cuda" else "float32")
    sides, wanted, started = open_sides(args.peers, args.set), cases(args, dtype), time.monotonic()
    threads = args.threads or torch.get_num_threads()
    facts = machine(device) | {"threads": threads}
    budget = Budget(args.rounds, args.case_seconds, threads, args.profile)
    rows: list[dict[str, Any]] = []

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)

    for case in wanted:
        with tempfile.TemporaryDirectory(prefix="peers-", dir=os.environ.get("TMPDIR")) as folder:
            rows.append(measure(case, sides, budget, Path(folder), say))
        for line in profile_lines(rows[-1]):
            print(line)
        publish(as_table(rows, facts), {"machine": facts, "rows": rows}, args.out, "peers")


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 on an expected failure, told in one line."""
    run(parse(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
