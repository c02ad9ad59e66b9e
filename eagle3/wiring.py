"""A wiring is a value: which tensors of which target feed the draft, in which order, and which one teaches it.

A *site* is a place on the target's residual stream:

- `embedding`: what enters decoder layer 0 (the token embeddings);
- `layer_k`: what enters decoder layer `k` (0-based) = Hugging Face `hidden_states[k]` for `k < num_layers`;
- `final`: what leaves the last layer, *before* the final norm. `final_normed` is after it, and is what
  Hugging Face puts last in `hidden_states`.

`layer_0` and `embedding` are the same tensor and have one name, `embedding`.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from eagle3.errors import WiringError

TEACHERS = ("final", "final_normed")


@dataclass(frozen=True, order=True)
class Site:
    """A place on the residual stream: the input of decoder layer `layer`; layer 0's input is the embedding."""

    layer: int

    def __post_init__(self) -> None:
        if self.layer < 0:
            raise WiringError("no such site", why=f"layer {self.layer}", mend="use layer numbers from 0 up")

    @property
    def name(self) -> str:
        """Name used in configs, stores and checkpoints: `embedding` or `layer_<k>`."""
        return "embedding" if self.layer == 0 else f"layer_{self.layer}"

    @property
    def words(self) -> str:
        """Name used in sentences: `the embedding` or `layer <k>`."""
        return "the embedding" if self.layer == 0 else f"layer {self.layer}"

    @classmethod
    def parse(cls, text: str) -> Site:
        """Read `embedding`, `layer_3` or `layer 3`.

        Raises:
            WiringError: anything else, bare integers included: an integer means different tensors to
                different engines, so a site is always written with its word.
        """
        if str(text).strip() == "embedding":
            return EMBEDDING
        match = re.fullmatch(r"layer[ _]([0-9]{1,9})", str(text).strip())
        if not match:
            raise WiringError(
                "not a site",
                why=f"found {text!r}",
                mend="write 'embedding' or 'layer_<k>' (the input of decoder layer k); a bare id means "
                "different tensors to different engines",
                page="wiring",
            )
        return cls(int(match.group(1)))


EMBEDDING = Site(0)


@dataclass(frozen=True)
class Wiring:
    """The ordered aux sites, the teacher and the target's shape; compared by every stage.

    Args:
        aux: ordered sites whose states are concatenated, slot 0 first, into the draft's `fc` input.
        teacher: `final` (un-normed; the target's norm and head are applied in training) or `final_normed`.
        model_type: the target text model's `model_type` ("llama", "deepseek_v3", ...).
        num_layers: decoder layers of the target.
        hidden_size: width H of each site.

    Raises:
        WiringError: no sites, duplicate sites, a site past the last layer, or an unknown teacher.
    """

    aux: tuple[Site, ...]
    teacher: str
    model_type: str
    num_layers: int
    hidden_size: int

    def __post_init__(self) -> None:
        if not self.aux:
            raise WiringError(
                "the wiring names no aux site", mend="list sites, e.g. wiring.aux=[layer_2,layer_15,layer_27]"
            )
        if len(set(self.aux)) != len(self.aux):
            raise WiringError(
                "the wiring names a site twice",
                why=", ".join(s.name for s in self.aux),
                mend="name distinct sites (the default [2, L//2, L-3] collides on targets of 6 layers)",
            )
        for site in self.aux:
            if site.layer >= self.num_layers:
                raise WiringError(
                    "the wiring names a layer that the target has not",
                    where=f"wiring.aux: {site.name}",
                    why=f"the target has layers 0 to {self.num_layers - 1}",
                    mend="choose sites within the target",
                )
        if self.teacher not in TEACHERS:
            raise WiringError(
                "unknown teacher site",
                where="wiring.teacher",
                why=f"found {self.teacher!r}",
                mend="use final or final_normed",
            )

    @property
    def feature_width(self) -> int:
        """Width of the draft's `fc` input: `len(aux) * hidden_size`."""
        return len(self.aux) * self.hidden_size

    @property
    def stored_sites(self) -> tuple[Site, ...]:
        """The aux sites a store holds; the embedding is looked up from the token ids instead."""
        return tuple(site for site in self.aux if site != EMBEDDING)

    @property
    def names(self) -> list[str]:
        """Site names in slot order."""
        return [site.name for site in self.aux]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able form; `from_dict` reads it back."""
        return {**asdict(self), "aux": self.names}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Wiring:
        """Read the form that `to_dict` writes.

        Raises:
            WiringError: a key is missing or unknown.
        """
        try:
            if not all(type(data[name]) is int for name in ("num_layers", "hidden_size")):
                raise TypeError(f"num_layers {data['num_layers']!r}, hidden_size {data['hidden_size']!r}")
            if not all(isinstance(data[name], str) for name in ("teacher", "model_type")):
                raise TypeError(f"teacher {data['teacher']!r}, model_type {data['model_type']!r}")
            return cls(**{**data, "aux": tuple(Site.parse(name) for name in data["aux"])})
        except (KeyError, TypeError) as err:
            why = f"it lacks {err}" if isinstance(err, KeyError) else str(err)
            raise WiringError("not a wiring", why=why, mend="write it with this tool, not by hand") from None

    @classmethod
    def native(cls, model_type: str, num_layers: int, hidden_size: int, teacher: str = "final") -> Wiring:
        """What an engine captures when the draft's config names no ids: layers `[2, L//2, L-3]`, in layer order.

        Raises:
            WiringError: the target has too few layers for three distinct ones (6 or fewer, save 3).
        """
        aux = tuple(Site(k) for k in sorted((2, num_layers // 2, num_layers - 3)))
        return cls(aux, teacher, model_type, num_layers, hidden_size)

    def differences(self, found: Wiring) -> list[str]:
        """Say in words how `found` differs from this (expected) wiring; empty when equal."""
        out = []
        if len(self.aux) != len(found.aux):
            out.append(f"{len(found.aux)} slots where {len(self.aux)} are expected")
        for slot, (want, have) in enumerate(zip(self.aux, found.aux, strict=False)):
            if want != have:
                out.append(f"slot {slot} holds {have.words}; expected {want.words}")
        for field in ("teacher", "model_type", "num_layers", "hidden_size"):
            want_value, have_value = getattr(self, field), getattr(found, field)
            if want_value != have_value:
                out.append(f"{field} is {have_value!r}; expected {want_value!r}")
        return out

    def check_same(self, found: Wiring, *, where: str, mend: str) -> None:
        """Refuse `found` unless it equals this wiring.

        Raises:
            WiringError: naming every slot that differs, `where` it was found, and `mend`.
        """
        differences = self.differences(found)
        if differences:
            raise WiringError("another wiring", where=where, why="; ".join(differences), mend=mend, page="wiring")
