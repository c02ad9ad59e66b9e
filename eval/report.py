"""Results, table, picture and a self-contained HTML page, written beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console

from eagle3.atomic import write_text
from eagle3.wiring import Wiring
from eval.checks import AGREES, DIFFERS, checks, probe_beside
from eval.curves import Line, line_chart
from eval.page import render
from eval.plot import draw_accept
from eval.results import AcceptResult, PromptResult, Summary
from eval.series import Series, failure_lines, partings, series_of, way_of
from eval.table import percent, show, table_text
from eval.training import Curve, Training
from eval.wiring_picture import wiring_svg, wiring_words

ROUNDING_GAP = 1e-2  # logit margin under which a differing token is put down to rounding
SAMPLES = 4  # continuations shown
COLOURS = 6  # classes b0 to b5 of the page


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
        sets=_by_set(series),
        positions=_by_position(series),
        predictions=_predictions(series),
        speeds=_speeds(series),
        rates=_rates(series),
        served=any(one.served.facts for one in series),
        wirings=[_wiring(one) for one in one_each_way(series)],
        trainings=[_training(result.title, result.training) for result in results if result.training],
        alarms=partings(series),
        facts=_facts(series),
        failures=failure_lines(series, shown=50),
        cautions=_cautions(series),
        samples=_samples(series[0]),
        commands=list(dict.fromkeys(command for result in results for command in result.commands)),
        recipes=list(dict.fromkeys(pair for result in results for pair in _recipes(result, len(results) > 1))),
    )


def headline(series: Sequence[Series]) -> str:
    """The one sentence to remember."""
    if len(series) == 1:
        return verdict(series[0])
    best, worst = (choose(series, key=_rank) for choose in (max, min))
    tau, ceiling, low = best.served.overall.tau, best.result.ceiling, worst.served.overall.tau
    gain = best.served.overall.gain
    speed = "" if gain is None else f" and {gain:.2f} times the speed of the target alone"
    line = f"Best of {len(series)} ways of serving: {best.label}, with {tau:.2f} tokens per verify step, of at most "
    line += f"{ceiling},{speed}." if speed else f"{ceiling}."
    same = f"{low:.2f}" == f"{tau:.2f}"
    return f"{line} All emit as many." if same else f"{line} Worst: {worst.label}, with {low:.2f} tokens."


def _rank(series: Series) -> tuple[float, float]:
    """Accept length, then speed."""
    return round(series.served.overall.tau, 2), series.served.overall.gain or 0.0


def verdict(series: Series) -> str:
    """What one way of serving gives, in a sentence or two."""
    overall, result = series.served.overall, series.result
    line = f"The draft emits {overall.tau:.2f} tokens per verify step, of at most {result.ceiling}"
    if overall.gain is not None:
        line += f", and decodes at {overall.gain:.2f} times the speed of the target alone"
        if series.served.facts:
            line += f", {series.served.batch} at a time"
    line += "."
    if result.predicted_tau is not None and not series.served.differences:
        line += f" Validation data promised {result.predicted_tau:.2f} tokens."
    return line


def _colour(place: int) -> str:
    return f"b{place % COLOURS}"


def _glance(series: Sequence[Series]) -> list[dict[str, Any]]:
    """A row a way of serving."""
    return [
        {
            "label": one.label,
            "colour": _colour(place),
            "overall": one.served.overall,
            "predicted": one.result.predicted_tau,
            "fed": DIFFERS if one.served.differences else AGREES,
        }
        for place, one in enumerate(series)
    ]


def _by_set(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Bars of accept length, grouped by prompt set; widths are shares of the way from 0 to the ceiling."""
    groups: dict[str, list[dict[str, Any]]] = {}
    top = max(one.result.ceiling for one in series)
    for place, one in enumerate(series):
        trusted = one.result.predicted_tau if not one.served.differences else None
        for summary in one.summaries:
            row = {
                "label": one.label,
                "name": one.label if len(series) > 1 else "",
                "colour": _colour(place),
                "width": 100 * summary.tau / top,
                "mark": None if trusted is None else 100 * trusted / top,
                "value": f"{summary.tau:.2f}",
                "note": f"{summary.tau_low:.2f} to {summary.tau_high:.2f}",
            }
            groups.setdefault(_set_name(summary), []).append(row)
    return [{"name": name, "bars": bars, "short": False, "stacked": False} for name, bars in groups.items()]


def _by_position(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Bars of conditional acceptance, grouped by place in the chain."""
    groups = []
    for k in range(max(one.result.num_steps for one in series)):
        bars = []
        for place, one in enumerate(series):
            overall, predicted = one.served.overall, one.result.predicted_acceptance or []
            share, reach = _at(overall.acceptance, k), _at(overall.reach, k)
            known = _at(predicted, k) if not one.served.differences else None
            bars.append(
                {
                    "label": one.label,
                    "name": one.label if len(series) > 1 else "",
                    "colour": _colour(place),
                    "width": 100 * (share or 0),
                    "mark": None if known is None else 100 * known,
                    "value": percent(share),
                    "note": f"{percent(reach)} of all",
                }
            )
        groups.append({"name": f"Position {k + 1}", "bars": bars, "short": False, "stacked": False})
    return groups


def _at(values: Sequence[float | None], k: int) -> float | None:
    return values[k] if k < len(values) else None


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
                "positions": [(_at(predicted, k), _at(shares, k)) for k in range(steps)],
                "check": next(check for check in checks(one) if check.question == "Accept length"),
            }
        )
    return rows


def _speeds(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Pairs of bars, with the draft and without: a pair a prompt set, or of several ways of serving a pair a way."""
    several = len(series) > 1
    pairs = [
        (one.label if several else _set_name(summary), _colour(place), summary)
        for place, one in enumerate(series)
        for summary in ([one.served.overall] if several else one.summaries)
    ]
    top = max((rate for _, _, summary in pairs for rate in (summary.rate, summary.plain_rate) if rate), default=1.0)
    return [
        {"name": name, "bars": _speed_bars(summary, colour, top), "short": True, "stacked": several}
        for name, colour, summary in pairs
    ]


def _speed_bars(summary: Summary, colour: str, top: float) -> list[dict[str, Any]]:
    ratio = "" if summary.gain is None else f"{summary.gain:.2f}x"
    rows = [("with the draft", colour, summary.rate, ratio), ("alone", "plain", summary.plain_rate, "")]
    return [
        {
            "label": name,
            "name": name,
            "colour": fill,
            "width": 100 * (rate or 0) / top,
            "mark": None,
            "value": "-" if rate is None else f"{rate:,.1f} tok/s",
            "note": note,
        }
        for name, fill, rate, note in rows
        if name != "alone" or rate is not None
    ]


def _rates(series: Sequence[Series]) -> list[dict[str, Any]]:
    return [
        {"label": one.label, "colour": _colour(place), "summaries": one.summaries} for place, one in enumerate(series)
    ]


def _training(title: str, training: Training) -> dict[str, Any]:
    """Charts and tables about one training."""
    splits = {"train": "training", "val": "validation"}
    names = [name for name in dict.fromkeys(name for counts in training.data.values() for name in counts)]
    groups = training.coverage.get("groups", [])
    return {
        "title": title,
        "rows": training.train.rows,
        "loss": Markup(_chart(training, "loss", "Loss, in nats")),
        "accuracy": Markup(_chart(training, "accuracy", "Accuracy, where all positions before were right")),
        "counts": [name.replace("_", " ") for name in names],
        "splits": [
            (splits.get(split, split), [f"{counts.get(name, 0):,}" for name in names])
            for split, counts in training.data.items()
        ],
        "coverage": training.coverage,
        "tokens": max([one["tokens"] for one in groups if one["kind"] == "all"] + [1]),
    }


def _chart(training: Training, name: str, label: str) -> str:
    """Loss or accuracy by position in the chain, with the validations as rings."""
    rows = _rows_of(training.train, name)
    lines = [
        Line(f"pos {k + 1}", training.train.steps, row, _dots(training.validation, name, k))
        for k, row in enumerate(rows)
    ]
    ends = [f"position {k + 1} ends at {row[-1]:.3f}" for k, row in enumerate(rows) if row and row[-1] is not None]
    words = f"{label} over {training.train.steps[-1] if training.train.steps else 0} steps: {', '.join(ends)}"
    return line_chart(lines, words, "step", label, percent=name == "accuracy")


def _rows_of(curve: Curve, name: str) -> list[list[float | None]]:
    return curve.loss if name == "loss" else curve.accuracy


def _dots(curve: Curve, name: str, k: int) -> list[tuple[float, float]]:
    rows = _rows_of(curve, name)
    known = zip(curve.steps, rows[k], strict=True) if k < len(rows) else []
    return [(step, value) for step, value in known if value is not None]


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


def _set_name(summary: Summary) -> str:
    return "all sets" if summary.name == "all" else summary.name


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
