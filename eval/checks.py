"""What was asked of a server against what it turned out to do, as rows of question, answers and verdict.

Each verdict is a word, so that it reads without colour: `agrees`, `differs`, `not known`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.atomic import read_json
from eagle3.errors import IntegrityError
from eagle3.wiring import Wiring
from eval.series import Series

AGREES, DIFFERS, UNKNOWN = "agrees", "differs", "not known"
PROBE = "probe.json"
PROBED = {"agrees": AGREES, "disagrees": DIFFERS}

# What a server says of itself -> the words, and where the number asked for stands.
RESOLVED = {
    "speculative_num_steps": "Proposals a verify step",
    "speculative_algorithm": "Speculative algorithm",
    "speculative_method": "Speculative algorithm",
}


@dataclass(frozen=True)
class Check:
    """One question. `asked` and `found` are in words, `verdict` one of the three above."""

    question: str
    asked: str
    found: str
    verdict: str
    note: str = ""


def checks(series: Series) -> list[Check]:
    """Everything that tells whether this way of serving is what was asked for, the most telling first."""
    rows = [_tensors(series), *_resolved(series), *_probe(series), _accept_length(series), _texts(series)]
    return [row for row in rows if row is not None]


def probe_beside(path: Path) -> dict[str, Any]:
    """The verdict of `python -m eval.probe live --json > probe.json` beside some results; empty where there is none."""
    found = Path(path).parent / PROBE
    try:
        verdict = read_json(found) if found.exists() else {}
    except IntegrityError:
        return {}  # the shell has emptied it for a probe that is running, or that failed
    return verdict if isinstance(verdict, dict) and "verdict" in verdict else {}


def _tensors(series: Series) -> Check:
    """The wiring: by name in this process, by ids and a build's convention in a server."""
    trained, served = Wiring.from_dict(series.result.trained), Wiring.from_dict(series.served.wiring)
    verdict = DIFFERS if series.served.differences else AGREES
    facts = series.served.facts
    if not facts:
        return Check(
            "Tensors fed to the draft", _slots(trained), _slots(served), verdict, "fed by name in this process"
        )
    ids = facts.get("ids")
    asked = f"layer ids {ids}" if ids is not None else "the ids in the draft's own config"
    return Check("Layer ids", asked, f"mean {_slots(served)}", verdict, _rule(facts))


def _rule(facts: dict[str, Any]) -> str:
    """Which convention reads the ids, and how that is known."""
    name, source = facts.get("convention"), facts.get("convention_from")
    return f"by the convention {name}" + (f", from {source}" if source else "") if name else ""


def _slots(wiring: Wiring) -> str:
    return ", ".join(site.words for site in wiring.aux)


def _resolved(series: Series) -> list[Check]:
    """Settings that engines cap or replace quietly."""
    said = series.served.facts.get("resolved") or {}
    wanted = {"speculative_num_steps": series.result.num_steps}
    rows = []
    for name, words in RESOLVED.items():
        if name not in said:
            continue
        found = said[name]
        asked = wanted.get(name, "EAGLE3")
        same = str(found).upper() == str(asked).upper()
        rows.append(Check(words, str(asked), f"the server runs {found}", AGREES if same else DIFFERS))
    return rows


def _probe(series: Series) -> list[Check]:
    """What a probe of the server measured; without one, that the tensors themselves were not looked at."""
    if not series.served.facts or series.served.mode != "matched":
        return []
    said = series.result.probe
    question, asked = "Tensors as measured by the probe", "the trained wiring"
    if not said:
        note = "only python -m eval.probe live measures the tensors"
        return [Check(question, asked, "no probe was run", UNKNOWN, note)]
    return [Check(question, asked, str(said.get("what", "")), PROBED.get(said["verdict"], UNKNOWN), _first(said))]


def _first(said: dict[str, Any]) -> str:
    reasons: Sequence[str] = said.get("reasons") or []
    return str(reasons[0]) if reasons else ""


def _accept_length(series: Series) -> Check:
    """Predicted against served."""
    result, overall = series.result, series.served.overall
    question = "Accept length"
    found = f"served {overall.tau:.2f} ({overall.tau_low:.2f} to {overall.tau_high:.2f})"
    if result.predicted_tau is None:
        return Check(question, "no prediction", found, UNKNOWN, "there are no validation figures")
    asked = f"predicted {result.predicted_tau:.2f}"
    if series.alarms:
        return Check(question, asked, found, DIFFERS, f"up to {series.alarms[0].bound:.2f} is allowed")
    if result.allowed_gap is None:
        return Check(question, asked, found, AGREES, "no alarm was raised")
    note = f"up to {result.allowed_gap:.2f} is allowed, beyond what the choice of prompts explains"
    return Check(question, asked, found, AGREES, note)


def _texts(series: Series) -> Check | None:
    """Greedy texts against plain decoding's."""
    overall = series.served.overall
    if overall.same_tokens is None:
        return None
    same = overall.same_tokens == overall.prompts
    found = f"{overall.same_tokens} of {overall.prompts} are the same, token for token"
    note = "" if same else "read the cautions on this page before calling it a fault"
    return Check("Texts, against plain decoding", "the same", found, AGREES if same else DIFFERS, note)
