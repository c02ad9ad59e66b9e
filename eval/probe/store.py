"""What each named tensor of a hidden-state store truly is, by computing a few records again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle3.site_match import SlotMatch, match_slots
from eagle3.wiring import Site
from eval.probe.slots import doubts, joined, slot_rows
from eval.probe.stored import StoredRecord, StoreReader
from eval.probe.verdict import Verdict, cannot_tell

_EXTRACT = "extract again; if the states were imported from another tool, import them again under the names measured"


def judge_store(
    reader: StoreReader, records: Sequence[StoredRecord], references: Sequence[Mapping[str, Tensor]]
) -> Verdict:
    """Compare a store's tensors with the target's own states on the same tokens.

    Args:
        reader: the store.
        records: some of its records.
        references: the target's states on each, every site, [T, H].
    """
    width = reader.wiring.hidden_size
    reference = joined(references)
    names = list(records[0].states)
    stored = {name: torch.cat([record.states[name] for record in records]).float() for name in names}
    expected = [reader.wiring.teacher if name == "final" else name for name in names]
    matches = [match_slots(stored[name], reference, width)[0] for name in names]
    facts = {"store": str(reader.path), "records": [one.record_id for one in records]}
    rows = slot_rows(matches, expected, names)
    common: dict[str, Any] = {
        "rows": rows,
        "facts": facts | {"holds": {n: m.site for n, m in zip(names, matches, strict=True)}},
    }
    wrong = [_words(n, m, e) for n, m, e in zip(names, matches, expected, strict=True) if m.site != e and m.sure]
    unclear = [
        _doubt(name, match, stored[name], records, references)
        for name, match in zip(names, matches, strict=True)
        if not match.sure
    ]
    if wrong or any(shifted for _, shifted in unclear):
        lines = wrong + [line for line, _ in unclear]
        return Verdict(False, "the store's tensors are not what their names say", lines, _EXTRACT, **common)
    if unclear:
        return cannot_tell(
            "some tensors match no site of this target up to rounding",
            [line for line, _ in unclear],
            "give the very target that the store was made with (same weights and quantization), or more --records",
            **common,
        )
    held = ", ".join(f"{name} is {match.site}" for name, match in zip(names, matches, strict=True))
    tokens = sum(len(record.input_ids) for record in records)
    return Verdict(
        True, f"every tensor is what it is called: {held}", [f"{len(records)} records, {tokens} tokens"], "", **common
    )


def target_note(reader: StoreReader, identity: Mapping[str, Any]) -> list[str]:
    """A sentence when the store was made with other weights than the given target's."""
    differing = [key for key, value in reader.manifest.get("target", {}).items() if identity.get(key, value) != value]
    if not differing:
        return []
    return [f"the store was made with another target: {', '.join(sorted(differing))} differ"]


def _words(name: str, match: SlotMatch, expected: str) -> str:
    if name != "final":
        return f"{name} holds {match.site}{_steps(expected, match.site)}"
    line = f"the teacher holds {match.site}, and the manifest says {expected}"
    if match.site == "final_normed":
        return line + ": training would apply the final norm twice"
    if match.site == "final":
        return line + ": training would leave the final norm out"
    return (
        line + ": a layer's input taken for the last layer's output, so the draft would be taught by half-done states"
    )


def _steps(expected: str, found: str) -> str:
    if not found.startswith(("layer_", "embedding")):
        return ""
    step = Site.parse(found).layer - Site.parse(expected).layer
    side = "later" if step > 0 else "earlier"
    return f", {abs(step)} layer{'s' if abs(step) > 1 else ''} {side}"


def _doubt(
    name: str,
    match: SlotMatch,
    stored: Tensor,
    records: Sequence[StoredRecord],
    references: Sequence[Mapping[str, Tensor]],
) -> tuple[str, bool]:
    """A sentence on a tensor that is no site, and whether its cause is found."""
    width = stored.shape[1]
    for step, words in ((1, "the state after one token more"), (-1, "the state after one token fewer")):
        moved = _shifted_match(name, records, references, width, step)
        if moved is not None and moved.sure:
            return f"{name} holds {moved.site}, each row {words}: the rows are shifted by one token", True
    doubt = doubts([match], stored, joined(references), width)[0]
    return doubt.line.replace("slot 0", name, 1), doubt.explained


def _shifted_match(
    name: str,
    records: Sequence[StoredRecord],
    references: Sequence[Mapping[str, Tensor]],
    width: int,
    step: int,
) -> SlotMatch | None:
    """The match when stored row t is compared with the target's row t + step."""
    rows: list[Tensor] = []
    shifted: list[dict[str, Tensor]] = []
    for record, reference in zip(records, references, strict=True):
        state = record.states[name].float()
        if len(state) < 2:
            continue
        rows.append(state[:-1] if step > 0 else state[1:])
        shifted.append({k: v[1:] if step > 0 else v[:-1] for k, v in reference.items()})
    return match_slots(torch.cat(rows), joined(shifted), width)[0] if rows else None
