"""Tell which site of a target an unnamed hidden state is, by comparing it with states whose site is known.

Neighbouring layers of a residual stream point almost the same way (cosines of 0.99 and more), so the site is chosen
by relative error, and the cosine is only reported beside it. Both are taken row by row (a row is one token), and the
error of a slot is the median of its rows: the first token of a trained target often carries a norm hundreds of times
that of the others, and would drown them in a sum over the whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.errors import DataError

MIN_COSINE = 0.999
MAX_ERROR = 0.05  # a cosine of 0.999 is a relative error of 0.045 at equal norms
# Rounding error is spread over all H directions, so hardly any of it points from one site to the next: at this margin
# the two sites differ by more than the whole rounding error, many times what could turn the choice.
MIN_MARGIN = 1.5
MIN_ROWS = 0.9  # share of rows that must fit the chosen site better than any other
TINY = 1e-7  # float32 rounding: a smaller error says no more than this one


@dataclass(frozen=True)
class SlotMatch:
    """The site that fits a slot best, and how far ahead of the next one it is.

    Args:
        slot: place in the joined states, from 0.
        site: name of the best site.
        cosine: mean cosine of its rows with the slot's.
        error: median over rows of `||slot - site|| / ||site||`.
        runner_up: name of the next best site; empty when only one was given.
        runner_up_cosine, runner_up_error: the same two figures of that site.
        note: why the best site is still not the slot, where there is something to say: the slot is a site times a
            factor, or part of its rows are from elsewhere. Empty otherwise.
    """

    slot: int
    site: str
    cosine: float
    error: float
    runner_up: str
    runner_up_cosine: float
    runner_up_error: float
    note: str = ""

    @property
    def margin(self) -> float:
        """How many times larger the runner-up's error is; about 1 means that the two cannot be told apart."""
        return self.runner_up_error / max(self.error, TINY)

    @property
    def sure(self) -> bool:
        """The slot is that site: it agrees up to rounding, the next best site is clearly worse, nothing to note."""
        fits = self.cosine > MIN_COSINE and self.error < MAX_ERROR
        return fits and self.margin >= MIN_MARGIN and not self.note


def match_slots(unknown: Tensor, reference: Mapping[str, Tensor], hidden_size: int) -> list[SlotMatch]:
    """Name the site of every slot of joined hidden states.

    Args:
        unknown: [T, k*H], any float dtype; slot i is columns `i*H` to `(i+1)*H`.
        reference: site name -> [T, H], the target's states on the same tokens.
        hidden_size: H.

    Returns:
        One match a slot, in slot order; ask each for `sure` before believing it.

    Raises:
        DataError: shapes that do not fit, states that are not finite, or no reference.
    """
    _check(unknown, reference, hidden_size)
    return [_match(slot, part.float(), reference) for slot, part in enumerate(unknown.split(hidden_size, dim=1))]


def _check(unknown: Tensor, reference: Mapping[str, Tensor], hidden_size: int) -> None:
    problem = ""
    if unknown.ndim != 2 or unknown.numel() == 0 or unknown.shape[1] % hidden_size:
        problem = f"states of shape {list(unknown.shape)}, expected [T, k*{hidden_size}]"
    elif not bool(unknown.isfinite().all()):
        problem = "the states hold NaN or infinite values"
    elif not reference:
        problem = "no states to compare with"
    for name, state in reference.items():
        if not problem and list(state.shape) != [unknown.shape[0], hidden_size]:
            problem = f"{name} has shape {list(state.shape)}, expected {[unknown.shape[0], hidden_size]}"
    if problem:
        raise DataError(
            "cannot match hidden states with the target's sites",
            why=problem,
            mend="compare states of the same tokens and the same target",
        )


def _match(slot: int, part: Tensor, reference: Mapping[str, Tensor]) -> SlotMatch:
    names = list(reference)
    rows = [_row_figures(part, state.to(part.device).float()) for state in reference.values()]
    cosines = torch.stack([cosine for cosine, _ in rows])  # [S, T]
    errors = torch.stack([error for _, error in rows])  # [S, T]
    score = errors.median(dim=1).values  # [S]
    order = score.argsort().tolist()
    best = order[0]
    note = _scale_note(part, reference, names, cosines, score[best].item())
    if not note and len(names) > 1:
        note = _row_note(names, errors, best)
    second = order[1] if len(order) > 1 else None
    return SlotMatch(
        slot=slot,
        site=names[best],
        cosine=cosines[best].mean().item(),
        error=score[best].item(),
        runner_up="" if second is None else names[second],
        runner_up_cosine=0.0 if second is None else cosines[second].mean().item(),
        runner_up_error=float("inf") if second is None else score[second].item(),
        note=note,
    )


def _row_figures(part: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and relative error of each row: [T], [T]."""
    norm = state.norm(dim=1).clamp_min(1e-30)
    cosine = (part * state).sum(dim=1) / (norm * part.norm(dim=1).clamp_min(1e-30))
    return cosine, (part - state).norm(dim=1) / norm


def _scale_note(
    part: Tensor, reference: Mapping[str, Tensor], names: list[str], cosines: Tensor, best_error: float
) -> str:
    """Say it when no site fits as it is, and one does after its rows are multiplied by a number."""
    if best_error < MAX_ERROR:
        return ""
    closest = int(cosines.median(dim=1).values.argmax())
    if cosines[closest].median().item() < MIN_COSINE:
        return ""
    state = reference[names[closest]].to(part.device).float()
    factors = (part * state).sum(dim=1) / state.square().sum(dim=1).clamp_min(1e-30)  # [T]
    middle = factors.median().item()
    spread = ((factors - middle).abs().median() / abs(middle)).item() if middle else float("inf")
    if spread > 0.02:
        return f"points as {names[closest]} does, at another length in every row: a normed form of it"
    inverse = 1.0 / middle
    whole = round(inverse)
    if whole > 1 and abs(inverse - whole) < 0.05 * whole:
        return f"is {names[closest]} times 1/{whole}: a partial sum of {whole} ranks, or averaged over {whole}"
    return f"is {names[closest]} times {middle:.3g}: scaled on its way here"


def _row_note(names: list[str], errors: Tensor, best: int) -> str:
    """Say it when part of the rows fit another site better, as a mix of records or a shift of tokens would do."""
    winners = errors.argmin(dim=0)  # [T]
    # Rows in which two sites agree to rounding are no evidence against the best one.
    lost = (winners != best) & (errors[best] > MIN_MARGIN * errors.amin(dim=0).clamp_min(TINY))
    count, total = int(lost.sum()), errors.shape[1]
    if count <= (1 - MIN_ROWS) * total:
        return ""
    other = int(winners[lost].mode().values)
    return f"{count} of {total} rows fit another site better, most of them {names[other]}"
