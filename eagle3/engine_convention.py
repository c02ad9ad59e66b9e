"""One program's reading of layer ids, as a pair of inverse functions between ids and wirings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from eagle3.errors import WiringError
from eagle3.id_rules import IdRule
from eagle3.wiring import Site, Wiring


class TargetShape(Protocol):
    """What ids are read against: a `Wiring` and a target's identity both have it."""

    @property
    def model_type(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...


@dataclass(frozen=True)
class Shape:
    """A bare `TargetShape`: text model type, decoder layers, width."""

    model_type: str
    num_layers: int
    hidden_size: int


@dataclass(frozen=True)
class EngineConvention:
    """One program's reading of layer ids.

    Args:
        name: key in `CONVENTIONS`.
        read_from: source files and versions that the rule was read from.
        rule: the rule for every family not named in `family_rules`.
        family_rules: other rules, by the target's `model_type`.
        families: the model types that were read; empty = the rule does not depend on the model.
        no_embedding: model types for which asking for layer 0 stops the program or yields no state;
            `("*",)` = all of them.
        layer_order: True when states are joined in layer order whatever the order of the ids.
        slots: the one number of ids that the program accepts; None = any.
        notes: sentences by model type (or "*") that a user of this build should know.
    """

    name: str
    read_from: str
    rule: IdRule
    family_rules: Mapping[str, IdRule] = field(default_factory=dict)
    families: tuple[str, ...] = ()
    no_embedding: tuple[str, ...] = ()
    layer_order: bool = True
    slots: int | None = None
    notes: Mapping[str, str] = field(default_factory=dict)

    def render(self, wiring: Wiring) -> list[int]:
        """Ids that make this engine feed exactly `wiring.aux`, in slot order.

        The result is always read back through `parse` before it is returned.

        Raises:
            WiringError: the engine cannot feed these sites in this order, or its rule for this model is unknown.
        """
        rule = self._rule(wiring.model_type)
        places = [site.layer for site in wiring.aux]
        if self.layer_order and places != sorted(places):
            raise WiringError(
                "slots out of layer order",
                where=self.name,
                why=f"{', '.join(wiring.names)}; this engine joins states in layer order whatever the order of the ids",
                mend="order the sites by layer (embedding first) and train the draft that way",
                page="wiring",
            )
        ids = self._with_name(lambda: rule.ids(places))
        wiring.check_same(
            self.parse_like(ids, wiring, wiring.teacher),
            where=f"{self.name}, ids {ids}",
            mend="choose sites that this engine can feed",
        )
        return ids

    def render_default_ok(self, wiring: Wiring) -> bool:
        """True when a draft config without any ids makes this engine feed `wiring.aux` too."""
        try:
            return self.parse_like(None, wiring).aux == wiring.aux
        except WiringError:
            return False

    def parse(
        self, ids: Sequence[int] | None, *, model_type: str, num_layers: int, hidden_size: int, teacher: str = "final"
    ) -> Wiring:
        """The wiring that this engine feeds when the draft's config holds `ids`; None = no ids, its default.

        Raises:
            WiringError: ids that this engine refuses, crashes on, ignores, or that name one site twice.
        """
        shape = Shape(model_type, num_layers, hidden_size)
        rule = self._rule(model_type)
        if ids is None:
            given = "no ids, so the default"
            places = self._with_name(lambda: rule.default_places(num_layers))
        else:
            plain = self._plain_ids(ids)
            given = f"ids {plain}"
            places = self._with_name(lambda: rule.places(plain, num_layers))
        places = self._checked(places, shape, given)
        return Wiring(tuple(Site(place) for place in places), teacher, model_type, num_layers, hidden_size)

    def note(self, model_type: str) -> str:
        """What a user of this build with this model should know besides the ids; empty when nothing."""
        return self.notes.get(model_type, self.notes.get("*", ""))

    def feeds_embedding(self, model_type: str) -> bool:
        """True when this engine can feed the embedding of a target of this type."""
        return "*" not in self.no_embedding and model_type not in self.no_embedding

    def parse_like(self, ids: Sequence[int] | None, shape: TargetShape, teacher: str = "final") -> Wiring:
        """`parse` with the target's numbers taken from `shape` (a `Wiring`, a target's identity, a `Shape`).

        Raises:
            WiringError: as `parse`.
        """
        return self.parse(
            ids,
            model_type=shape.model_type,
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            teacher=teacher,
        )

    def _rule(self, model_type: str) -> IdRule:
        if self.families and model_type not in self.families:
            raise WiringError(
                "unknown id convention for this model",
                where=self.name,
                why=f"its rule was not read for model_type {model_type!r}; known: {', '.join(sorted(self.families))}",
                mend="read the model's set_eagle3_layers_to_capture and add it to eagle3/convention_table.py",
                page="wiring",
            )
        return self.family_rules.get(model_type, self.rule)

    def _plain_ids(self, ids: Sequence[int]) -> list[int]:
        if not isinstance(ids, list | tuple) or not all(type(value) is int for value in ids):
            raise WiringError(
                "layer ids must be whole numbers", where=self.name, why=f"found {ids!r}", mend="fix the list"
            )
        if not ids:
            raise WiringError(
                "empty list of layer ids", where=self.name, mend="name ids, or drop the key for the default"
            )
        if self.slots is not None and len(ids) != self.slots:
            raise WiringError(
                f"{self.name} takes exactly {self.slots} ids", why=f"found {list(ids)}", mend="name that many sites"
            )
        return list(ids)

    def _checked(self, places: list[int], shape: TargetShape, given: str) -> list[int]:
        """Refuse places that this engine cannot feed; else return them in the order it joins them."""
        where = f"{self.name}, {shape.model_type} with {shape.num_layers} layers, {given}"
        below = [place for place in places if place < 0]
        above = [place for place in places if place >= shape.num_layers]
        if below:
            raise WiringError(
                "ids below the first layer", where=where, why="nothing is captured for them", mend="use larger ids"
            )
        if above:
            raise WiringError(
                "ids past the last layer's input",
                where=where,
                why=f"they name place {above[0]}, and a draft takes only inputs of layers 0 to {shape.num_layers - 1}",
                mend="use smaller ids",
            )
        if len(set(places)) != len(places):
            raise WiringError(
                "one site named twice",
                where=where,
                why=f"layers {places}: fewer states would be captured than the draft's fc takes",
                mend="name distinct sites",
            )
        if 0 in places and not self.feeds_embedding(shape.model_type):
            raise WiringError(
                "this engine cannot feed the embedding of this model",
                where=where,
                why="it has no residual before layer 0, or captures nothing there",
                mend="train a draft on layers only (the native wiring), or serve it with a build that can",
                page="sglang_patch",
            )
        return sorted(places) if self.layer_order else places

    def _with_name(self, work: Callable[[], list[int]]) -> list[int]:
        try:
            return work()
        except WiringError as err:
            raise WiringError(err.what, where=err.where or self.name, why=err.why, mend=err.mend) from None
