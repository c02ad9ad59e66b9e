"""Which wiring a draft was trained on: its standalone accuracy under each candidate, the best one named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.atomic import read_json
from eagle3.checkpoint import load_served, served_wiring
from eagle3.conventions import TargetShape, explain
from eagle3.draft import Eagle3Draft
from eagle3.errors import DataError
from eagle3.target_weights import TargetWeights
from eagle3.wiring import Site, Wiring
from eval.probe.candidates import Candidates
from eval.probe.expected import sglang_ids
from eval.probe.scoring import CONFIDENCE, Score, TargetEnd, Text, blocks_of, lead, score_text
from eval.probe.verdict import Verdict, cannot_tell

MIN_ROWS = 64
_VLLM_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Subject:
    """The draft under test: the model, the wiring it claims (None = it claims none), its config.json."""

    draft: Eagle3Draft
    claimed: Wiring | None
    config: dict[str, Any]
    where: str


def load_subject(folder: Path, weights: TargetWeights, device: str) -> Subject:
    """Load a served folder of this tool or another.

    Raises:
        IntegrityError: as `load_served`.
        WiringError: its ids do not mean its own wiring.
    """
    config = read_json(Path(folder) / "config.json", mend="give a served folder: config.json and weights")
    claimed = served_wiring(config, str(folder))
    shape = weights.identity()
    slots = int(config.get("num_aux_hidden_states") or len(sglang_ids(config) or ()) or 3)
    any_wiring = Wiring(
        tuple(Site(k) for k in range(slots)), "final", shape.model_type, shape.num_layers, shape.hidden_size
    )  # a folder of another tool names none; load_served wants one for its width
    draft, _, _ = load_served(folder, weights.embedding(), wiring=claimed or any_wiring)
    return Subject(draft.to(device).eval(), claimed, config, str(folder))


def candidates_for(
    subject: Subject, shape: TargetShape, expected: Wiring | None = None, all_of: Iterable[Site] = ()
) -> Candidates:
    """Every wiring worth trying on this draft: its own, all readings of its ids, the default, and their mistakes."""
    out = Candidates(shape, subject.draft.shape.num_aux)
    claim = expected or subject.claimed
    if claim is not None:
        out.add(claim.aux, "expected" if expected else "the draft's own word")
    lists = [sglang_ids(subject.config)]
    if isinstance(subject.config.get(_VLLM_IDS), list):
        lists.append(list(subject.config[_VLLM_IDS]))
    for ids in lists:
        out.add_readings(ids)
    out.add_readings(None)
    bases = [(wiring.aux, reasons[0]) for wiring, reasons in out]
    for aux, reason in bases:
        out.add_mistakes(aux, reason)
    out.add_all(list(all_of)) if all_of else None
    return out


def score_candidates(
    subject: Subject,
    candidates: Candidates,
    texts: Iterable[Text],
    end: TargetEnd,
    steps: int,
    advance: Callable[[], None] = lambda: None,
) -> list[Score]:
    """Score every candidate on every text, best first; one text's states are in memory at a time.

    Raises:
        DataError: too few rows are judged.
    """
    per_row: list[list[Any]] = [[] for _ in range(len(candidates))]
    for text in texts:
        best = end.choices(text.states["final"])
        for place, (wiring, _) in enumerate(candidates):
            per_row[place].append(score_text(subject.draft, text, best, wiring, steps))
        advance()
    scores = [
        Score(wiring, reasons, *blocks_of(rows)) for (wiring, reasons), rows in zip(candidates, per_row, strict=True)
    ]
    judged = int(scores[0].rows.sum()) if scores else 0
    if judged < MIN_ROWS:
        raise DataError(
            "too few tokens to judge a draft by",
            where=subject.where,
            why=f"{judged} rows; at least {MIN_ROWS} are needed",
            mend="give more records or longer ones (--records, --max-tokens)",
        )
    return sorted(scores, key=lambda score: -score.tau)


def judge_draft(scores: list[Score], claim: Wiring | None, shown: int = 12) -> Verdict:
    """Name the wiring that the draft was trained on.

    Args:
        scores: best first, at least one.
        claim: what it says, or what the caller expects; None = name the best only.
        shown: rows of the table, the claim's always among them.
    """
    best = scores[0]
    common: dict[str, Any] = {"rows": _rows(scores, claim, shown), "facts": _facts(scores, claim)}
    rivals = [score for score in scores[1:] if lead(best, score)[0] <= 0]
    own = next((score for score in scores if claim is not None and score.wiring.aux == claim.aux), None)
    reasons = [_score_words(best, "best")]
    if len(scores) > 1:
        low, high = lead(best, scores[1])
        reasons.append(
            f"next is {_names(scores[1])}, behind by {best.tau - scores[1].tau:.3f} "
            f"({CONFIDENCE:.0%} interval {low:.3f} to {high:.3f})"
        )
    if best.tau < 1.02:
        return cannot_tell(
            "the draft predicts next to nothing under any wiring tried",
            reasons,
            "try more wirings with --all-of, and check that this draft belongs to this target",
            **common,
        )
    if own is not None and own is not best and lead(best, own)[0] > 0:
        assert claim is not None
        others = "".join(f" or {_names(one)}" for one in rivals[:2])
        return Verdict(
            False,
            f"the draft was trained on {_names(best)}{others}, not on {_names(own)}",
            [*reasons, _score_words(own, "its claim"), *_as_claimed(explain(best.wiring, claim))],
            f"serve it with {_names(best)} (export it again under that wiring), or retrain it on {_names(own)}",
            **common,
        )
    if rivals:
        names = ", ".join(_names(one) for one in [best, *rivals][:4])
        return cannot_tell(
            f"too close to tell: {names}", reasons, "score more text: raise --records or --max-tokens", **common
        )
    what = f"the draft was trained on {_names(best)}" + (", as it should be" if claim is not None else "")
    return Verdict(True, what, reasons, "", **common)


def _names(score: Score) -> str:
    return "cat(" + ", ".join(score.wiring.names) + ")"


def _as_claimed(lines: list[str]) -> list[str]:
    """No server was asked: the sentences speak of one that trusts the claim."""
    return [line.replace("the server feeds", "served as claimed it is fed") for line in lines]


def _score_words(score: Score, what: str) -> str:
    return (
        f"{what}: {_names(score)} predicts accept length {score.tau:.3f}, first step right {score.accuracy:.1%} "
        f"({score.reasons[0]})"
    )


def _rows(scores: list[Score], claim: Wiring | None, shown: int) -> list[dict[str, Any]]:
    best = scores[0]
    out = []
    for place, score in enumerate(scores):
        own = claim is not None and score.wiring.aux == claim.aux
        if place >= shown and not own:
            continue
        low, high = lead(best, score) if place else (0.0, 0.0)
        out.append(
            {
                "rank": place + 1,
                "wiring": ", ".join(score.wiring.names) + (" *" if own else ""),
                "accept length": score.tau,
                "first step": f"{score.accuracy:.1%}",
                "behind the best": "-" if not place else f"{best.tau - score.tau:.3f} ({low:.3f} to {high:.3f})",
                "why tried": score.reasons[0],
            }
        )
    return out


def _facts(scores: list[Score], claim: Wiring | None) -> dict[str, Any]:
    return {
        "best": scores[0].wiring.names,
        "claim": claim.names if claim is not None else None,
        "rows": int(scores[0].rows.sum()),
        "candidates": [
            {"aux": s.wiring.names, "tau": s.tau, "first_step": s.accuracy, "why": s.reasons} for s in scores
        ],
    }
