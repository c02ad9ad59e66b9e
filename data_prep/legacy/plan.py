"""Decide what a diagnosed set can become: which slot goes where, what is missing, or why it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data_prep.legacy.diagnose import Diagnosis
from data_prep.legacy.explain import held_layers, servers
from eagle3.conventions import Shape
from eagle3.errors import WiringError
from eagle3.wiring import TEACHERS, Site, Wiring


@dataclass(frozen=True)
class Plan:
    """How samples of a set become samples of a store.

    Args:
        wiring: the store's.
        slots: stored site name -> index of the slot that holds it.
        teacher_slot: the slot that holds the teacher; None: the target has to compute it.
        embedding_slot: a slot that holds the embedding, which is not stored but can be checked.
    """

    wiring: Wiring
    slots: dict[str, int]
    teacher_slot: int | None
    embedding_slot: int | None

    @property
    def needs_target(self) -> bool:
        """The teacher's state has to be computed."""
        return self.teacher_slot is None


def plan_conversion(found: Diagnosis, shape: Shape, aux: Sequence[str] = (), teacher: str = "") -> Plan:
    """Plan the conversion of a set for a wiring.

    Args:
        found: what the set is.
        shape: the target's.
        aux: wanted sites in slot order; empty = the layers that the set holds, all slots being named.
        teacher: `final` or `final_normed`; empty = the one that the set holds, else `final`.

    Raises:
        WiringError: a wanted aux site is not in the set, and the line says which and what can be done instead; or no
            sites are given and a slot has no name.
    """
    held = found.held
    unnamed = [slot.label for slot in found.slots if slot.site is None]
    if unnamed and not aux:
        raise WiringError(
            "slots of the set are not known",
            why=f"{', '.join(unnamed)}; named are {', '.join(held) or 'none'}",
            mend="name the right target, or say with --aux which of the named sites are wanted",
            page="legacy",
        )
    names = list(aux) or held_layers(found)
    if not names:
        raise WiringError(
            "the set holds no layer of the target",
            why=f"named slots: {', '.join(held) or 'none'}",
            mend="extract anew: run the stages prepare and extract on the conversations",
        )
    teacher = teacher or next((one for one in TEACHERS if one in held), "final")
    wiring = Wiring(tuple(Site.parse(name) for name in names), teacher, *_numbers(shape))
    missing = [site.name for site in wiring.stored_sites if site.name not in held]
    if missing:
        raise _lacking(found, shape, missing)
    slots = {site.name: held[site.name] for site in wiring.stored_sites}
    return Plan(wiring, slots, held.get(teacher), held.get("embedding"))


def _lacking(found: Diagnosis, shape: Shape, missing: list[str]) -> WiringError:
    layers = held_layers(found)
    mend = "extract anew with this wiring (stages prepare and extract)"
    if layers:
        fallback = Wiring(tuple(Site.parse(name) for name in layers), "final", *_numbers(shape))
        mend += (
            f", or convert to the wiring that the set does hold (--aux {','.join(layers)}) and train and serve that: "
            f"{servers(fallback)}"
        )
    return WiringError(
        "the set lacks a site that the wiring needs",
        why=f"no {', '.join(missing)}; it holds {', '.join(found.held) or 'nothing known'}",
        mend=mend,
    )


def _numbers(shape: Shape) -> tuple[str, int, int]:
    return shape.model_type, shape.num_layers, shape.hidden_size
