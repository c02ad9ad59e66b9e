"""What the page says in sentences: the one on top, and what a reader must know before quoting its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from eval.results import PromptResult
from eval.series import Series

ROUNDING_GAP = 1e-2  # logit margin under which a differing token is put down to rounding
FEW_VERIFIES = 200


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


def all_cautions(series: Sequence[Series]) -> list[str]:
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
    if overall.verifies < FEW_VERIFIES:
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
