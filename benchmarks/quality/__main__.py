"""Accept length of training variants and of SpecForge on the same data and steps.

    python -m benchmarks.quality --plan screen            one setting at a time, half a run, predicted tau
    python -m benchmarks.quality --plan final --seeds 3   the best against SpecForge, measured by the engine

All variants share one prepared set and one store under `--work`; what is finished there is not run again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.quality.runs import Outcome, Setting, run_variant, share_data
from benchmarks.quality.table import as_table, gather
from benchmarks.quality.variants import PLANS, chosen
from benchmarks.side_by_side import machine, open_device, publish
from eagle3.atomic import write_json
from eagle3.command_line import Parser, one_line_errors
from eagle3.config import require
from train.front.config import PROJECT_ROOT

DATA = ("data.max_samples=800", "data.val_fraction=0.2")  # the demo's answers, with more of them held out
SCREEN_STEPS = 160


EXAMPLES = """
python -m benchmarks.quality --plan screen --only fitted wsd
python -m benchmarks.quality --plan final --seeds 3
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m benchmarks.quality",
        description=(__doc__ or "").splitlines()[0],
        examples=EXAMPLES,
    )
    parser.add_argument("--plan", default="screen", choices=sorted(PLANS), help="which variants")
    parser.add_argument("--only", nargs="+", default=[], help="names of variants; default: all of the plan")
    parser.add_argument("--seeds", type=int, default=0, help="how many (default: 1 for screen, 3 for final)")
    parser.add_argument("--steps", type=int, default=-1, help="optimizer steps; 0 = an epoch (default: 160 for screen)")
    parser.add_argument("--measure", action=argparse.BooleanOptionalAction, help="serve and measure (final: yes)")
    parser.add_argument("--preset", default="smollm2", help="of conf/conf")
    parser.add_argument("--set", nargs="+", default=list(DATA), help="settings that all variants share")
    parser.add_argument("--work", type=Path, default=Path("runs/quality"), help="shared data and all runs")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for quality-PLAN.txt and .json")
    specforge = Path(".venv-specforge/bin/python")
    parser.add_argument("--specforge", type=Path, default=specforge, help="Python of SpecForge's environment")
    return parser.parse_args(argv)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 on an expected failure, told in one line."""
    args = parse(argv)
    screening = args.plan == "screen"
    variants = chosen(args.plan, args.only)
    seeds = args.seeds or (1 if screening else 3)
    require(seeds > 0, "--seeds", seeds, "a positive integer")
    steps = args.steps if args.steps >= 0 else (SCREEN_STEPS if screening else 0)
    work = (PROJECT_ROOT / args.work).resolve()
    setting = Setting(args.preset, tuple(args.set), steps, work, (PROJECT_ROOT / args.specforge).absolute())
    measure = not screening if args.measure is None else args.measure
    facts = machine(open_device("cpu"))
    share_data(setting)
    outcomes: list[Outcome] = []
    for seed in range(seeds):
        for variant in variants:
            print(f"quality: {variant.name}, seed {seed}", flush=True)
            outcomes.append(run_variant(setting, variant, seed, measure))
            write_json(args.out / f"quality-{args.plan}.partial.json", {"rows": gather(variants, outcomes)})
    rows = gather(variants, outcomes)
    table = as_table(rows, f"{args.plan}: {steps or 'an epoch of'} steps, {' '.join(args.set)}", facts)
    result = {"machine": facts, "plan": args.plan, "steps": steps, "shared": list(args.set), "rows": rows}
    publish(table, result, args.out, f"quality-{args.plan}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
