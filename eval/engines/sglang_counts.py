"""SGLang's per-request acceptance counters as a `Generation`, checked for being possible.

Names differ: `spec_num_correct_drafts`, `spec_num_proposed_drafts` and `spec_correct_drafts_histogram` from 0.5.13 on;
`spec_accept_token_num`, `spec_draft_token_num` and (not in 0.5.6) `spec_accept_histogram` before
(`managers/tokenizer_manager.py`, `_calculate_spec_decoding_metrics`, read in 0.5.6.post2 to 0.5.23).

All these builds count a verify's kept proposals *before* they look for the end of the text, so the last verify is
counted whole although the text may end inside it. At the length limit that is what `eval.engines.local` does too. After
an end token it is not: what stands there belongs to no text. The surplus is known exactly (counted tokens minus
returned ones) and is taken off `correct`, so tau is exact; the histogram moves one verify to match.
"""

from __future__ import annotations

from typing import Any

from eagle3.errors import DataError
from eval.engines.base import Generation, chain_counts, plain_number

_CORRECT = ("spec_num_correct_drafts", "spec_accept_token_num")
_PROPOSED = ("spec_num_proposed_drafts", "spec_draft_token_num")
_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")


def generation_from(answer: Any, seconds: float, num_steps: int, draft_tokens: int) -> Generation:
    """Read one answer of `/generate`.

    Args:
        answer: its JSON.
        seconds: wall time of the request.
        num_steps: proposals in a chain; 0 = served without a draft.
        draft_tokens: tokens judged per verify, the last accepted one included.

    Raises:
        DataError: not such an answer, an aborted request, or counters that contradict one another or the text.
    """
    tokens, meta = _parts(answer)
    finish = meta.get("finish_reason") or {}
    kind = finish.get("type") if isinstance(finish, dict) else finish
    if kind not in ("stop", "length"):
        raise _impossible("the server did not finish the text", f"finish_reason {finish!r}")
    said = meta.get("completion_tokens", len(tokens))
    if said != len(tokens):
        raise _impossible("the server miscounts its tokens", f"{len(tokens)} ids came, completion_tokens is {said}")
    ended = kind == "stop"
    if num_steps == 0:
        return Generation(tokens, seconds=seconds, ended=ended)
    if len(tokens) == 1 and not meta.get("spec_verify_ct"):  # the prefill's own token ended the text
        empty = [0] * num_steps
        return Generation(tokens, 0, 0, 0, [*empty, 0], empty, list(empty), seconds=seconds, ended=ended)
    return _counted(tokens, meta, seconds, num_steps, draft_tokens, ended)


def _parts(answer: Any) -> tuple[list[int], dict[str, Any]]:
    tokens = answer.get("output_ids") if isinstance(answer, dict) else None
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not isinstance(meta, dict) or any(type(one) is not int for one in tokens):
        keys = sorted(answer) if isinstance(answer, dict) else type(answer).__name__
        raise _impossible("not an answer of /generate", f"found {keys}, expected output_ids (whole numbers), meta_info")
    if not tokens:
        raise _impossible("the server gave no tokens", "output_ids is empty")
    return tokens, meta


def _counted(
    tokens: list[int], meta: dict[str, Any], seconds: float, num_steps: int, draft_tokens: int, ended: bool
) -> Generation:
    verifies = _number(meta, ("spec_verify_ct",))
    correct = _number(meta, _CORRECT)
    proposed = _number(meta, _PROPOSED)
    histogram = _histogram(meta, verifies, correct, num_steps)
    _check(verifies, correct, proposed, histogram, draft_tokens)
    retractions = _number({"num_retractions": meta.get("num_retractions") or 0}, ("num_retractions",))
    surplus = 1 + retractions + verifies + correct - len(tokens)
    if not 0 <= surplus <= num_steps:
        raise _impossible(
            "acceptance counters that the text contradicts",
            f"{len(tokens)} tokens came; the prefill, {verifies} verifies and {correct} kept proposals make "
            f"{len(tokens) + surplus}",
        )
    if ended and surplus > 1:
        correct -= surplus - 1
        histogram = _without_surplus(histogram, surplus)
    tried, right = chain_counts(histogram)
    return Generation(
        tokens=tokens,
        verifies=verifies,
        correct=correct,
        proposed=proposed,
        correct_histogram=histogram,
        tried=tried,
        right=right,
        seconds=seconds,
        ended=ended,
        engine_tau=plain_number(meta.get("spec_accept_length")),
    )


def _without_surplus(histogram: list[int], surplus: int) -> list[int]:
    """Move the last verify from the bin it was counted in, c, to what it kept up to the end token, c + 1 - surplus.

    Which bin that was is not told where several are possible; then the fullest is taken. tau does not depend on it.

    Raises:
        DataError: no bin is possible.
    """
    out = list(histogram)
    counted = max(range(surplus, len(out)), key=lambda c: (out[c], c))
    if not out[counted]:
        raise _impossible(
            "acceptance counters that the text contradicts",
            f"the text ended {surplus - 1} tokens before its last verify did, which none of {histogram} can have kept",
        )
    out[counted] -= 1
    out[counted + 1 - surplus] += 1
    return out


def _number(meta: dict[str, Any], names: tuple[str, ...]) -> int:
    value = next((meta[name] for name in names if name in meta), None)
    if type(value) is not int or value < 0:
        raise _impossible(
            "the server gives no acceptance counters",
            f"meta_info has {names[0]}={value!r}; is a draft loaded?",
            mend="see in the server's log whether it speculates",
        )
    return value


def _histogram(meta: dict[str, Any], verifies: int, correct: int, num_steps: int) -> list[int]:
    """Padded to `num_steps + 1`; where the build gives none, only what follows from the counts alone."""
    found = next((meta[name] for name in _HISTOGRAM if name in meta), None)
    if found is not None:
        sound = isinstance(found, list) and all(type(one) is int and one >= 0 for one in found)
        if not sound or len(found) > num_steps + 1:
            raise _impossible(
                "an impossible acceptance histogram", f"found {found!r}, expected up to {num_steps + 1} counts"
            )
        return [*found, *[0] * (num_steps + 1 - len(found))]
    middle = [0] * (num_steps - 1)
    if num_steps == 1 or correct == 0:
        return [verifies - correct, *middle, correct]
    if correct == verifies * num_steps:
        return [0, *middle, verifies]
    raise _impossible(
        "this build gives no acceptance histogram",
        "acceptance by position cannot be told from the counts alone",
        mend="serve with SGLang 0.5.9 or newer, or measure with eval.num_steps=1",
    )


def _check(verifies: int, correct: int, proposed: int, histogram: list[int], draft_tokens: int) -> None:
    kept = sum(count * c for c, count in enumerate(histogram))
    complaints = []
    if sum(histogram) != verifies:
        complaints.append(f"the histogram holds {sum(histogram)} verifies, spec_verify_ct is {verifies}")
    if kept != correct:
        complaints.append(f"the histogram holds {kept} kept proposals, the count is {correct}")
    if proposed != verifies * (draft_tokens - 1):
        complaints.append(f"{proposed} proposals in {verifies} verifies, expected {draft_tokens - 1} each")
    if complaints:
        raise _impossible("acceptance counters that contradict one another", "; ".join(complaints))


def _impossible(
    what: str, why: str, mend: str = "read the server's log; do not trust this build's counters"
) -> DataError:
    return DataError(what, why=why, mend=mend, page="engines")
