"""Whether the aux states of one target are the same on 1 rank and on n: captures before the all-reduce are not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3.errors import DataError
from eval.probe.dump import Dump
from eval.probe.live import NO_FUSION
from eval.probe.verdict import Verdict

MIN_COSINE = 0.999
MAX_ERROR = 0.05
MAX_BAD_ROWS = 0.05  # share of rows that may differ by more (near-ties in a router flip single tokens)
SCALE_SPREAD = 0.05


def compare_ranks(one: Dump, other: Dump) -> Verdict:
    """Compare two servers' aux states on the same prompts, slot by slot.

    Args:
        one: the side to trust, on fewer ranks.
        other: the side to judge; swapped with `one` when it has fewer ranks.

    Raises:
        DataError: other prompts, another target width or another number of slots.
    """
    if other.ranks < one.ranks:
        one, other = other, one
    _check_comparable(one, other)
    a, b = torch.cat(one.states), torch.cat(other.states)  # [T, k*H]
    width = one.hidden_size
    pairs = list(zip(a.split(width, dim=1), b.split(width, dim=1), strict=True))
    rows = [_slot_row(slot, x, y) for slot, (x, y) in enumerate(pairs)]
    bad = [slot for slot, row in enumerate(rows) if row["same"] == "no"]
    sides = f"{one.name} ({_ranks(one)}) and {other.name} ({_ranks(other)})"
    facts = {"sides": [one.name, other.name], "ranks": [one.ranks, other.ranks], "tokens": len(a)}
    if not bad:
        reasons = [f"{len(one.prompts)} prompts, {len(a)} tokens, {len(pairs)} slots: {sides}"]
        if one.ranks == other.ranks:
            reasons.append("both sides have the same number of ranks: this says nothing about the sum over ranks")
        return Verdict(True, "both sides feed the same tensors", reasons, "", rows=rows, facts=facts)
    words = [_slot_words(slot, *pairs[slot], one, other) for slot in bad]
    partial = any("partial sum" in line for line in words)
    what = f"{len(bad)} of {len(pairs)} slots differ" + (": partial sums on one side" if partial else "")
    mend = (
        f"trust the side with {_ranks(one)}; as to the other, {NO_FUSION}"
        if one.ranks != other.ranks
        else "check that both sides serve the same weights and layer ids, and probe each with live"
    )
    return Verdict(False, what, [*words, sides], mend, rows=rows, facts=facts)


def _check_comparable(one: Dump, other: Dump) -> None:
    why = ""
    if len(one.prompts) != len(other.prompts) or not all(
        torch.equal(x, y) for x, y in zip(one.prompts, other.prompts, strict=False)
    ):
        why = "the prompts are not the same"
    elif one.hidden_size != other.hidden_size:
        why = f"widths {one.hidden_size} and {other.hidden_size}: two targets"
    elif [x.shape for x in one.states] != [x.shape for x in other.states]:
        slots = [side.states[0].shape[1] // side.hidden_size for side in (one, other)]
        why = f"{slots[0]} and {slots[1]} slots" if slots[0] != slots[1] else "rows are missing on one side"
    if why:
        raise DataError(
            "the two sides cannot be compared",
            where=f"{one.name} and {other.name}",
            why=why,
            mend="ask both with the same --target, --prompts and layer ids",
        )


def _figures(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: cosine, relative error and the factor from `x` to `y`, [T] each."""
    norm = x.norm(dim=1).clamp_min(1e-30)
    dot = (x * y).sum(dim=1)
    return dot / (norm * y.norm(dim=1).clamp_min(1e-30)), (x - y).norm(dim=1) / norm, dot / norm.square()


def _slot_row(slot: int, x: Tensor, y: Tensor) -> dict[str, Any]:
    cosine, error, factor = _figures(x, y)
    far = (error > MAX_ERROR).float().mean().item()
    same = cosine.median().item() > MIN_COSINE and error.median().item() < MAX_ERROR and far <= MAX_BAD_ROWS
    return {
        "slot": slot,
        "cosine": cosine.median().item(),
        "error": error.median().item(),
        "factor": factor.median().item(),
        "rows that differ": f"{far:.0%}",
        "same": "yes" if same else "no",
    }


def _slot_words(slot: int, x: Tensor, y: Tensor, one: Dump, other: Dump) -> str:
    cosine, error, factor = _figures(x, y)
    middle = factor.median().item()
    far = (error > MAX_ERROR).float().mean().item()
    if cosine.median().item() > MIN_COSINE and abs(middle - 1) > SCALE_SPREAD:
        share = f"1/{other.ranks}" if _is_share(middle, other.ranks) else f"{middle:.3g}"
        tail = f": a partial sum of one of {other.ranks} ranks" if _is_share(middle, other.ranks) else ""
        return f"slot {slot} on {other.name} is {share} times that on {one.name}{tail}"
    if error.median().item() < MAX_ERROR:
        return f"slot {slot}: {far:.0%} of the rows differ, the rest agree; the server may mix up requests"
    if other.ranks > one.ranks and cosine.median().item() > 0.5:
        return (
            f"slot {slot} on {other.name} lacks part of what that on {one.name} holds (error {error.median():.3f}): as "
            f"a partial sum does, captured before the {other.ranks} ranks' parts were summed"
        )
    return f"slot {slot} holds another tensor (cosine {cosine.median():.3f}, error {error.median():.3f})"


def _is_share(factor: float, ranks: int) -> bool:
    return ranks > 1 and abs(factor * ranks - 1) < 0.1


def _ranks(side: Dump) -> str:
    return f"{side.ranks} rank" + ("s" if side.ranks != 1 else "")
