"""Set finished runs side by side: `python -m eval.compare RUN_A RUN_B --out FOLDER`.

A run is a folder holding `eval/results.json` (or the `results.json` itself). The page shows every way of serving of
every run, so that a draft trained for another wiring can be seen served natively and served with its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from eagle3.command_line import Parser, one_line_errors
from eagle3.errors import DataError
from eval.checks import probe_beside
from eval.report import write_page
from eval.results import AcceptResult

COMPARED = ("num_steps", "temperature", "max_new_tokens", "engine", "target")


def load_run(path: Path) -> AcceptResult:
    """Results of a run folder.

    Raises:
        IntegrityError: there are none, or they are not whole.
    """
    nested = path / "eval" / "results.json"
    file = path if path.is_file() else nested if nested.exists() else path / "results.json"
    result = AcceptResult.load(file)
    if not any(one.sets for one in result.served):
        mend = "run the eval stage of that run again"
        raise DataError("nothing was measured", where=str(file), why="it holds no way of serving", mend=mend)
    return replace(result, probe=probe_beside(file) or result.probe)


def check_comparable(results: Sequence[AcceptResult]) -> None:
    """Refuse to compare runs measured differently.

    Raises:
        DataError: naming the setting, or the prompt set whose content differs.
    """
    first = results[0]
    for other in results[1:]:
        for name in COMPARED:
            mine, theirs = getattr(first, name), getattr(other, name)
            if mine != theirs:
                raise DataError(
                    "runs measured differently",
                    where=f"{first.title} and {other.title}",
                    why=f"{name} is {mine!r} and {theirs!r}",
                    mend="run the eval stage of both with the same settings",
                )
        mine, theirs = ([*dict.fromkeys(one.batch for one in result.served)] for result in (first, other))
        if mine != theirs:
            raise DataError(
                "runs measured at different batch sizes",
                where=f"{first.title} and {other.title}",
                why=f"{mine} and {theirs}",
                mend="run the eval stage of both with the same eval.batch_sizes",
            )
        if _prompt_keys(first) != _prompt_keys(other):
            raise DataError(
                "runs measured on different prompts",
                where=f"{first.title} and {other.title}",
                why=f"{', '.join(_prompt_keys(first))} against {', '.join(_prompt_keys(other))}, by name or content",
                mend="run the eval stage of both with the same prompt sets",
            )


def _prompt_keys(result: AcceptResult) -> dict[str, str]:
    return {one.summary.name: one.key for one in result.served[0].sets}


def named_apart(results: Sequence[AcceptResult], paths: Sequence[Path]) -> list[AcceptResult]:
    """Results with distinct titles: where two share one, the folder's name is added."""
    titles = [result.title for result in results]
    return [
        replace(result, title=f"{result.title} ({path.name})") if titles.count(result.title) > 1 else result
        for result, path in zip(results, paths, strict=True)
    ]


def compare(paths: Sequence[Path], out: Path, console: Console | None = None) -> Path:
    """Write `table.txt`, `accept.png` and `report.html` about the runs at `paths`; return the page's path.

    Raises:
        DataError: the runs are not comparable.
        IntegrityError: a run has no whole results.
    """
    results = named_apart([load_run(path) for path in paths], paths)
    check_comparable(results)
    return write_page(results, out, " against ".join(result.title for result in results), console)


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 on an expected failure, told in one line."""
    parser = Parser(
        prog="python -m eval.compare",
        description=__doc__,
        examples="python -m eval.compare runs/smollm2 runs/smollm2_control --out runs/demo",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders holding eval/results.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for the page, the picture and the table")
    args = parser.parse_args(argv)
    page = compare(args.runs, args.out, Console())
    print(f"report: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
