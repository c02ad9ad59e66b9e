"""Does it matter who wrote the answers? The same questions, answered by the target and by people, one draft each.

    python -m benchmarks.quality.answers --steps 100

Both drafts are judged on what a server will see: the target's own answers to questions that neither has learnt from.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.quality.predict import held_out_figures
from benchmarks.quality.questions import write_questions
from benchmarks.quality.runs import Outcome, Setting, run_process, run_variant, share_data, trained_parts
from benchmarks.quality.variants import Variant
from benchmarks.side_by_side import machine, machine_line, open_device, publish
from data_prep.prepare import in_validation
from eagle3.atomic import write_text
from eagle3.command_line import Parser, one_line_errors
from eagle3.config import require
from train.front.config import PROJECT_ROOT
from train.front.context import Run
from train.front.records import prepared_counts
from train.front.source import open_source
from train.front.stages import train_job

AUTHORS = {"own": "the target", "foreign": "the documentation's authors"}
HELD_OUT = 0.15
PRESET = Variant("preset", about="the preset as it is")

EXAMPLES = """
python -m benchmarks.quality.answers --steps 100
python -m benchmarks.quality.answers --questions 400 --steps 0
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m benchmarks.quality.answers",
        description=(__doc__ or "").splitlines()[0],
        examples=EXAMPLES,
    )
    parser.add_argument("--questions", type=int, default=260, help="about Python's standard library, at most (260)")
    parser.add_argument("--answer-tokens", type=int, default=130, help="of one of the target's answers (130)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps; 0 = an epoch (100)")
    parser.add_argument("--seed", type=int, default=0, help="of training (0)")
    parser.add_argument("--measure", action=argparse.BooleanOptionalAction, default=True, help="measure tau, too")
    parser.add_argument("--preset", default="smollm2", help="of conf/conf")
    parser.add_argument("--work", type=Path, default=Path("runs/answers"), help="questions, answers and all runs")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for answers.txt and .json")
    return parser.parse_args(argv)


def setting_of(args: argparse.Namespace, author: str) -> Setting:
    """The runs that learn from one author's answers; ids decide what is held out, so it is the same questions."""
    work = (PROJECT_ROOT / args.work).resolve()
    shared = (
        f"data.sources=[{work / author}.jsonl]",
        f"data.max_samples={args.questions}",
        f"data.val_fraction={HELD_OUT}",
        f"eval.prompt_sets=[{work / 'asked.jsonl'}]",
        "eval.max_prompts=16",
    )
    return Setting(args.preset, shared, args.steps, work / author, Path("none"))


def write_held_out(work: Path, seed: int) -> None:
    """The questions that are held out, for the engine to answer."""
    lines = (work / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if in_validation(json.loads(line)["id"], seed, HELD_OUT)]
    write_text(work / "asked.jsonl", "".join(kept))


def own_answers(args: argparse.Namespace, target: str, work: Path) -> None:
    """The target's answers to the questions, unless they are there."""
    if (work / "own.jsonl").exists():
        return
    files = ("--prompts", str(work / "prompts.jsonl"), "--out", str(work / "own.jsonl"))
    options = ("--target", target, "--max-new-tokens", str(args.answer_tokens))
    run_process([sys.executable, "scripts/write_answers.py", *options, *files], "answering the questions")


def on_own_answers(run: Run, judge: Run) -> dict[str, Any]:
    """Figures of `run`'s trained draft on `judge`'s held-out answers.

    Raises:
        RedraftError: a file of either is missing or broken.
    """
    parts = trained_parts(run)
    source = open_source("val", **train_job(judge, judge.run_dir / "train").source_args)
    return held_out_figures(parts.draft, parts.teacher, source, run.config.eval.num_steps)


def as_table(rows: list[dict[str, Any]], title: str, facts: dict[str, Any]) -> Table:
    """One line an author."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.caption, table.caption_justify = machine_line(facts), "left"
    table.add_column("answers by", no_wrap=True)
    for heading in (
        "answers\nlearnt",
        "tokens\nlearnt",
        "predicted tau,\nsame author",
        "predicted tau",
        "measured tau",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        low, high = row["tau_range"] or (0.0, 0.0)
        measured = f"{row['tau']:.3f} ({low:.2f}-{high:.2f})" if row["tau"] else ""
        numbers = (f"{row['answers']:,}", f"{row['tokens']:,}", f"{row['same']:.3f}", f"{row['predicted']:.3f}")
        table.add_row(AUTHORS[row["author"]], *numbers, measured)
    return table


def row_of(author: str, run: Run, outcome: Outcome, figures: dict[str, Any]) -> dict[str, Any]:
    """What is told of one author."""
    split = prepared_counts(run)["train"]
    return {
        "author": author,
        "answers": split["records"],
        "tokens": split["supervised_tokens"],
        "same": outcome.predicted,
        "predicted": figures["predicted_tau"],
        "accuracies": figures["acc"],
        "tau": outcome.tau,
        "tau_range": None if outcome.tau is None else [outcome.low, outcome.high],
        "command": outcome.command,
    }


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 on an expected failure, told in one line."""
    args = parse(argv)
    require(args.questions > 20, "--questions", args.questions, "more than 20")
    facts, work = machine(open_device("cpu")), (PROJECT_ROOT / args.work).resolve()
    settings = {author: setting_of(args, author) for author in AUTHORS}
    first = settings["own"].config(work / "own" / "base", args.seed, ())
    if not (work / "foreign.jsonl").exists():
        write_questions(work, args.questions)
    own_answers(args, first.target.path, work)
    write_held_out(work, first.data.seed)
    runs, outcomes = {}, {}
    for author, setting in settings.items():
        print(f"answers by {AUTHORS[author]}", flush=True)
        share_data(setting)
        outcomes[author] = run_variant(setting, PRESET, args.seed, args.measure)
        folder = setting.folder(PRESET, args.seed)
        runs[author] = Run.create(setting.config(folder, args.seed, ()), folder)
    rows = [row_of(a, runs[a], outcomes[a], on_own_answers(runs[a], runs["own"])) for a in AUTHORS]
    title = f"who wrote the answers: {args.steps or 'an epoch of'} steps, seed {args.seed}"
    publish(as_table(rows, title, facts), {"machine": facts, "steps": args.steps, "rows": rows}, args.out, "answers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
