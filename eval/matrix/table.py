"""The matrix as a table, and whether what was measured is what the wirings say."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from eagle3.conventions import convention
from eval.matrix.cells import Cell
from eval.matrix.measure import Measured

STYLE = {"right": "green", "wrong": "bold red", "refused": "yellow"}


def rule(cell: Cell) -> str:
    """The cell's build and ids in a few words."""
    return f"{cell.build}, {cell.style} ids {list(cell.ids)}"


def disagreements(cells: Sequence[Cell], measured: Mapping[str, Measured]) -> list[str]:
    """Where a measured cell contradicts the computed one, or another that is fed the same."""
    return [line for cell in cells for line in _disagreements(cell, measured)] + _across(cells, measured)


def consequences(cells: Sequence[Cell], measured: Mapping[str, Measured], builds: Mapping[str, str]) -> list[str]:
    """What follows from the table, what to know of each build, and which builds were measured."""
    return [*_findings(cells, measured), *_notes(cells), *(f"{name}: {words}" for name, words in builds.items())]


def report(
    cells: Sequence[Cell], measured: Mapping[str, Measured], builds: Mapping[str, str], console: Console
) -> tuple[str, bool]:
    """Print the table and what follows from it; returns the same as text, and whether every measured cell agrees."""
    problems, lines = disagreements(cells, measured), consequences(cells, measured, builds)
    file = Console(file=io.StringIO(), width=80)
    for out in (console, file):
        out.print(_tables(cells, measured))
        for line in lines:
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        for line in problems:
            out.print(f"DISAGREES: {line}", style="bold red", markup=False, soft_wrap=True)
    text = file.file.getvalue()  # type: ignore[attr-defined]
    return text, not problems


def _tables(cells: Sequence[Cell], measured: Mapping[str, Measured]) -> Group:
    """One table a draft; 80 columns suffice."""
    parts: list[RenderableType] = ["what a draft is fed, by SGLang build and by the ids in its config"]
    for draft in dict.fromkeys(cell.draft for cell in cells):
        parts += ["", _table([cell for cell in cells if cell.draft == draft], measured)]
    return Group(*parts)


def _table(cells: Sequence[Cell], measured: Mapping[str, Measured]) -> Table:
    trained = ", ".join(site.words for site in cells[0].trained.aux)
    table = Table(title=f"{cells[0].draft}: trained on {trained}", title_justify="left")
    table.box, table.padding, table.show_edge = box.SIMPLE_HEAD, 0, False
    for name in ("build", "ids", "fed", "verdict"):
        table.add_column(name, no_wrap=True)
    table.add_column("tau (95%)", justify="right", no_wrap=True)
    table.add_column("serve with", no_wrap=True)
    build = ""
    for cell in cells:
        table.add_row(
            "" if cell.build == build else cell.build.removeprefix("sglang-"),
            f"{cell.style} {_ids(cell.ids)}",
            fed(cell),
            f"[{STYLE[cell.verdict]}]{cell.verdict}[/]",
            outcome(measured[cell.key]) if cell.key in measured else "",
            "" if cell.build == build else _ids(cell.serve_with) if cell.serve_with else "nothing",
        )
        build = cell.build
    return table


def fed(cell: Cell) -> str:
    """The layers whose inputs are fed, slot by slot; a dash where nothing is."""
    return " ".join("emb" if site.layer == 0 else str(site.layer) for site in cell.fed.aux) if cell.fed else "-"


def _ids(ids: Sequence[int]) -> str:
    return "\\[" + ",".join(map(str, ids)) + "]" if ids else "-"


def outcome(one: Measured) -> str:
    """Accept length with its interval, or that the server stopped."""
    return "stopped" if one.tau is None else f"{one.tau:.3f} ({one.low:.2f}-{one.high:.2f})"


def _findings(cells: Sequence[Cell], measured: Mapping[str, Measured]) -> list[str]:
    """What a user must know besides the table: refusals, cells that serve without a word, and losslessness."""
    out = []
    for cell in cells:
        one = measured.get(cell.key)
        if one is None:
            continue
        name = f"{cell.draft} on {rule(cell)}"
        if cell.fed is None:
            said = "" if one.tau is not None else f" Its server: {one.said}"
            out.append(f"{name}: refused, {cell.why}.{said}")
        elif cell.verdict == "wrong" and one.tau is not None:
            out.append(f"{name}: served without a word, but {cell.why}; tau {one.tau:.3f}.")
    served = [one for one in measured.values() if one.tau is not None]
    if served:
        same, all_texts = sum(one.same_as_plain for one in served), sum(len(one.tokens) for one in served)
        out.append(f"{same} of {all_texts} texts are token for token those of the server without a draft.")
    return out


def _notes(cells: Sequence[Cell]) -> list[str]:
    """What a user of a build must know besides its ids."""
    notes = {cell.build: convention(cell.build).note(cell.trained.model_type) for cell in cells}
    return [f"{build}: {note}" for build, note in notes.items() if note]


def _disagreements(cell: Cell, measured: Mapping[str, Measured]) -> list[str]:
    """Where a measured cell contradicts the computed one."""
    one = measured.get(cell.key)
    if one is None:
        return []
    if (one.tau is None) != (cell.fed is None):
        did = f"stopped ({one.said})" if one.tau is None else f"served (tau {one.tau:.3f})"
        return [f"{cell.draft} on {rule(cell)}: computed {cell.verdict}, but it {did}"]
    if one.tau is not None and one.same_as_plain < len(one.tokens):
        return [f"{cell.draft} on {rule(cell)}: {one.same_as_plain} of {len(one.tokens)} texts are plain decoding's"]
    return []


def _across(cells: Sequence[Cell], measured: Mapping[str, Measured]) -> list[str]:
    """Cells of one draft that are fed the same tensors must accept the same, whatever the build and the ids."""
    out = []
    first: dict[tuple[str, object], tuple[Cell, Measured]] = {}
    for cell in cells:
        one = measured.get(cell.key)
        if one is None or one.tau is None or cell.fed is None:
            continue
        other_cell, other = first.setdefault((cell.draft, cell.fed), (cell, one))
        if (one.tau, one.verifies) != (other.tau, other.verifies):
            out.append(
                f"{cell.draft} is fed the same on {rule(cell)} and {rule(other_cell)}, "
                f"but accepts {one.tau:.3f} and {other.tau:.3f}"
            )
    return out
