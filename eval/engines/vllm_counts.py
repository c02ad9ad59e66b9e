"""vLLM's answer to one completion, with its per-request acceptance counters, as a `Generation`.

`--per-request-spec-decode-metrics detailed` makes each answer carry how many proposals every verify step made and kept
(`v1/metrics/stats.py`, `RequestSpecDecodeMetrics`, read in 0.32.0). A step is recorded before the scheduler looks for
the end of the text, so the last one may have kept more than the text holds; since the steps are told one by one, what
stands past an end token is taken off exactly.
"""

from __future__ import annotations

from typing import Any

from eagle3.errors import DataError
from eval.engines.base import Generation, plain_number

FLAG = "--per-request-spec-decode-metrics detailed"


def generation_from(answer: Any, seconds: float, num_steps: int) -> Generation:
    """Read one answer of `/v1/completions`.

    Args:
        answer: its JSON.
        seconds: wall time of the request.
        num_steps: proposals per verify; 0 = served without a draft.

    Raises:
        DataError: not such an answer, an aborted request, no counters, or counters that the text contradicts.
    """
    tokens, reason, metrics = _parts(answer)
    if reason not in ("stop", "length"):
        raise _impossible("the server did not finish the text", f"finish_reason {reason!r}")
    first = (plain_number(metrics.get("time_to_first_token_ms")) or 0.0) / 1000.0
    times = {"seconds": seconds, "prefill_seconds": min(max(first, 0.0), seconds), "ended": reason == "stop"}
    if num_steps == 0:
        return Generation(tokens, **times)
    stats = _object(metrics.get("speculative_decoding"))
    if not stats and len(tokens) == 1:  # the prefill's own token ended the text
        empty = [0] * num_steps
        return Generation(tokens, 0, 0, 0, [*empty, 0], empty, list(empty), **times)
    kept, made = _steps(stats, num_steps)
    surplus = 1 + len(kept) + sum(kept) - len(tokens)
    if not 0 <= surplus <= num_steps:
        raise _impossible(
            "acceptance counters that the text contradicts",
            f"{len(tokens)} tokens came; the prefill, {len(kept)} verifies and {sum(kept)} kept proposals make "
            f"{len(tokens) + surplus}",
        )
    tried = [min(count + 1, proposals) for count, proposals in zip(kept, made, strict=True)]
    if reason == "stop" and surplus:
        kept[-1] += 1 - surplus
        tried[-1] = kept[-1]
    return Generation(
        tokens,
        verifies=len(kept),
        correct=sum(kept),
        proposed=sum(made),
        correct_histogram=[kept.count(c) for c in range(num_steps + 1)],
        tried=[sum(one > place for one in tried) for place in range(num_steps)],
        right=[sum(one > place for one in kept) for place in range(num_steps)],
        engine_tau=plain_number(stats.get("mean_acceptance_length")),
        **times,
    )


def _parts(answer: Any) -> tuple[list[int], Any, dict[str, Any]]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    tokens = choice.get("token_ids")
    if not isinstance(tokens, list) or any(type(one) is not int for one in tokens):
        keys = sorted(answer) if isinstance(answer, dict) else type(answer).__name__
        raise _impossible("not an answer of /v1/completions", f"found {keys}, expected choices with token_ids")
    if not tokens:
        raise _impossible("the server gave no tokens", "token_ids is empty")
    said = _object(answer.get("usage")).get("completion_tokens", len(tokens))
    if said != len(tokens):
        raise _impossible("the server miscounts its tokens", f"{len(tokens)} ids came, completion_tokens is {said}")
    return tokens, choice.get("finish_reason"), _object(answer.get("metrics"))


def _object(value: Any) -> dict[str, Any]:
    """An object, empty where there is another thing or none."""
    return value if isinstance(value, dict) else {}


def _steps(stats: dict[str, Any], num_steps: int) -> tuple[list[int], list[int]]:
    """Proposals kept and made by each verify step."""
    kept: Any = stats.get("per_step_accepted")
    made: Any = stats.get("per_step_drafted")
    if not all(isinstance(one, list) and all(type(count) is int for count in one) for one in (kept, made)):
        raise _impossible(
            "the server gives no acceptance counters step by step",
            f"metrics.speculative_decoding is {stats!r}; is a draft loaded?",
            mend=f"start it with {FLAG}",
        )
    if stats.get("num_spec_tokens") != num_steps:
        raise _impossible(
            "the server runs with other values than asked",
            f"num_spec_tokens is {stats.get('num_spec_tokens')}, asked {num_steps}",
            mend="set eval.num_steps to the server's",
        )
    complaints = []
    if len(kept) != len(made) or any(not 0 <= k <= m <= num_steps for k, m in zip(kept, made, strict=False)):
        complaints.append(f"steps kept {kept} of {made}")
    if stats.get("num_accepted_draft_tokens") != sum(kept):
        complaints.append(f"{sum(kept)} kept step by step, the count is {stats.get('num_accepted_draft_tokens')}")
    if stats.get("acceptance_histogram") != [kept.count(c) for c in range(num_steps + 1)]:
        complaints.append(f"steps kept {kept}, the histogram is {stats.get('acceptance_histogram')}")
    if complaints:
        raise _impossible("acceptance counters that contradict one another", "; ".join(complaints))
    return list(kept), list(made)


def _impossible(
    what: str, why: str, mend: str = "read the server's log; do not trust this build's counters"
) -> DataError:
    return DataError(what, why=why, mend=mend, page="engines")
