"""Results, table, picture and a self-contained HTML page, written beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from rich.console import Console

from eagle3.atomic import write_text
from eagle3.wiring import Wiring
from eval.plot import draw_accept
from eval.results import AcceptResult, PromptResult, Summary
from eval.series import Series, failure_lines, partings, series_of, way_of
from eval.table import number, percent, show, table_text
from eval.wiring_picture import wiring_svg, wiring_words

TEMPLATE = Path(__file__).with_name("report.html")
ROUNDING_GAP = 1e-2  # logit margin under which a differing token is put down to rounding
SAMPLES = 4  # continuations shown


def write_report(result: AcceptResult, folder: Path, console: Console | None = None) -> Path:
    """Write `results.json`, `table.txt`, `accept.png` and `report.html` into `folder`; return the page's path.

    Each file is replaced atomically, the page last. With a `console` the table is printed, too.
    """
    folder = Path(folder)
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
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(number=number, percent=percent)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    series = series_of(results)
    return template.render(
        title=title,
        results=results,
        series=series,
        ceiling=max(result.ceiling for result in results),
        verdicts=[verdict(one, len(series) > 1) for one in series],
        sets=_by_set(series),
        positions=_by_position(series),
        rates=_rates(series),
        served=any(one.served.facts for one in series),
        wirings=[_wiring(one) for one in one_each_way(series)],
        alarms=partings(series),
        facts=_facts(series),
        failures=failure_lines(series, shown=50),
        cautions=_cautions(series),
        samples=_samples(series[0]),
        commands=list(dict.fromkeys(command for result in results for command in result.commands)),
    )


def verdict(series: Series, named: bool) -> str:
    """The one sentence to remember."""
    overall, result = series.served.overall, series.result
    who = f"{series.label}: the draft emits" if named else "The draft emits"
    line = f"{who} {overall.tau:.2f} tokens per verify step, of at most {result.ceiling}"
    if overall.gain is not None:
        line += f", and decodes at {overall.gain:.2f} times the speed of the target alone"
        if series.served.facts and ", batch" not in who:
            line += f", {series.served.batch} at a time"
    line += "."
    if result.predicted_tau is not None and not series.served.differences:
        line += f" Validation data promised {result.predicted_tau:.2f} tokens."
    return line


def _by_set(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Bars of accept length, grouped by prompt set; widths are shares of the way from 0 to the ceiling."""
    groups: dict[str, list[dict[str, Any]]] = {}
    top = max(one.result.ceiling for one in series)
    for place, one in enumerate(series):
        trusted = one.result.predicted_tau if not one.served.differences else None
        for summary in one.summaries:
            row = {
                "label": one.label,
                "colour": place % 6,
                "width": 100 * summary.tau / top,
                "mark": None if trusted is None else 100 * trusted / top,
                "value": f"{summary.tau:.2f}",
                "note": f"{summary.tau_low:.2f} to {summary.tau_high:.2f}",
            }
            groups.setdefault(_set_name(summary), []).append(row)
    return [{"name": name, "bars": bars} for name, bars in groups.items()]


def _by_position(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Bars of conditional acceptance, grouped by place in the chain."""
    groups = []
    for k in range(max(one.result.num_steps for one in series)):
        bars = []
        for place, one in enumerate(series):
            overall, predicted = one.served.overall, one.result.predicted_acceptance or []
            share = overall.acceptance[k] if k < len(overall.acceptance) else None
            reach = overall.reach[k] if k < len(overall.reach) else None
            known = predicted[k] if k < len(predicted) and not one.served.differences else None
            bars.append(
                {
                    "label": one.label,
                    "colour": place % 6,
                    "width": 100 * (share or 0),
                    "mark": None if known is None else 100 * known,
                    "value": percent(share),
                    "note": f"{percent(reach)} of all",
                }
            )
        groups.append({"name": f"Position {k + 1}", "bars": bars})
    return groups


def _rates(series: Sequence[Series]) -> list[dict[str, Any]]:
    return [{"label": one.label, "colour": place % 6, "summaries": one.summaries} for place, one in enumerate(series)]


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


def _set_name(summary: Summary) -> str:
    return "all sets" if summary.name == "all" else summary.name


def _wiring(series: Series) -> dict[str, Any]:
    trained, served = Wiring.from_dict(series.result.trained), Wiring.from_dict(series.served.wiring)
    return {
        "label": f"{series.result.title}, served with {way_of(series.result, series.served)}",
        "svg": Markup(wiring_svg(trained, served)),
        "words": wiring_words(trained),
        "differences": series.served.differences,
        "alarmed": any(alarm.mode == series.served.mode for alarm in series.result.alarm),
        "asked": bool(series.served.facts),  # a server was asked to feed it; in this process it was fed by name
    }


def _cautions(series: Sequence[Series]) -> list[str]:
    """Each caution once, with the names of those it holds for where there are several."""
    holders: dict[str, list[str]] = {}
    for one in series:
        for line in cautions(one):
            holders.setdefault(line, []).append(one.label)
    if len(series) == 1:
        return list(holders)
    everyone = len(series)
    return [line if len(names) == everyone else f"{'; '.join(names)}: {line}" for line, names in holders.items()]


def cautions(series: Series) -> list[str]:
    """What a reader must know before quoting the numbers."""
    overall, prompts = series.served.overall, [p for one in series.served.sets for p in one.prompts]
    lines = []
    if overall.looping:
        rest = f"; without them tau is {overall.tau_not_looping:.2f}" if overall.tau_not_looping else ""
        names = ", ".join(overall.looping[:6]) + (", ..." if len(overall.looping) > 6 else "")
        lines.append(
            f"{len(overall.looping)} of {overall.prompts} texts repeat themselves ({names}), which is easy to predict "
            f"and flatters accept length{rest}."
        )
    lines += _differing(series, prompts)
    if overall.verifies < 200:
        lines.append(f"Only {overall.verifies} verify steps were counted: read the intervals.")
    return lines + _servers_apart(series)


def _differing(series: Series, prompts: Sequence[PromptResult]) -> list[str]:
    """Whether, and how gravely, greedy texts leave plain decoding's."""
    count, overall = series.served.overall.same_tokens, series.served.overall
    other = [p for p in prompts if p.baseline and p.baseline.same_tokens is False]
    if not other:
        return []
    gaps = [p.baseline.top_gap for p in other if p.baseline and p.baseline.top_gap is not None]
    start = f"{len(other)} of {overall.prompts} texts"
    if series.served.batch > 1:
        return [
            f"{start} differ from plain greedy decoding at batch {series.served.batch} ({count} are the same). Batches "
            "of other shapes round differently, which breaks near ties; batch 1 tells whether a draft changes the text."
        ]
    if len(gaps) == len(other) and max(gaps) < ROUNDING_GAP:
        return [
            f"{start} leave plain decoding's at a tie: the target's two best tokens there are at most {max(gaps):.1g} "
            "apart in logits, so rounding decides."
        ]
    margin = f", where the target's margin was up to {max(gaps):.2g} in logits" if gaps else ""
    first = [p.baseline.first_difference for p in other if p.baseline and p.baseline.first_difference is not None]
    place = f" ({other[0].id} from token {first[0]} on)" if series.served.facts and first else ""
    return [
        f"{start} differ from plain greedy decoding{place}{margin}: a draft must not change the text. In 16-bit "
        "arithmetic small margins are rounding; in float32 look for a fault."
    ]


def _servers_apart(series: Series) -> list[str]:
    """Speeds of two builds do not compare."""
    mine, plain = series.served.facts.get("build"), series.result.plain_facts.get("build")
    if mine is None or plain is None or mine == plain:
        return []
    return [f"The draft ran on build {mine} of the server, plain decoding on {plain}: the speeds do not compare."]


def _samples(series: Series) -> list[dict[str, Any]]:
    """A few continuations, in turn from each set."""
    out = []
    per_set = max(1, SAMPLES // len(series.served.sets))
    for one in series.served.sets:
        for prompt in one.prompts[:per_set]:
            tau = 1 + prompt.correct / prompt.verifies if prompt.verifies else 1.0
            out.append({"set": one.summary.name, "id": prompt.id, "text": prompt.text, "tau": f"{tau:.2f}"})
    return out
