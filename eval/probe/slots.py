"""From matched slots to words: which tensor each slot holds, and how that differs from what was expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.conventions import explain
from eagle3.errors import WiringError
from eagle3.site_match import MAX_ERROR, SlotMatch
from eagle3.wiring import Site, Wiring


def slot_rows(matches: Sequence[SlotMatch], expected: Sequence[str] | None, names: Sequence[str] = ()) -> list[dict]:
    """One table row a slot; `names` replaces the slot's number where the slots have names of their own."""
    out = []
    for place, match in enumerate(matches):
        row: dict[str, Any] = {"slot": names[place] if names else match.slot, "holds": match.site}
        row |= {"cosine": match.cosine, "error": match.error}
        row |= {"runner-up": match.runner_up or None, "its error": match.runner_up_error}
        row |= {
            "margin": f"{match.margin:.1f}x" if match.margin < 1000 else "1000x+",
            "sure": "yes" if match.sure else "no",
        }
        if expected is not None:
            row["expected"] = expected[place] if place < len(expected) else "nothing"
        out.append(row)
    return out


def measured_wiring(matches: Sequence[SlotMatch], like: Wiring) -> Wiring | None:
    """The wiring that the slots spell, on the target of `like`; None when they spell none."""
    try:
        aux = tuple(Site.parse(match.site) for match in matches)
        return Wiring(aux, like.teacher, like.model_type, like.num_layers, like.hidden_size)
    except WiringError:
        return None


def difference_words(matches: Sequence[SlotMatch], expected: Wiring) -> list[str]:
    """Sentences that say how the slots differ from `expected`; empty when they hold exactly that."""
    measured = measured_wiring(matches, expected)
    if measured is not None:
        return explain(expected, measured)
    out = []
    if len(matches) != len(expected.aux):
        out.append(f"{len(matches)} slots arrive where the draft was trained on {len(expected.aux)}")
    for match, site in zip(matches, expected.aux, strict=False):
        if match.site != site.name:
            out.append(f"slot {match.slot} was trained on {site.words}; the server feeds {match.site}")
    doubled = sorted({m.site for m in matches if sum(other.site == m.site for other in matches) > 1})
    out += [f"{site} is fed in more than one slot" for site in doubled]
    return out


MAX_GAP = 0.5  # relative error up to which a slot can still be an incomplete form of a site


@dataclass(frozen=True)
class Doubt:
    """Why a slot is no site up to rounding: a sentence, whether it names a cause, and whether that is a partial sum."""

    line: str
    explained: bool = False
    partial: bool = False


def doubts(
    matches: Sequence[SlotMatch],
    unknown: Tensor,
    reference: Mapping[str, Tensor],
    hidden_size: int,
    ranks: int = 1,
) -> list[Doubt]:
    """One for each slot that is no site up to rounding, with the likely cause where one shows.

    Args:
        matches: what `match_slots` made of `unknown`.
        unknown: [T, k*H].
        reference: site name -> [T, H].
        hidden_size: H.
        ranks: tensor-parallel ranks of the server (1 = unknown or one).
    """
    parts = unknown.float().split(hidden_size, dim=1)
    return [_doubt(match, part, reference, ranks) for match, part in zip(matches, parts, strict=True) if not match.sure]


def _doubt(match: SlotMatch, part: Tensor, reference: Mapping[str, Tensor], ranks: int) -> Doubt:
    line = f"slot {match.slot} is no site up to rounding: closest is {match.site} with error {match.error:.3f}"
    if match.note.startswith(("is ", "points ")):  # a site times a factor
        return Doubt(f"{line}; it {match.note}", True, "partial sum" in match.note)
    if match.note and match.error < MAX_ERROR:
        return Doubt(f"{line}; {match.note}", True)
    words = _partial_words(part, reference, match.site, ranks)
    return Doubt(line + words, bool(words), bool(words))


def added_share(part: Tensor, before: Tensor, after: Tensor) -> float:
    """How much of what one layer adds is present in `part`: the median over rows of its component along that.

    With `after = before + added`, a whole state gives 1. The parts of `added` that n ranks hold sum to it, so their
    shares sum to 1 exactly, and one rank's state, taken before the sum over ranks, gives about 1/n.
    """
    added = after - before  # [T, H]
    share = ((part - before) * added).sum(dim=1) / added.square().sum(dim=1).clamp_min(1e-30)
    return share.median().item()


def _partial_words(part: Tensor, reference: Mapping[str, Tensor], site: str, ranks: int) -> str:
    """What is missing from a slot that lies between two neighbouring sites; empty when it does not.

    One rank's state has the residual stream whole and lacks part of the last layer's work only, so it still points
    nearly where the whole state does.
    """
    names = list(reference)
    here = names.index(site)
    found = []  # (error, share, before, after)
    for place in (here, here + 1):
        if not 1 <= place < len(names) or not _neighbours(names[place - 1], names[place]):
            continue
        before, after = (reference[name].to(part.device).float() for name in names[place - 1 : place + 1])
        share = added_share(part, before, after)
        norm = after.norm(dim=1).clamp_min(1e-30)  # [T]
        error = ((part - before - share * (after - before)).norm(dim=1) / norm).median().item()
        if 0.05 < share < 0.95 and error < MAX_GAP:
            found.append((error, share, names[place - 1], names[place]))
    if ranks == 1 or not found:
        return ""
    _, share, before_name, after_name = min(found)
    return (
        f"; it holds {before_name} and {share:.0%} of what the layer from there to {after_name} adds: a partial sum, "
        f"as one of {ranks} ranks holds before their parts are summed"
    )


def _neighbours(first: str, second: str) -> bool:
    try:
        return Site.parse(second).layer - Site.parse(first).layer == 1
    except WiringError:
        return second == "final" and first.startswith("layer_")


def joined(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Several sequences' states end to end: site name -> [sum of T, H]."""
    return {name: torch.cat([one[name] for one in states]) for name in states[0]}
