"""Read what a model's `set_eagle3_layers_to_capture` makes of ids, by walking it on samples."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.id_rules import FirstIdDecides, IdRule, Offset, native_places
from eagle3.sglang_tree.classes import SETTER, Method
from eagle3.sglang_tree.walker import SINGLE_RANK, Refused, Unreadable, Walker

LAYERS = 61
_SAMPLES = ([2, 30, 58], [1, 29, 57], [3, 31, 59], [29, 1, 57], [20, 40, 1], [0, 3, 31], [5], [1])
_WITH_EMBEDDING = ([-1, 2, 30], [-1, 1, 29], [2, -1, 30], [-1, 0, 5], [-1])
_POINTS = "self.model.layers_to_capture"

ALWAYS_PLUS_ONE = "always adds one"
FIRST_ID_DECIDES = "adds one only when the first id is 1"


@dataclass(frozen=True)
class Outcome:
    """What one call leaves behind: capture points in order, and flags of the inner model; None = it raises."""

    points: list[int] | None
    flags: dict[str, Any]


@dataclass(frozen=True)
class SetterReading:
    """The meaning of a setter.

    Args:
        rule: `ALWAYS_PLUS_ONE`, `FIRST_ID_DECIDES`, or "" when neither.
        default: the places captured without ids.
        flags: attributes of the inner model that are true exactly when -1 is among the ids.
        drops_minus_one: -1 does not reach the capture points, and the other ids are shifted by one.
        minus_one: in words, what -1 does.
        problem: why it cannot be read; "" when it can.
    """

    rule: str
    default: list[int] | None
    flags: tuple[str, ...]
    drops_minus_one: bool
    minus_one: str
    problem: str = ""


def read_setter(setter: Method | None) -> SetterReading:
    """Read a setter; an absent or unreadable one is a reading with a `problem`, not an error."""
    if setter is None:
        return _cannot(f"no {SETTER}")
    parameters = [one.arg for one in setter.node.args.args]
    if len(parameters) != 2:
        return _cannot(f"{SETTER} takes {parameters}")
    try:
        plain = [call_setter(setter.node, ids) for ids in _SAMPLES]
        asked = [call_setter(setter.node, ids) for ids in _WITH_EMBEDDING]
        default = call_setter(setter.node, None)
    except Unreadable as err:
        return _cannot(f"{SETTER} has {err}, which is not followed here")
    flags = _flags(plain, asked, default)
    drops = all(
        _same(one.points, [v + 1 for v in ids if v >= 0]) for ids, one in zip(_WITH_EMBEDDING, asked, strict=True)
    )
    rule = _rule(plain)
    return SetterReading(rule, default.points, flags, drops, _minus_one(asked, flags, drops))


def call_setter(function: ast.FunctionDef, ids: Sequence[int] | None) -> Outcome:
    """Walk the setter on `ids`, on a single rank of a model of 61 layers.

    Raises:
        Unreadable: a construct that the walker does not follow.
    """
    facts: dict[str, Any] = {
        _POINTS: [],
        **SINGLE_RANK,
        "self.config.num_hidden_layers": LAYERS,
        "self.capture_aux_hidden_states": False,
    }
    walker = Walker(facts, {f"self.model.{SETTER}": _POINTS})
    try:
        walker.run(function, {function.args.args[1].arg: None if ids is None else list(ids)})
    except Refused:
        return Outcome(None, {})
    points = walker.values[_POINTS]
    prefix = "self.model."
    flags = {k.removeprefix(prefix): v for k, v in walker.values.items() if k.startswith(prefix) and k != _POINTS}
    whole = isinstance(points, list) and all(type(one) is int for one in points)
    return Outcome(list(points) if whole else None, flags)


def _cannot(problem: str) -> SetterReading:
    return SetterReading("", None, (), False, "", problem)


def _same(found: list[int] | None, wanted: list[int]) -> bool:
    """Equal as sets of capture points without repeats: the layers are walked in order whatever the list's."""
    return found is not None and sorted(found) == sorted(wanted)


def _rule(plain: list[Outcome]) -> str:
    rules: tuple[tuple[str, IdRule], ...] = ((ALWAYS_PLUS_ONE, Offset(1)), (FIRST_ID_DECIDES, FirstIdDecides()))
    for words, rule in rules:
        if all(_same(one.points, rule.places(ids, LAYERS)) for ids, one in zip(_SAMPLES, plain, strict=True)):
            return words
    return ""


def _flags(plain: list[Outcome], asked: list[Outcome], default: Outcome) -> tuple[str, ...]:
    names = {name for one in asked for name in one.flags}
    return tuple(
        name
        for name in sorted(names)
        if all(one.flags.get(name) is True for one in asked)
        and not any(one.flags.get(name, False) for one in [*plain, default])
    )


def _minus_one(asked: list[Outcome], flags: tuple[str, ...], drops: bool) -> str:
    first = asked[0].points
    if first is None:
        return "the setter refuses -1"
    if flags and drops:
        return "-1 sets a flag and the other ids are shifted by one"
    if flags:
        return f"-1 sets a flag, but ids [-1, 2, 30] become capture points {first}"
    if drops:
        return "-1 is dropped without setting a flag"
    return f"-1 is read as any other id: [-1, 2, 30] become capture points {first}"


def is_native_default(reading: SetterReading) -> bool:
    """True when no ids mean `[2, L//2, L-3]`, as in every build that was read."""
    return reading.default is not None and sorted(reading.default) == native_places(LAYERS)
