"""Say in words what a diagnosed set is, what a draft trained on it would have learnt, and who could serve that."""

from __future__ import annotations

from data_prep.legacy.diagnose import Diagnosis
from eagle3.conventions import CONVENTIONS, Shape
from eagle3.errors import WiringError
from eagle3.wiring import TEACHERS, Site, Wiring


def explain_diagnosis(found: Diagnosis, shape: Shape) -> list[str]:
    """Sentences for a diagnosis, each a line: the slots, the tool's reading of them, what is wrong, what is there."""
    lines = [
        f"{found.format.name}: {found.files} files, {len(found.samples)} judged "
        + ("against the target run on their tokens" if found.ran_target else "by the target's tables alone")
    ]
    for slot, count in zip(found.slots, found.sure_in, strict=True):
        site = slot.site or ("unknown" if not slot.nearest else f"unknown, nearest {slot.nearest}")
        judged = "" if count in (0, len(found.samples)) else f"; sure in {count} of {len(found.samples)} samples"
        lines.append(f"  {slot.label}: {site} ({slot.evidence}{judged})")
    lines += [f"  left out: {line}" for line in found.dissent]
    if not found.whole:
        return lines + _unnamed(found)
    return lines + _reading(found) + _teacher(found) + _input(found, shape) + _holding(found)


def _unnamed(found: Diagnosis) -> list[str]:
    known = ", ".join(found.held) or "none"
    if found.ran_target:
        return [
            f"Named: {known}. The other slots fit no site of this target: it is another target, another version of its "
            "weights, or other tokens than those that the states were computed on."
        ]
    return [
        f"Named: {known}. The others are not the embedding; which layers they are, only a run of the target can tell "
        "(drop --tables-only or give --target)."
    ]


def _reading(found: Diagnosis) -> list[str]:
    inputs = ", ".join(str(site) for site in found.inputs)
    taught = f" and taught by {found.teacher}" if found.teacher else ""
    return [
        f"The tool {found.format.reading}: a draft trained on this set was fed {inputs}{taught}.",
    ]


def _teacher(found: Diagnosis) -> list[str]:
    """What is wrong with the teacher, in at most one sentence."""
    teacher, norms = found.teacher, found.format.norms_teacher
    if teacher is None:
        return ["The files hold no teacher."]
    if teacher not in TEACHERS:
        return [
            f"{teacher} is not what the target's head reads. A list of captured layers that lacks the last one does "
            "this: the reader takes whatever stands last for the final state, so the draft learns to propose from a "
            "state that was never finished, and one layer of the input is lost to it."
        ]
    if teacher == "final_normed" and norms:
        return ["That tool norms the teacher in training; this one is normed already, so it was normed twice."]
    if teacher == "final" and not norms:
        return ["That tool does not norm the teacher in training; this one needs it, so its targets were wrong."]
    return []


def _input(found: Diagnosis, shape: Shape) -> list[str]:
    """Who can serve a draft trained so."""
    sites = [site for site in found.inputs if site is not None]
    if any(site in TEACHERS for site in sites):
        return ["The target's final state is among the inputs, where no wiring here has it."]
    try:
        wiring = Wiring(tuple(Site.parse(site) for site in sites), "final", *_numbers(shape))
    except WiringError as err:
        return [f"No draft can be fed so: {err}"]
    lines = [f"To feed such a draft: {servers(wiring)}."]
    if "embedding" in sites:
        layers = [site for site in sites if site != "embedding"]
        if found.teacher and found.teacher not in TEACHERS:
            layers.append(found.teacher)
        lines.append(
            f"One of its slots is the embedding. A server that is asked for layers alone ({', '.join(layers)}) feeds "
            "the slots with tensors that their neighbours were trained on, and acceptance falls without an error."
        )
    return lines


def _holding(found: Diagnosis) -> list[str]:
    layers = held_layers(found)
    teachers = [site for site in TEACHERS if site in found.held]
    held = ", ".join(layers) or "no layer"
    if teachers:
        return [f"The set holds {held} and {' and '.join(teachers)}: it can be converted as it is."]
    return [f"The set holds {held}. Only the true final state is missing; convert computes it with the target."]


def held_layers(found: Diagnosis) -> list[str]:
    """Names of the decoder layers whose inputs the set holds, in layer order."""
    layers = [Site.parse(site) for site in found.held if site.startswith("layer_")]
    return [site.name for site in sorted(layers)]


def servers(wiring: Wiring) -> str:
    """Which engines can feed this wiring, with the ids to write: `ids [2, 30] on a, b; no ids on c`."""
    by_ids: dict[str, list[str]] = {}
    for name, one in CONVENTIONS.items():
        if not name.startswith(("sglang", "vllm")):
            continue  # the others train or extract
        try:
            by_ids.setdefault(f"ids {one.render(wiring)}", []).append(name)
        except WiringError:
            continue
    if not by_ids:
        return "no engine known here can"
    return "; ".join(f"{ids} on {', '.join(names)}" for ids, names in by_ids.items())


def _numbers(shape: Shape) -> tuple[str, int, int]:
    return shape.model_type, shape.num_layers, shape.hidden_size
