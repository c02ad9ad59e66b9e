"""Say in words how the wiring that is served differs from the one the draft was trained on, and why it might."""

from __future__ import annotations

from eagle3.convention_table import CONVENTIONS
from eagle3.errors import WiringError
from eagle3.wiring import Wiring

MAX_SUSPECTS = 3  # more sentences of this kind would bury the finding


def explain(draft: Wiring, served: Wiring) -> list[str]:
    """Sentences that say how `served` differs from `draft` (trained); empty when both feed the same tensors.

    The order is: another target, the number of slots, slot by slot, a diagnosis when a known mistake fits, and the
    mix-ups of id conventions that give exactly the served wiring. The teacher is no part of it: nobody serves it.
    """
    lines = _target_lines(draft, served) + _slot_lines(draft, served)
    if draft.aux != served.aux:
        lines += _diagnosis(draft, served) + _suspects(draft, served)
    return lines


def _target_lines(draft: Wiring, served: Wiring) -> list[str]:
    out = []
    for name, words in (("model_type", "model type"), ("num_layers", "number of layers"), ("hidden_size", "width")):
        trained, found = getattr(draft, name), getattr(served, name)
        if trained != found:
            out.append(f"the draft was trained for a target of {words} {trained}; the served target has {found}")
    return out


def _slot_lines(draft: Wiring, served: Wiring) -> list[str]:
    out = []
    if len(draft.aux) != len(served.aux):
        out.append(f"the draft was trained on {len(draft.aux)} slots; the server feeds {len(served.aux)}")
    for slot, (trained, found) in enumerate(zip(draft.aux, served.aux, strict=False)):
        if trained != found:
            out.append(f"slot {slot} was trained on {trained.words}; the server feeds {found.words}")
    return out


def _diagnosis(draft: Wiring, served: Wiring) -> list[str]:
    """At most one sentence: the first known mistake that fits."""
    trained, found = draft.aux, served.aux
    if len(trained) > 1 and trained[1:] == found[: len(trained) - 1]:
        return [
            "shifted by one slot: each slot gets the tensor that the next one was trained on, so "
            f"{trained[0].words} is never fed and {found[-1].words} is new to the draft"
        ]
    if len(trained) > 1 and found[1:] == trained[: len(found) - 1]:
        return [
            "shifted by one slot: each slot gets the tensor that the one before was trained on, so "
            f"{found[0].words} is new to the draft and {trained[-1].words} is never fed"
        ]
    if set(trained) == set(found):
        return ["the same tensors in another order: the engine joins them in layer order, the training did not"]
    steps = {have.layer - want.layer for want, have in zip(trained, found, strict=False)}
    if len(trained) == len(found) and steps in ({1}, {-1}):
        side = "later" if steps == {1} else "earlier"
        return [f"off by one layer: every slot is fed from one layer {side} than it was trained on"]
    return []


def _suspects(draft: Wiring, served: Wiring) -> list[str]:
    """Mix-ups of conventions that turn `draft` into exactly `served`."""
    if _target_lines(draft, served):
        return []
    out = []
    defaults = [name for name in CONVENTIONS if _reads_as(name, None, draft) == served.aux]
    if defaults:
        out.append(f"this is what {', '.join(defaults)} feed when no layer ids are found in the draft's config")
    writers: dict[tuple[int, ...], list[str]] = {}
    for writer in CONVENTIONS.values():
        try:
            writers.setdefault(tuple(writer.render(draft)), []).append(writer.name)
        except WiringError:
            continue
    for ids, names in writers.items():
        readers = [name for name in CONVENTIONS if _reads_as(name, list(ids), draft) == served.aux]
        if readers:
            out.append(f"this is what ids {list(ids)}, right for {', '.join(names)}, mean to {', '.join(readers)}")
    return out[:MAX_SUSPECTS]


def _reads_as(name: str, ids: list[int] | None, like: Wiring) -> tuple[object, ...] | None:
    try:
        return CONVENTIONS[name].parse_like(ids, like).aux
    except WiringError:
        return None
