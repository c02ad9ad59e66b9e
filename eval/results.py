"""The measured numbers as JSON-able values: one prompt, one set, one way of serving, one run."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle3.atomic import read_json, write_json
from eagle3.checked_fields import filled
from eagle3.errors import IntegrityError, WiringError
from eagle3.repetition import LOOPING, LOOPING_TOKENS, unique_bigrams
from eagle3.wiring import Wiring
from eval.alarm import Alarm
from eval.engines.base import Generation
from eval.training import Training

FORMAT = 1


@dataclass
class Baseline:
    """Plain decoding of the same prompt beside the drafted one."""

    tokens: int
    decode_seconds: float  # after the first token
    same_tokens: bool | None  # None when sampled: two draws need not agree
    first_difference: int | None = None  # index of the first generated token that differs
    top_gap: float | None = None  # the target's first logit minus its second there; near 0 = decided by rounding


@dataclass
class PromptResult:
    """One prompt's continuation and what its verify steps did (fields as in `Generation`)."""

    id: str
    tokens: int
    verifies: int
    correct: int
    proposed: int
    correct_histogram: list[int]
    tried: list[int]
    right: list[int]
    decode_seconds: float  # after the first token
    draft_seconds: float
    ended: bool
    engine_tau: float | None
    unique_bigrams: float  # distinct bigrams / bigrams of the generated tokens
    baseline: Baseline | None
    text: str = ""

    @property
    def looping(self) -> bool:
        """The text repeats itself, which makes it easy to predict and raises accept length."""
        return self.tokens >= LOOPING_TOKENS and self.unique_bigrams < LOOPING


def prompt_result(prompt_id: str, made: Generation, baseline: Baseline | None, text: str = "") -> PromptResult:
    """Condense one generation."""
    return PromptResult(
        id=prompt_id,
        tokens=len(made.tokens),
        verifies=made.verifies,
        correct=made.correct,
        proposed=made.proposed,
        correct_histogram=made.correct_histogram,
        tried=made.tried,
        right=made.right,
        decode_seconds=made.seconds - made.prefill_seconds,
        draft_seconds=made.draft_seconds,
        ended=made.ended,
        engine_tau=made.engine_tau,
        unique_bigrams=unique_bigrams(made.tokens),
        baseline=baseline,
        text=text,
    )


def _tau(prompts: Sequence[PromptResult]) -> float:
    verifies = sum(p.verifies for p in prompts)
    return 1.0 + sum(p.correct for p in prompts) / verifies if verifies else 1.0


def _tau_interval(prompts: Sequence[PromptResult], draws: int = 1000) -> tuple[float, float]:
    """95% bootstrap interval of tau over prompts, from a fixed seed; the point itself for one prompt."""
    if len(prompts) < 2:
        return _tau(prompts), _tau(prompts)
    dice = random.Random(0)
    taus = sorted(_tau(dice.choices(prompts, k=len(prompts))) for _ in range(draws))
    return taus[int(0.025 * draws)], taus[int(0.975 * draws) - 1]


def _ratio(top: float, bottom: float) -> float | None:
    return top / bottom if bottom > 0 else None


@dataclass(frozen=True)
class Wall:
    """A whole batch by the clock on the wall: the tokens of all its texts, and the seconds from first to last.

    With failures in it (`whole` False) the time they took bought no tokens, and there is no rate.
    """

    tokens: int
    seconds: float
    whole: bool = True

    @property
    def rate(self) -> float | None:
        """Tokens a second."""
        return _ratio(self.tokens, self.seconds) if self.whole else None

    @staticmethod
    def total(walls: Sequence[Wall | None]) -> Wall | None:
        """Batches that ran one after another; None where one of them was not measured."""
        known = [wall for wall in walls if wall is not None]
        if not known or len(known) < len(walls):
            return None
        whole = all(wall.whole for wall in known)
        return Wall(sum(wall.tokens for wall in known), sum(wall.seconds for wall in known), whole)


@dataclass
class Summary:
    """A group of prompts, pooled. `None` = not measured.

    The rates without `batch_` are of one text, in tokens a second after its first token. Those with it are of all
    texts together by the wall clock, prompts included, as a server's user pays for it.
    """

    name: str
    prompts: int
    tokens: int
    verifies: int
    correct: int
    proposed: int
    tau: float  # 1 + correct / verifies
    tau_low: float  # 95% bootstrap interval over prompts
    tau_high: float
    engine_tau: float | None  # mean of the engine's own figures
    correct_histogram: list[int]
    acceptance: list[float | None]  # [num_steps] share kept of those judged, per position (conditional)
    reach: list[float | None]  # [num_steps] share of verifies that kept positions 0..k (unconditional)
    tokens_per_second: float | None
    baseline_tokens_per_second: float | None
    speedup: float | None  # pooled rate over pooled baseline rate
    speedup_median: float | None  # median over prompts of the same ratio: less at the mercy of one slow moment
    draft_share: float | None  # share of decode time spent proposing
    same_tokens: int | None  # prompts whose tokens equal plain decoding's; None when sampled or without a baseline
    ended: int  # prompts that stopped at an end token
    looping: list[str]  # ids of texts that repeat themselves
    tau_not_looping: float | None  # tau over the others; None when all loop
    unique_bigrams: float | None = None  # distinct bigrams over bigrams, mean over the texts
    asked: int = 0  # prompts sent; more than `prompts` where some failed
    batch_seconds: float | None = None  # wall time; the figures below are None where a prompt of the batch failed
    batch_tokens_per_second: float | None = None
    baseline_batch_tokens_per_second: float | None = None
    batch_speedup: float | None = None

    @property
    def rate(self) -> float | None:
        """Tokens a second: of the whole batch where that was measured, else of one text."""
        return self.tokens_per_second if self.batch_seconds is None else self.batch_tokens_per_second

    @property
    def plain_rate(self) -> float | None:
        """The same without a draft."""
        return self.baseline_tokens_per_second if self.batch_seconds is None else self.baseline_batch_tokens_per_second

    @property
    def gain(self) -> float | None:
        """The first over the second."""
        return self.speedup if self.batch_seconds is None else self.batch_speedup

    @property
    def measured(self) -> str:
        """`18`, or `17/18` where a prompt failed."""
        return str(self.prompts) if self.asked <= self.prompts else f"{self.prompts}/{self.asked}"


def summarize(
    name: str,
    prompts: Sequence[PromptResult],
    asked: int | None = None,
    wall: Wall | None = None,
    plain_wall: Wall | None = None,
) -> Summary:
    """Pool prompts: counts are summed, so a long text weighs more than a short one.

    Args:
        name: of the group.
        prompts: those that were answered.
        asked: how many were sent; default: as many.
        wall: the whole batch, where it was timed.
        plain_wall: the same without a draft.
    """
    steps = max((len(p.tried) for p in prompts), default=0)
    tried = _column_sums([p.tried for p in prompts], steps)
    right = _column_sums([p.right for p in prompts], steps)
    verifies = sum(p.verifies for p in prompts)
    compared = [(p, p.baseline) for p in prompts if p.baseline is not None]
    timed = [(p, b) for p, b in compared if p.tokens > 1 and b.tokens > 1 and p.decode_seconds > 0 < b.decode_seconds]
    judged = [b.same_tokens for _, b in compared if b.same_tokens is not None]
    rate = _ratio(sum(p.tokens - 1 for p in prompts), sum(p.decode_seconds for p in prompts))
    baseline_rate = _ratio(sum(b.tokens - 1 for _, b in compared), sum(b.decode_seconds for _, b in compared))
    ratios = [(p.tokens - 1) / p.decode_seconds * b.decode_seconds / (b.tokens - 1) for p, b in timed]
    engine_taus = [p.engine_tau for p in prompts if p.engine_tau is not None]
    steady = [p for p in prompts if not p.looping]
    low, high = _tau_interval(prompts)
    return Summary(
        name=name,
        prompts=len(prompts),
        tokens=sum(p.tokens for p in prompts),
        verifies=verifies,
        correct=sum(p.correct for p in prompts),
        proposed=sum(p.proposed for p in prompts),
        tau=_tau(prompts),
        tau_low=low,
        tau_high=high,
        engine_tau=statistics.fmean(engine_taus) if engine_taus else None,
        correct_histogram=_column_sums([p.correct_histogram for p in prompts], steps + 1),
        acceptance=[_ratio(r, t) for r, t in zip(right, tried, strict=True)],
        reach=[_ratio(r, verifies) for r in right],
        tokens_per_second=rate,
        baseline_tokens_per_second=baseline_rate,
        speedup=rate / baseline_rate if rate and baseline_rate else None,
        speedup_median=statistics.median(ratios) if ratios else None,
        draft_share=_ratio(sum(p.draft_seconds for p in prompts), sum(p.decode_seconds for p in prompts)),
        same_tokens=sum(judged) if judged else None,
        ended=sum(p.ended for p in prompts),
        looping=[p.id for p in prompts if p.looping],
        tau_not_looping=_tau(steady) if steady else None,
        unique_bigrams=statistics.fmean(p.unique_bigrams for p in prompts) if prompts else None,
        asked=len(prompts) if asked is None else asked,
        batch_seconds=wall.seconds if wall else None,
        batch_tokens_per_second=wall.rate if wall else None,
        baseline_batch_tokens_per_second=plain_wall.rate if plain_wall else None,
        batch_speedup=_over(wall, plain_wall),
    )


def _column_sums(rows: Sequence[Sequence[int]], width: int) -> list[int]:
    """Sums by place; a text that needed no verify step may have shorter rows."""
    return [sum(row[k] for row in rows if k < len(row)) for k in range(width)]


def _over(wall: Wall | None, plain: Wall | None) -> float | None:
    rate, plain_rate = wall.rate if wall else None, plain.rate if plain else None
    return rate / plain_rate if rate and plain_rate else None


@dataclass
class SetResult:
    """One prompt set under one way of serving."""

    summary: Summary
    key: str  # hash of the set's content
    prompts: list[PromptResult]


@dataclass
class Served:
    """One way of serving: the wiring fed to the draft, how it differs from the trained one, and the numbers."""

    mode: str  # "matched" (the wiring it was trained on) or "native" (the engine's default)
    wiring: dict[str, Any]  # Wiring.to_dict
    differences: list[str]  # in words; empty = the draft is fed what it was trained on
    sets: list[SetResult]
    overall: Summary
    batch: int = 1  # requests in flight at a time
    facts: dict[str, Any] = field(default_factory=dict)  # what the server said of itself; empty in this process
    failures: dict[str, str] = field(default_factory=dict)  # "set/prompt id" -> why it failed, in one line


@dataclass
class AcceptResult:
    """One draft, measured."""

    title: str
    engine: str
    num_steps: int
    temperature: float
    max_new_tokens: int
    seed: int
    trained: dict[str, Any]  # Wiring.to_dict
    engine_ids: dict[str, str]  # engine convention -> ids that feed the trained wiring, or why it cannot
    predicted_acceptance: list[float] | None  # per-step conditional accuracies on validation data
    served: list[Served]
    commands: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    target: str = ""
    draft: str = ""
    alarm: list[Alarm] = field(default_factory=list)  # where served and predicted accept length part too far
    plain_facts: dict[str, Any] = field(default_factory=dict)  # of the server without a draft
    plain_failures: dict[str, str] = field(default_factory=dict)  # "batch n, set/prompt id" -> why
    missing: dict[str, str] = field(default_factory=dict)  # "mode, batch n" of which nothing was measured -> why
    allowed_gap: float | None = None  # between predicted and served tau before there is an alarm, in tokens
    training: Training | None = None  # what the draft was trained on, where the run knows it
    recipes: dict[str, str] = field(default_factory=dict)  # what one would do next, in words -> the command
    probe: dict[str, Any] = field(default_factory=dict)  # the verdict of a probe that stood beside the results
    format: int = FORMAT

    @property
    def ceiling(self) -> int:
        """The most tokens a verify can emit: `num_steps + 1`."""
        return self.num_steps + 1

    @property
    def predicted_tau(self) -> float | None:
        """Accept length that the validation accuracies promise at `num_steps`, or None without them."""
        return predicted_tau(self.predicted_acceptance, self.num_steps)

    @property
    def incomplete(self) -> str:
        """What is missing from the figures, in one clause; empty when nothing is."""
        prompts = len(self.plain_failures) + sum(len(one.failures) for one in self.served)
        parts = [f"{prompts} continuations failed"] if prompts else []
        return ", ".join([*parts, *(f"nothing of {name}" for name in self.missing)])

    def save(self, path: Path) -> None:
        """Write as JSON, atomically."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> AcceptResult:
        """Read what `save` wrote.

        Raises:
            IntegrityError: missing, not JSON, or of another format.
        """
        data = read_json(path, mend="run the eval stage of that run again")
        try:
            if data.pop("format") != FORMAT:
                raise ValueError(f"written in another format than {FORMAT}")
            data["served"] = [_served(one) for one in data["served"]]
            data["alarm"] = [filled(Alarm, one) for one in data.get("alarm", [])]
            data["training"] = Training.from_dict(data["training"]) if data.get("training") else None
            result = filled(cls, data)
            for wiring in (result.trained, *(one.wiring for one in result.served)):
                Wiring.from_dict(wiring)
            return result
        except (KeyError, TypeError, ValueError, AttributeError, WiringError) as err:
            raise IntegrityError(
                "not acceptance results", where=str(path), why=str(err), mend="run the eval stage of that run again"
            ) from None


def predicted_tau(acceptance: Sequence[float] | None, num_steps: int) -> float | None:
    """`1 + sum_k prod_{j<=k} acceptance[j]` over `num_steps`; None when fewer steps are known."""
    if acceptance is None or len(acceptance) < num_steps:
        return None
    return 1.0 + sum(math.prod(acceptance[: k + 1]) for k in range(num_steps))


def _prompt(data: dict[str, Any]) -> PromptResult:
    baseline = data.pop("baseline")
    return filled(PromptResult, {**data, "baseline": filled(Baseline, baseline, "baseline") if baseline else None})


def _set(data: dict[str, Any]) -> SetResult:
    return SetResult(
        filled(Summary, data["summary"], "summary"), data["key"], [_prompt(one) for one in data["prompts"]]
    )


def _served(data: dict[str, Any]) -> Served:
    sets = [_set(one) for one in data.pop("sets")]
    return filled(Served, {**data, "sets": sets, "overall": filled(Summary, data["overall"], "overall")})
