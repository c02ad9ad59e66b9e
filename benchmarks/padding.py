"""How many tokens a target computes for each token that is kept: padding, by the width of the planner's window.

    python -m benchmarks.padding [--prepared RUN/prepared/train] [--batch-tokens 4096]

Counted, not timed. `by length` is the plan that cuts the sorted records into as few batches as it can, longest first;
`planned` is `data_prep.units.plan_batches`, which puts a boundary where it saves more than a batch is worth.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import load_from_disk
from rich import box
from rich.table import Table

from benchmarks.side_by_side import publish
from data_prep.units import WINDOW_BATCHES, Batches, padded_tokens, plan_batches
from eagle3.command_line import Parser, one_line_errors
from eagle3.config import require

Planner = Callable[[Sequence[int], int], Batches]
WINDOWS = (1, 2, 4, 8, 16, WINDOW_BATCHES, 2 * WINDOW_BATCHES)


EXAMPLES = """
python -m benchmarks.padding
python -m benchmarks.padding --prepared RUN/prepared/train --batch-tokens 4096
"""


def spread_lengths(records: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths as long-answer chat sets have them: log-normal around 900 tokens (sigma 0.8), cut at `longest`."""
    chance = random.Random(seed)
    return [max(32, min(longest, int(chance.lognormvariate(math.log(900), 0.8)))) for _ in range(records)]


def fewest(lengths: Sequence[int], batch_tokens: int) -> Batches:
    """Longest first, each batch as full as it can be."""
    batches: Batches = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def waste(lengths: Sequence[int], batch_tokens: int, window: int, planner: Planner) -> tuple[float, int]:
    """Computed tokens a token kept, and batches, over records in a shuffled order."""
    order = list(range(len(lengths)))
    random.Random(0).shuffle(order)
    padded = batches = held = 0
    part: list[int] = []
    for place, index in enumerate(order, 1):
        part.append(lengths[index])
        held += lengths[index]
        if held >= window or place == len(order):
            plan = planner(part, batch_tokens)
            padded, batches = padded + padded_tokens([plan], part), batches + len(plan)
            part, held = [], 0
    return padded / sum(lengths), batches


def as_table(result: dict[str, Any]) -> Table:
    """One line a window."""
    title = (
        f"padding: {result['lengths']}, {result['records']:,} records, mean {result['mean']:.0f} tokens, "
        f"longest {result['longest']:,}\nbatches of at most {result['batch_tokens']:,} padded tokens"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("window", justify="right")
    for name in ("by length", "planned"):
        table.add_column(name, justify="right")
        table.add_column("batches", justify="right")
    for row in result["rows"]:
        cells = [
            f"{row[name][0]:.3f}" if i == 0 else f"{row[name][1]:,}" for name in ("fewest", "planned") for i in (0, 1)
        ]
        table.add_row(f"{row['window_tokens']:,}", *cells)
    return table


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 on an expected failure, told in one line."""
    parser = Parser(
        prog="python -m benchmarks.padding",
        description=(__doc__ or "").splitlines()[0],
        examples=EXAMPLES,
    )
    parser.add_argument("--prepared", type=Path, help="a prepared split; log-normal lengths without it")
    parser.add_argument("--records", type=int, default=20000, help="records with log-normal lengths")
    parser.add_argument("--longest", type=int, default=2048, help="at which these are cut")
    parser.add_argument("--batch-tokens", type=int, default=16384, help="padded tokens a forward pass")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for padding.txt and padding.json")
    args = parser.parse_args(argv)
    for name in ("records", "longest", "batch_tokens"):
        require(getattr(args, name) > 0, f"--{name.replace('_', '-')}", getattr(args, name), "a positive integer")
    if args.prepared:
        lengths = [len(ids) for ids in load_from_disk(str(args.prepared))["input_ids"]]
    else:
        lengths = spread_lengths(args.records, args.longest)
    rows = []
    for batches in WINDOWS:
        window = batches * args.batch_tokens
        found = {kind.__name__: waste(lengths, args.batch_tokens, window, kind) for kind in (fewest, plan_batches)}
        rows.append({"window_tokens": window, "fewest": found["fewest"], "planned": found["plan_batches"]})
    result = {
        "lengths": str(args.prepared) if args.prepared else "log-normal lengths",
        "records": len(lengths),
        "mean": sum(lengths) / len(lengths),
        "longest": max(lengths),
        "batch_tokens": args.batch_tokens,
        "rows": rows,
    }
    publish(as_table(result), result, args.out, "padding")
    return 0


if __name__ == "__main__":
    sys.exit(main())
