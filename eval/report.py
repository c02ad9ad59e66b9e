"""Results, table, picture and a self-contained HTML page, written beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console

from eagle3.atomic import write_text
from eagle3.wiring import Wiring
from eval.bars import at_position, bar_colour, bars_by_position, bars_by_set, bars_of_speed
from eval.checks import AGREES, DIFFERS, checks, probe_beside
from eval.page import render
from eval.plot import draw_accept
from eval.results import AcceptResult
from eval.series import Series, failure_lines, partings, series_of, way_of
from eval.statements import all_cautions, headline
from eval.table import show, table_text
from eval.training_view import training_view
from eval.wiring_picture import wiring_svg, wiring_words

SAMPLES = 4  # continuations shown


def write_report(result: AcceptResult, folder: Path, console: Console | None = None) -> Path:
    """Write `results.json`, `table.txt`, `accept.png` and `report.html` into `folder`; return the page's path.

    Each file is replaced atomically, the page last. With a `console` the table is printed, too.
    """
    folder = Path(folder)
    result.probe = result.probe or probe_beside(folder / "results.json")
    result.save(folder / "results.json")
    return write_page([result], folder, result.title, console)


def write_page(results: Sequence[AcceptResult], folder: Path, title: str, console: Console | None = None) -> Path:
    """Write `table.txt`, `accept.png` and `report.html` about one or several results; return the page's path."""
    folder = Path(folder)
    series = series_of(results)
    if console is not None:
        show(series, console)
    write_text(folder / "table.txt", table_text(series))
    draw_accept(series, folder / "accept.png", title)
    write_text(folder / "report.html", render_page(results, title))
    return folder / "report.html"


def render_page(results: Sequence[AcceptResult], title: str) -> str:
    """The page as text; everything it shows is inside it."""
    series = series_of(results)
    return render(
        "report.html",
        title=title,
        results=results,
        series=series,
        steps=max(result.num_steps for result in results),
        ceiling=max(result.ceiling for result in results),
        headline=headline(series),
        glance=_glance(series),
        sets=bars_by_set(series),
        positions=bars_by_position(series),
        predictions=_predictions(series),
        speeds=bars_of_speed(series),
        rates=_rates(series),
        served=any(one.served.facts for one in series),
        wirings=[_wiring(one) for one in one_each_way(series)],
        trainings=[training_view(result.title, result.training) for result in results if result.training],
        alarms=partings(series),
        facts=_facts(series),
        failures=failure_lines(series, shown=50),
        cautions=all_cautions(series),
        samples=_samples(series[0]),
        commands=list(dict.fromkeys(command for result in results for command in result.commands)),
        recipes=list(dict.fromkeys(pair for result in results for pair in _recipes(result, len(results) > 1))),
    )


def _glance(series: Sequence[Series]) -> list[dict[str, Any]]:
    """A row a way of serving."""
    return [
        {
            "label": one.label,
            "colour": bar_colour(place),
            "overall": one.served.overall,
            "predicted": one.result.predicted_tau,
            "fed": DIFFERS if one.served.differences else AGREES,
        }
        for place, one in enumerate(series)
    ]


def _predictions(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Predicted and served figures of each way of serving that has a prediction."""
    steps = max(one.result.num_steps for one in series)
    rows = []
    for one in series:
        predicted, shares = one.result.predicted_acceptance, one.served.overall.acceptance
        if one.result.predicted_tau is None or predicted is None:
            continue
        rows.append(
            {
                "label": one.label,
                "predicted": one.result.predicted_tau,
                "tau": one.served.overall.tau,
                "positions": [(at_position(predicted, k), at_position(shares, k)) for k in range(steps)],
                "check": next(check for check in checks(one) if check.question == "Accept length"),
            }
        )
    return rows


def _rates(series: Sequence[Series]) -> list[dict[str, Any]]:
    return [
        {"label": one.label, "colour": bar_colour(place), "summaries": one.summaries}
        for place, one in enumerate(series)
    ]


def _recipes(result: AcceptResult, named: bool) -> list[tuple[str, str]]:
    return [(f"{words} ({result.title})" if named else words, line) for words, line in result.recipes.items()]


def one_each_way(series: Sequence[Series]) -> list[Series]:
    """The first batch size of each way of serving: what does not depend on it is shown once."""
    firsts: dict[tuple[int, str], Series] = {}
    for one in series:
        firsts.setdefault((id(one.result), one.served.mode), one)
    return list(firsts.values())


def _facts(series: Sequence[Series]) -> list[dict[str, Any]]:
    """What each server said of itself, as rows of text."""
    groups = [
        {"label": one.way, "rows": fact_rows(one.served.facts)} for one in one_each_way(series) if one.served.facts
    ]
    for result in {id(one.result): one.result for one in series}.values():
        if result.plain_facts:
            groups.append({"label": f"{result.title}, without a draft", "rows": fact_rows(result.plain_facts)})
    return groups


def fact_rows(facts: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Name and lines of each fact; a mapping has a line an entry."""
    rows = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines = [f"{key} = {_said(one)}" for key, one in value.items()]
        elif isinstance(value, list) and any(isinstance(one, str) for one in value):
            lines = [" ".join(map(str, value))]
        else:
            lines = [_said(value)]
        rows.append((name.replace("_", " "), lines))
    return rows


def _said(value: Any) -> str:
    return "none" if value is None or value == "" else str(value)


def _wiring(series: Series) -> dict[str, Any]:
    trained, served = Wiring.from_dict(series.result.trained), Wiring.from_dict(series.served.wiring)
    return {
        "label": f"{series.result.title}, served with {way_of(series.result, series.served)}",
        "svg": Markup(wiring_svg(trained, served)),
        "words": wiring_words(trained),
        "differences": series.served.differences,
        "checks": checks(series),
        "alarmed": any(alarm.mode == series.served.mode for alarm in series.result.alarm),
        "asked": bool(series.served.facts),  # a server was asked to feed it; in this process it was fed by name
    }


def _samples(series: Series) -> list[dict[str, Any]]:
    """A few continuations, in turn from each set."""
    out = []
    per_set = max(1, SAMPLES // len(series.served.sets))
    for one in series.served.sets:
        for prompt in one.prompts[:per_set]:
            tau = 1 + prompt.correct / prompt.verifies if prompt.verifies else 1.0
            out.append({"set": one.summary.name, "id": prompt.id, "text": prompt.text, "tau": f"{tau:.2f}"})
    return out
