"""The matrix as a page to send around."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.matrix.cells import Cell
from eval.matrix.measure import Measured
from eval.matrix.table import fed, outcome
from eval.page import render


def matrix_page(
    cells: Sequence[Cell],
    measured: Mapping[str, Measured],
    lines: Sequence[str],
    problems: Sequence[str],
    commands: Sequence[str] = (),
) -> str:
    """The page as text.

    Args:
        cells: the computed half, in the table's order.
        measured: by `Cell.key`; empty where no server was started.
        lines: what follows from the table.
        problems: where a measured cell contradicts the computed one.
        commands: what made it.
    """
    names = list(dict.fromkeys(cell.draft for cell in cells))
    return render(
        "matrix.html",
        headline=headline(cells, measured, problems),
        measured=bool(measured),
        problems=problems,
        lines=lines,
        commands=commands,
        drafts=[_draft(name, [cell for cell in cells if cell.draft == name], measured) for name in names],
    )


def headline(cells: Sequence[Cell], measured: Mapping[str, Measured], problems: Sequence[str]) -> str:
    """The one sentence to remember."""
    wrong = sum(cell.verdict == "wrong" for cell in cells)
    line = f"{wrong} of {len(cells)} combinations serve without a word and feed the draft other tensors than it learnt"
    if not measured:
        return f"{line}. No server was started."
    count = f"{len(measured)} combinations were measured"
    told = f"{len(problems)} contradictions were found" if problems else "every one did what its wiring says"
    return f"{line}. {count}, and {told}."


def _draft(name: str, cells: Sequence[Cell], measured: Mapping[str, Measured]) -> dict[str, Any]:
    trained = ", ".join(site.words for site in cells[0].trained.aux)
    return {"name": name, "trained": trained, "rows": [_row(cells, place, measured) for place in range(len(cells))]}


def _row(cells: Sequence[Cell], place: int, measured: Mapping[str, Measured]) -> dict[str, Any]:
    """One combination; the first of a build spans that build's rows."""
    cell = cells[place]
    first = place == 0 or cells[place - 1].build != cell.build
    return {
        "span": sum(other.build == cell.build for other in cells) if first else 0,
        "build": cell.build.removeprefix("sglang-"),
        "style": cell.style,
        "ids": str(list(cell.ids)),
        "fed": fed(cell),
        "verdict": cell.verdict,
        "outcome": outcome(measured[cell.key]) if cell.key in measured else "",
        "serve_with": str(list(cell.serve_with)) if cell.serve_with else "",
    }
