"""What is drawn side by side: each way of serving of each measured draft, with a name and its predicted figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3.wiring import Wiring
from eval.results import AcceptResult, Served, Summary

WAYS = {"matched": "its own wiring", "native": "the engine's default wiring"}


@dataclass(frozen=True)
class Series:
    """One row of bars. `label` tells it apart from the others on the same page."""

    label: str
    result: AcceptResult
    served: Served

    @property
    def summaries(self) -> list[Summary]:
        """Per prompt set, then, where there are several, all of them pooled."""
        sets = [one.summary for one in self.served.sets]
        return [*sets, self.served.overall] if len(sets) > 1 else sets


def series_of(results: Sequence[AcceptResult]) -> list[Series]:
    """Every way of serving of every result, labelled by the run's title where there is more than one run."""
    out = []
    for result in results:
        for served in result.served:
            way = way_of(result, served)
            label = f"{result.title}, {way}" if len(results) > 1 else way
            out.append(Series(label, result, served))
    return out


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
