"""What is drawn side by side: each way of serving of each measured draft, with a name and its predicted figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3.wiring import Wiring
from eval.alarm import Alarm
from eval.results import AcceptResult, Served, Summary

WAYS = {"matched": "its own wiring", "native": "the engine's default wiring"}


@dataclass(frozen=True)
class Series:
    """One row of bars. `label` tells it apart from the others on the same page; `way` leaves the batch size out."""

    label: str
    result: AcceptResult
    served: Served
    way: str = ""

    @property
    def alarms(self) -> list[Alarm]:
        """Those about this way of serving at this batch size."""
        return [a for a in self.result.alarm if (a.mode, a.batch) == (self.served.mode, self.served.batch)]

    @property
    def summaries(self) -> list[Summary]:
        """Per prompt set, then, where there are several, all of them pooled."""
        sets = [one.summary for one in self.served.sets]
        return [*sets, self.served.overall] if len(sets) > 1 else sets


def series_of(results: Sequence[AcceptResult]) -> list[Series]:
    """Every way of serving of every result, labelled by the run's title where there is more than one run.

    A server's are told apart by their batch sizes, too.
    """
    out = []
    for result in results:
        sized = len({one.batch for one in result.served}) > 1
        for served in result.served:
            way = way_of(result, served)
            way = f"{result.title}, {way}" if len(results) > 1 else way
            label = f"{way}, batch {served.batch}" if sized or served.batch > 1 else way
            out.append(Series(label, result, served, way))
    return out


@dataclass(frozen=True)
class Parting:
    """The alarms of one way of serving, over its batch sizes: said once, with a line of figures a batch size."""

    way: str
    lines: list[str]
    positions: str
    causes: list[str]
    commands: list[str]


def partings(series: Sequence[Series]) -> list[Parting]:
    """One for each way of serving with an alarm."""
    groups: dict[tuple[int, str], list[tuple[str, Alarm]]] = {}
    for one in series:
        for alarm in one.alarms:
            groups.setdefault((id(one.result), one.way), []).append((one.label, alarm))
    out = []
    for (_, way), found in groups.items():
        first = found[0][1]
        lines = [f"{label}: {alarm.headline}" for label, alarm in found]
        out.append(Parting(way, lines, first.positions, first.causes, first.commands))
    return out


def failure_lines(series: Sequence[Series], shown: int = 5) -> list[str]:
    """Which prompts are missing from the figures, and why: one line a way of serving, none where all were answered."""
    lines = []
    for one in series:
        overall, failures = one.served.overall, one.served.failures
        if failures:
            lines.append(f"{one.label}: {overall.prompts} of {overall.asked} prompts; " + _some(failures, shown))
    for result in {id(one.result): one.result for one in series}.values():
        if result.plain_failures:
            lines.append(f"without a draft: {_some(result.plain_failures, shown)}")
        if result.missing:
            lines.append(f"not measured: {_some(result.missing, shown)}")
    return lines


def looping_lines(series: Sequence[Series], shown: int = 5) -> list[str]:
    """Which texts repeat themselves: they are easy to draft, and raise accept length."""
    lines = []
    for one in series:
        overall = one.served.overall
        if overall.looping:
            names = ", ".join(overall.looping[:shown]) + (", ..." if len(overall.looping) > shown else "")
            rest = f"; tau without them {overall.tau_not_looping:.2f}" if overall.tau_not_looping else ""
            lines.append(f"{one.label}: {len(overall.looping)} of {overall.prompts} texts go round ({names}){rest}")
    return lines


def _some(failures: dict[str, str], shown: int) -> str:
    told = [f"{name}: {' '.join(why.split())}" for name, why in list(failures.items())[:shown]]
    rest = len(failures) - len(told)
    return "; ".join(told) + (f"; and {rest} more, all in results.json" if rest else "")


def way_of(result: AcceptResult, served: Served) -> str:
    """How the draft was served, in words."""
    if served.mode == "matched" and is_native(result):
        return f"{WAYS['matched']} (the engine's default)"
    return WAYS.get(served.mode, served.mode)


def is_native(result: AcceptResult) -> bool:
    """Whether the draft was trained on exactly what an engine feeds when it is told nothing."""
    layers = int(result.trained["num_layers"])
    native = [2, layers // 2, layers - 3]
    return [site.layer for site in Wiring.from_dict(result.trained).aux] == native
