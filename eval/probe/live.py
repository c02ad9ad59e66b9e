"""Which tensors a running SGLang server feeds a draft: its aux states, slot by slot, against the target's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.conventions import EngineConvention
from eagle3.errors import DataError, WiringError
from eagle3.site_match import SlotMatch, match_slots
from eagle3.wiring import Wiring
from eval.probe.expected import Expected, site_names
from eval.probe.server import WHOLE_PREFILL, Answer, ProbeServer, ServerFacts, check_rows
from eval.probe.slots import Doubt, difference_words, doubts, joined, measured_wiring, slot_rows
from eval.probe.verdict import Verdict, cannot_tell

NO_FUSION = (
    "restart it with flashinfer's fused all-reduce off (--enforce-disable-flashinfer-allreduce-fusion in 0.5.23), for "
    "captures before the sum over ranks hold one rank's part; then probe again"
)
LATE = (
    "SGLang 0.5.6 to 0.5.10 capture their CUDA graphs before they set the draft's layer ids: restart it with "
    "--disable-cuda-graph, or take 0.5.13 or newer"
)
MIN_DECODED = 8  # generated tokens fed back, over all prompts
SAME_ERROR = 0.05  # relative error up to which two answers to one prompt are the same


@dataclass(frozen=True)
class Fed:
    """What the server fed on one prompt, and what the target itself has there.

    Args:
        answer: the server's, checked: one row a prompt token.
        reference: site name -> [n, H]; n is the prompt's tokens, or those and the generated ones that were fed back.
    """

    answer: Answer
    reference: Mapping[str, Tensor]

    @property
    def prompt_reference(self) -> dict[str, Tensor]:
        """The target's states on the prompt's own tokens."""
        return {name: state[: len(self.answer.rows)] for name, state in self.reference.items()}

    def decoded(self) -> tuple[Tensor, dict[str, Tensor]] | None:
        """States of generated tokens, and the target's there; None when the server returned not one for each."""
        begin, count = len(self.answer.rows), len(self.answer.output_ids) - 1
        known = next(iter(self.reference.values())).shape[0] - begin
        if count < 1 or self.answer.decoded.shape != (count, self.answer.rows.shape[1]) or known != count:
            return None
        return self.answer.decoded, {name: state[begin:] for name, state in self.reference.items()}


def ask(
    server: ProbeServer, facts: ServerFacts, prompts: Sequence[Sequence[int]], hidden_size: int, new_tokens: int = 1
) -> tuple[list[Answer], list[str]]:
    """Aux states of each prompt, sent alone; and what sending them together shows.

    Batches have returned other requests' states in some builds, so the prompts are also sent in one request and
    compared, where no prefix cache would shorten the second answer.

    Raises:
        RedraftError: a request failed.
        DataError: rows are missing (the cause is named), have a wrong width, or are not finite.
    """
    alone = []
    for place, ids in enumerate(prompts):
        answer = server.states(ids, new_tokens)
        check_rows(answer, len(ids), facts, hidden_size, f"{server.url}, prompt {place}")
        alone.append(answer)
    if len({answer.rows.shape[1] for answer in alone}) > 1:
        raise DataError("the server feeds some prompts more slots than others", where=server.url, mend="see its log")
    if len(prompts) < 2 or facts.prefix_cache:
        return alone, []
    together = server.batch_states(prompts)
    for place, (one, other) in enumerate(zip(alone, together, strict=True)):
        if one.rows.shape != other.rows.shape or _error(other.rows, one.rows) > SAME_ERROR:
            return alone, [
                f"prompt {place} gets other states in a batch than alone: the server mixes up requests of one batch"
            ]
    return alone, []


def judge_live(facts: ServerFacts, fed: Sequence[Fed], expected: Expected, like: Wiring) -> Verdict:
    """Name every slot and compare with what the draft expects and with what the build's convention promises.

    Args:
        facts: the server's own.
        fed: the server's states and the target's, a prompt each.
        expected: the draft's wants; its wiring may be None: then slots are named and only the convention is compared.
        like: a wiring on the same target (for its shape).
    """
    unknown = torch.cat([one.answer.rows for one in fed])
    reference = joined([one.prompt_reference for one in fed])
    matches = match_slots(unknown, reference, like.hidden_size)
    doubtful = doubts(matches, unknown, reference, like.hidden_size, facts.ranks)
    names = site_names(expected.wiring)
    common: dict[str, Any] = {"rows": slot_rows(matches, names), "facts": _facts(facts, matches, len(unknown))}
    found = f"the server feeds {', '.join(match.site for match in matches)}"
    different = difference_words(matches, expected.wiring) if expected.wiring is not None else []
    if doubtful:
        return _doubtful(facts, doubtful, different, common)
    decoding = _compare_decoding(fed, matches, like.hidden_size)
    if decoding.torn:
        what = f"{found} while it reads a prompt, and others while it generates"
        return Verdict(False, what, [*decoding.torn, *different], LATE, **common)
    if not decoding.compared and _late_graphs(facts, matches, like):
        what = f"{found} while it reads a prompt; what it feeds while it generates could not be seen"
        return cannot_tell(what, [decoding.words, *different], LATE, **common)
    surprise = _surprise(facts, matches, expected, like)
    if expected.wiring is None:
        if surprise:
            return Verdict(False, found, surprise, _trust_measurement(matches), **common)
        return Verdict(
            True, found, [f"{expected.source}: nothing to compare with", decoding.words, *_known(facts)], "", **common
        )
    if different:
        mend = _mend(facts.convention(), matches, expected, like, bool(surprise))
        return Verdict(False, f"{found}, and the draft expects others", [*different, *surprise], mend, **common)
    return Verdict(
        True, f"{found}, as expected", [expected.source, decoding.words, *surprise, *_known(facts)], "", **common
    )


@dataclass(frozen=True)
class Decoding:
    """Whether generated tokens are fed as prompts are: could it be seen, in words, and what contradicts it."""

    compared: bool
    words: str
    torn: list[str]


def _compare_decoding(fed: Sequence[Fed], matches: Sequence[SlotMatch], hidden_size: int) -> Decoding:
    """Match the states of generated tokens too.

    Some builds capture their CUDA graphs before they set the draft's ids: then prompts, which run without graphs, get
    the ids' sites, and every token after them the default ones.
    """
    pairs = [pair for one in fed if (pair := one.decoded()) is not None]
    count = sum(len(rows) for rows, _ in pairs)
    if count < MIN_DECODED:
        return Decoding(
            False, f"only prompts were compared: the server returned {count} usable states of generated tokens", []
        )
    unknown, reference = torch.cat([rows for rows, _ in pairs]), joined([states for _, states in pairs])
    decoded = match_slots(unknown, reference, hidden_size)
    if not all(one.sure for one in decoded):
        return Decoding(False, "only prompts were compared: the states of generated tokens match no site", [])
    torn = [
        f"slot {one.slot} holds {one.site} on prompts and {other.site} on generated tokens"
        for one, other in zip(matches, decoded, strict=True)
        if one.site != other.site
    ]
    return Decoding(True, f"prompts and {count} generated tokens are fed alike", torn)


def _late_graphs(facts: ServerFacts, matches: Sequence[SlotMatch], like: Wiring) -> bool:
    """The server may feed the default sites to generated tokens, whatever it feeds to prompts."""
    known = facts.convention()
    if known is None or not known.name.startswith("sglang-0.5.9") or facts.without_graphs:
        return False
    measured = measured_wiring(matches, like)
    return measured is None or not known.render_default_ok(measured)


def refuse_other_ids(facts: ServerFacts, expected: Expected) -> Verdict | None:
    """A server that captures without a draft was told ids; they must be those the draft's config would give it."""
    if not facts.captures or not expected.has_folder or facts.capture_ids == expected.ids:
        return None
    asked, wanted = _ids_words(facts.capture_ids), _ids_words(expected.ids)
    if expected.ids and min(expected.ids) < 0:
        mend = (
            "the capture flag takes no negative ids: serve the draft itself with --enable-return-hidden-states "
            f"{WHOLE_PREFILL} and probe that server"
        )
    else:
        flag = f" --return-aux-hidden-state-layer-ids {' '.join(map(str, expected.ids))}" if expected.ids else ""
        mend = f"restart it with{flag or 'out --return-aux-hidden-state-layer-ids'}"
    return cannot_tell(
        "the server was started with other layer ids than this draft's config holds",
        [f"it captures {asked}; with this draft it would read {wanted}"],
        mend,
        facts={"version": facts.version, "url": facts.url},
    )


def _doubtful(facts: ServerFacts, found: list[Doubt], different: list[str], common: dict[str, Any]) -> Verdict:
    lines = [one.line for one in found]
    if any(one.partial for one in found):
        return Verdict(False, "the server feeds partial sums", [*lines, *different], NO_FUSION, **common)
    if any(one.explained for one in found):
        return Verdict(
            False,
            "some slots are no site of this target",
            [*lines, *different],
            "the reasons name the cause; check that --target holds the very weights that are served",
            **common,
        )
    return cannot_tell(
        "some slots match no site up to rounding",
        lines,
        "check that --target holds the very weights that are served (same quantization), and ask with more prompts",
        **common,
    )


def _surprise(facts: ServerFacts, matches: Sequence[SlotMatch], expected: Expected, like: Wiring) -> list[str]:
    """A sentence when the build feeds something else than the convention known for its version promises."""
    known = facts.convention()
    if known is None:
        return []
    ids = facts.capture_ids if facts.captures else expected.ids
    if not facts.captures and not expected.has_folder:
        return []
    try:
        promised = known.parse_like(ids, like)
    except WiringError as err:
        return [f"{known.name} should not be able to serve {_ids_words(ids)} at all: {err.what}"]
    measured = measured_wiring(matches, like)
    if measured is not None and measured.aux == promised.aux:
        return []
    return [
        f"{known.name} should feed {', '.join(promised.names)} for {_ids_words(ids)}: this build does not follow the "
        "rule known for its version (a patch, or a source build between releases)"
    ]


def _known(facts: ServerFacts) -> list[str]:
    known = facts.convention()
    return [f"SGLang {facts.version}; ids are read by {known.name}"] if known else [f"SGLang {facts.version}"]


def _mend(
    known: EngineConvention | None,
    matches: Sequence[SlotMatch],
    expected: Expected,
    like: Wiring,
    surprised: bool,
) -> str:
    measured = measured_wiring(matches, like)
    retrain = _trust_measurement(matches) if measured else "find out what the server does to its aux states"
    if known is None or surprised or expected.wiring is None:
        return retrain
    try:
        ids = known.render(expected.wiring)
    except WiringError as err:
        return f"{known.name} cannot feed this wiring ({err.why or err.what}): {retrain}"
    return (
        f"write eagle_config.eagle_aux_hidden_state_layer_ids = {ids}, which {known.name} reads as "
        f"{', '.join(expected.wiring.names)}; or {retrain}"
    )


def _trust_measurement(matches: Sequence[SlotMatch]) -> str:
    return f"retrain with wiring.aux=[{','.join(match.site for match in matches)}], which is what arrives"


def _ids_words(ids: Sequence[int] | None) -> str:
    return "no ids (its default)" if ids is None else f"ids {list(ids)}"


def _facts(facts: ServerFacts, matches: Sequence[SlotMatch], tokens: int) -> dict[str, Any]:
    known = facts.convention()
    return {
        "url": facts.url,
        "version": facts.version,
        "convention": known.name if known else None,
        "tp_size": facts.ranks,
        "mode": "capture without a draft" if facts.captures else "with its draft",
        "capture_ids": facts.capture_ids if facts.captures else None,
        "measured": [match.site for match in matches],
        "tokens": tokens,
    }


def _error(a: Tensor, b: Tensor) -> float:
    """Median over rows of the relative error."""
    return ((a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-30)).median().item()
