"""What each step of the selection of training samples costs, a record.

    python -m benchmarks.selection [--records 20000] [--chars 800] [--target PATH]

The same made-up records go through the selection with more and more switched on: reading and exact duplicates, then
language detection, near-duplicates, evaluation prompts, and lengths by the target's tokenizer where one is given. Each
way is run in turn and timed in CPU seconds, so that the figures hold on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.side_by_side import machine, machine_line, open_device, publish
from data_prep.select.config import SelectConfig, SourceConfig
from data_prep.select.stage import select
from eagle3.command_line import Parser, one_line_errors
from eagle3.config import require

DUPLICATES = 0.1  # share of records that are a near copy of an earlier one
SYLLABLES = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "an", "er", "ol")]


EXAMPLES = """
python -m benchmarks.selection --records 20000
python -m benchmarks.selection --target TARGET --chars 1200
"""


def write_records(path: Path, records: int, chars: int) -> None:
    """Prompts of random words, `chars` characters in the mean, a tenth of them near copies, each with an answer."""
    rng = random.Random(0)
    words = ["".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 4))) for _ in range(20_000)]
    kept: list[list[str]] = []
    with path.open("w", encoding="utf-8") as handle:
        for _ in range(records):
            if kept and rng.random() < DUPLICATES:
                said = list(rng.choice(kept))
                said[rng.randrange(len(said))] = rng.choice(words)
            else:
                said = rng.choices(words, k=max(3, int(rng.expovariate(6.0 / chars))))
                kept.append(said)
            turns = [{"role": "user", "content": " ".join(said)}, {"role": "assistant", "content": "an answer " * 40}]
            handle.write(json.dumps({"messages": turns}) + "\n")


def ways(path: Path, records: int, exclude: list[str], tokenizer: Any) -> dict[str, tuple[SelectConfig, Any]]:
    """Name -> settings and tokenizer, each with one step more than the one before."""
    source = SourceConfig(path=str(path), name="made-up", language="en")
    cfg = SelectConfig(sources=[source], total=records // 10, dedupe="exact")
    found = {"read, exact duplicates": (cfg, None)}
    cfg = replace(cfg, sources=[replace(source, language="auto")])
    found["+ language"] = (cfg, None)
    cfg = replace(cfg, dedupe="near")
    found["+ near-duplicates"] = (cfg, None)
    cfg = replace(cfg, exclude=exclude)
    found["+ evaluation prompts"] = (cfg, None)
    if tokenizer is not None:
        found["+ lengths in tokens"] = (
            replace(cfg, length_buckets={256: 0.5, 1_000_000: 0.5}, shortfall="report"),
            tokenizer,
        )
    return found


def measure(found: dict[str, tuple[SelectConfig, Any]], folder: Path, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each way, by round: of all threads of this process, whatever else the machine does."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, (cfg, tokenizer) in found.items():
            start = time.process_time()
            select(cfg, folder / "out", tokenizer)
            seconds[name].append(time.process_time() - start)
    return seconds


def as_table(result: dict[str, Any]) -> Table:
    """One line a way."""
    title = f"selection: {result['records']:,} records, prompts of {result['mean_chars']:,.0f} characters in the mean"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.caption, table.caption_justify = machine_line(result["machine"]), "left"
    for heading in ("", "CPU s", "records/s", "us a record more", "times as long"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    first = before = statistics.median(next(iter(result["seconds"].values())))
    for name, seconds in result["seconds"].items():
        median = statistics.median(seconds)
        more = 1e6 * (median - before) / result["records"]
        cells = (f"{median:.2f}", f"{result['records'] / median:,.0f}", f"{more:,.0f}", f"{median / first:.2f}")
        table.add_row(name, *cells)
        before = median
    return table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m benchmarks.selection",
        description=(__doc__ or "").splitlines()[0],
        examples=EXAMPLES,
    )
    parser.add_argument("--records", type=int, default=20_000, help="records of the source")
    parser.add_argument("--chars", type=int, default=800, help="characters of a prompt, in the mean")
    parser.add_argument("--target", type=Path, help="a Hugging Face folder whose tokenizer measures lengths")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the tokenizer's own Python")
    parser.add_argument("--exclude", nargs="*", default=["data/eval", "data/eval/samples"], help="evaluation prompts")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench"), help="folder for selection.txt and selection.json"
    )
    return parser.parse_args(argv)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 on an expected failure, told in one line."""
    args = parse(argv)
    for name in ("records", "chars", "rounds"):
        require(getattr(args, name) > 0, f"--{name}", getattr(args, name), "a positive integer")
    require(args.records >= 100, "--records", args.records, "at least 100")
    tokenizer = None
    if args.target:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.target, trust_remote_code=args.trust_remote_code)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".select-", dir=args.out) as name:
        folder = Path(name)
        write_records(folder / "records.jsonl", args.records, args.chars)
        write_records(folder / "few.jsonl", 100, args.chars)
        measure(ways(folder / "few.jsonl", 100, args.exclude, tokenizer), folder, 1)  # loads what is loaded once
        found = ways(folder / "records.jsonl", args.records, args.exclude, tokenizer)
        seconds = measure(found, folder, args.rounds)
        size = (folder / "records.jsonl").stat().st_size
    result = {
        "machine": machine(open_device("cpu")),
        "records": args.records,
        "mean_chars": size / args.records - 490,  # less the answer and the JSON around both
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "seconds": seconds,
    }
    publish(as_table(result), result, args.out, "selection")
    return 0


if __name__ == "__main__":
    sys.exit(main())
