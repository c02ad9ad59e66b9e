"""Predicted against served accept length: where they part too far, say so loudly, and what to do next.

Validation runs the draft on the target's own text and feeds it the right states, so its figures read somewhat higher
than a server's: by 7% to 22% of the gain in the shipped demo. The bound is therefore a share of the *predicted gain*
`tau - 1`, not a number of tokens, and the gap must lie outside the 95% interval of the served figure, so that the
choice of prompts cannot raise an alarm alone. A draft fed one wrong state in three lost 61% of its gain there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eval.results import AcceptResult, Served

LEAST = 0.05  # tokens: no gap smaller than this alarms, however little was predicted
WORST = 3  # prompts or differences named in a cause


@dataclass
class Alarm:
    """One way of serving whose accept length is not what validation promised. Lengths are tokens per verify."""

    mode: str
    batch: int
    predicted: float
    served: float
    served_low: float  # 95% interval over prompts
    served_high: float
    bound: float  # the gap allowed
    positions: str  # by position, predicted against served
    causes: list[str]
    commands: list[str]  # what to run next

    @property
    def headline(self) -> str:
        """Both figures in one sentence."""
        way = "below" if self.served < self.predicted else "above"
        return (
            f"served {self.served:.2f} tokens per verify ({self.served_low:.2f}-{self.served_high:.2f}), "
            f"predicted {self.predicted:.2f}: {abs(self.served - self.predicted):.2f} {way}, "
            f"where up to {self.bound:.2f} is allowed"
        )


def allowed_gap(predicted: float | None, share: float) -> float | None:
    """How far served may part from predicted accept length, in tokens: a share of the predicted gain.

    None without a prediction.
    """
    return None if predicted is None else max(share * (predicted - 1), LEAST)


def find_alarms(result: AcceptResult, share: float, commands: Sequence[str], tree: bool = False) -> list[Alarm]:
    """An alarm for each way of serving that parts from the prediction.

    Args:
        result: what was measured, with `predicted_acceptance`; without it nothing can be said, and nothing is.
        share: the gap allowed, as a share of the predicted gain `predicted tau - 1` (`eval.alarm`).
        commands: what to run next, in order.
        tree: the proposals were a tree; it keeps more than the predicted chain, so only too little alarms.
    """
    predicted = result.predicted_tau
    if predicted is None:
        return []
    bound = allowed_gap(predicted, share) or LEAST
    alarms = []
    for served in result.served:
        overall = served.overall
        too_low = overall.tau_high < predicted - bound
        too_high = overall.tau_low > predicted + bound and not tree
        if overall.verifies and (too_low or too_high):
            causes = _causes_low(result, served) if too_low else _causes_high(served)
            figures = (predicted, overall.tau, overall.tau_low, overall.tau_high, bound)
            alarms.append(
                Alarm(served.mode, served.batch, *figures, _positions(result, served), causes, list(commands))
            )
    return alarms


def _positions(result: AcceptResult, served: Served) -> str:
    pairs = zip(result.predicted_acceptance or [], served.overall.acceptance, strict=False)
    return ", ".join(
        f"{k}: {100 * wanted:.0f}% against {'-' if found is None else f'{100 * found:.0f}%'}"
        for k, (wanted, found) in enumerate(pairs, start=1)
    )


def _causes_low(result: AcceptResult, served: Served) -> list[str]:
    if served.differences:
        slots = [line for line in served.differences if line.startswith("slot")] or served.differences
        first = "the draft is fed other tensors than it was trained on: " + "; ".join(slots[:WORST])
    else:
        first = (
            "the server feeds the draft other tensors than it was trained on: a build that reads the layer ids in "
            "another way, or did not read them at all"
        )
    causes = [first]
    if not served.differences:
        causes.append("the draft's weights were not all loaded, or are not those that were validated")
    causes.append("the prompts are of another kind than the validation text, or rendered with another template")
    if result.temperature > 0:
        causes.append(f"the prediction is for greedy decoding; this was sampled at {result.temperature:g}")
    if served.failures:
        causes.append(f"{len(served.failures)} prompts failed and are not counted: {', '.join(served.failures)[:120]}")
    return causes


def _causes_high(served: Served) -> list[str]:
    causes = []
    overall = served.overall
    if overall.looping:
        without = f", tau without them {overall.tau_not_looping:.2f}" if overall.tau_not_looping else ""
        causes.append(
            f"{len(overall.looping)} of {overall.prompts} texts repeat themselves, which any draft predicts{without}"
        )
    causes.append("the prompts draw easier text than the validation set's")
    causes.append("the validation figures are of another draft, or of validation data with the wrong states")
    return causes
