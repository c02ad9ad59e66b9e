"""One draft in two engines: `python -m eval.agreement runs/smollm2/eval runs/smollm2/eval-sglang`.

Greedy decoding leaves an engine no choice: with equal weights, equal prompts and the same tensors fed, every verify
step keeps the same proposals. Prompts whose counts differ are named; rounding alone may part a few of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from eagle3.command_line import Parser, one_line_errors
from eagle3.errors import DataError
from eval.compare import load_run
from eval.results import AcceptResult, PromptResult, Served

SAME = ("num_steps", "temperature", "max_new_tokens", "target", "trained")


@dataclass(frozen=True)
class Agreement:
    """One way of serving in both engines.

    Args:
        mode, batch: of the second engine; the first is taken at its first batch size.
        first, second: accept length over the prompts that both answered.
        equal: prompts whose verifies, kept proposals and histogram are the same.
        parted: ids of the others.
    """

    mode: str
    batch: int
    first: float
    second: float
    equal: int
    parted: tuple[str, ...]


def agreements(first: AcceptResult, second: AcceptResult) -> list[Agreement]:
    """Compare every way of serving that both results have.

    Raises:
        DataError: the results are of other settings, prompts or drafts, or share no way of serving.
    """
    for name in SAME:
        if getattr(first, name) != getattr(second, name):
            raise DataError(
                "results that cannot be held against each other",
                where=f"{first.engine} and {second.engine}",
                why=f"{name} is {getattr(first, name)!r} and {getattr(second, name)!r}",
                mend="measure one draft in both engines with the same settings",
            )
    modes: dict[str, Served] = {}
    for served in first.served:
        modes.setdefault(served.mode, served)
    out = [_agreement(modes[served.mode], served) for served in second.served if served.mode in modes]
    if not out:
        raise DataError(
            "no way of serving in common",
            why=f"{', '.join(modes)} against {', '.join(one.mode for one in second.served)}",
            mend="measure both with the same eval.serve",
        )
    return out


def _agreement(first: Served, second: Served) -> Agreement:
    keys = [{one.summary.name: one.key for one in side.sets} for side in (first, second)]
    if keys[0] != keys[1]:
        raise DataError(
            "other prompts", why=f"{keys[0]} and {keys[1]}, by name or content", mend="use the same prompt sets"
        )
    rows = [_prompts(side) for side in (first, second)]
    both = [name for name in rows[0] if name in rows[1]]
    parted = tuple(name for name in both if _counts(rows[0][name]) != _counts(rows[1][name]))
    taus = [_tau([side[name] for name in both]) for side in rows]
    return Agreement(second.mode, second.batch or 1, taus[0], taus[1], len(both) - len(parted), parted)


def _prompts(served: Served) -> dict[str, PromptResult]:
    return {f"{one.summary.name}/{row.id}": row for one in served.sets for row in one.prompts}


def _counts(row: PromptResult) -> tuple[int, int, list[int]]:
    return row.verifies, row.correct, row.correct_histogram


def _tau(rows: Sequence[PromptResult]) -> float:
    verifies = sum(row.verifies for row in rows)
    return 1.0 + sum(row.correct for row in rows) / verifies if verifies else 1.0


@one_line_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 = within the bound, 1 = further apart, 2 = bad input."""
    parser = Parser(
        prog="python -m eval.agreement",
        description=__doc__,
        examples="python -m eval.agreement runs/smollm2/eval runs/smollm2/eval-sglang --bound 0.01",
    )
    parser.add_argument("first", type=Path, help="folder with results.json, e.g. of the local engine")
    parser.add_argument("second", type=Path, help="the same draft in another engine")
    parser.add_argument("--bound", type=float, default=0.02, help="allowed difference of tau (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    console = Console()
    first, second = load_run(chosen.first), load_run(chosen.second)
    rows = agreements(first, second)
    console.print(_table(first.engine, second.engine, rows))
    for row in rows:
        if row.parted:
            names = ", ".join(row.parted[:5]) + (" ..." if len(row.parted) > 5 else "")
            console.print(f"{row.mode}, batch {row.batch}: other counts for {names}", markup=False, soft_wrap=True)
    apart = max(abs(row.second - row.first) for row in rows)
    if apart > chosen.bound:
        console.print(
            f"tau differs by {apart:.3f}, more than {chosen.bound:g}. Next: python -m eval.probe live", style="bold red"
        )
        return 1
    return 0


def _table(first: str, second: str, rows: Sequence[Agreement]) -> Table:
    table = Table(title="one draft in two engines, greedy", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("served", "batch", f"tau, {first}", f"tau, {second}", "difference", "prompts with equal counts"):
        table.add_column(name, justify="left" if name == "served" else "right")
    for row in rows:
        figures = (f"{row.first:.3f}", f"{row.second:.3f}", f"{row.second - row.first:+.3f}")
        table.add_row(row.mode, str(row.batch), *figures, f"{row.equal}/{row.equal + len(row.parted)}")
    return table


if __name__ == "__main__":
    sys.exit(main())
