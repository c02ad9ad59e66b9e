"""Read the parts of the embedding patch in a tree, each by itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from eagle3.sglang_tree.classes import SETTER, ClassFinder, ModelClass, ModelClasses, find_classes, self_attribute
from eagle3.sglang_tree.forward import ForwardReading, read_forward
from eagle3.sglang_tree.graphs import GraphReading, read_graphs
from eagle3.sglang_tree.setter import SetterReading, read_setter
from eagle3.sglang_tree.tree import SglangTree
from eagle3.sglang_tree.walker import dotted

FLAG = "capture_embedding_for_eagle3"
WRAPPED = (SETTER, "get_embed_and_head", "set_embed_and_head")


@dataclass(frozen=True)
class Part:
    """One part: its name, whether it is there and right, and what was found."""

    name: str
    good: bool
    why: str


@dataclass(frozen=True)
class ModelReading:
    """Everything read about one model of a tree.

    Args:
        parts: default, setter and forward: the embedding itself; and, where they apply, wrapper and graphs.
        flag: the attribute of the inner model that asks for the embedding; "" when there is none.
    """

    classes: ModelClasses
    setter: SetterReading
    forward: ForwardReading
    graphs: GraphReading
    parts: tuple[Part, ...]
    flag: str

    @property
    def problem(self) -> str:
        """Why the code cannot be read; "" when it can."""
        return self.setter.problem or self.forward.problem

    @property
    def embedding_parts(self) -> list[Part]:
        return [one for one in self.parts if one.name in ("default", "setter", "forward")]

    @property
    def missing(self) -> list[Part]:
        return [one for one in self.parts if not one.good]


def read_model(tree: SglangTree, model_type: str, architecture: str = "") -> ModelReading:
    """Read the classes that serve a target.

    Raises:
        RedraftError: no such model in this tree, or its classes are not found.
    """
    finder = ClassFinder(tree)
    classes = find_classes(finder, model_type, architecture)
    setter = read_setter(finder.method(classes.language, SETTER))
    forward = read_forward(finder.method(classes.inner, "forward"))
    graphs = read_graphs(tree)
    flag = _flag(finder, classes.inner, setter, forward)
    parts = [_default(finder, classes.inner, flag), _setter(setter, flag), _forward(forward, flag)]
    if classes.wrapped:
        parts.append(_wrapper(finder, classes))
    if graphs.read:
        parts.append(Part("graphs", not graphs.wrong, graphs.words))
    return ModelReading(classes, setter, forward, graphs, tuple(parts), flag)


def defaults_of(finder: ClassFinder, inner: ModelClass) -> dict[str, bool]:
    """True/false attributes that an instance starts with: of class bodies, and of each `__init__` that runs."""
    out: dict[str, bool] = {}
    for node in _starting_statements(finder, inner):
        value = getattr(node, "value", None)
        if (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and isinstance(value, ast.Constant)
            and type(value.value) is bool
        ):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                name = self_attribute(target) or dotted(target)
                out.setdefault(name, value.value)
    return out


def _starting_statements(finder: ClassFinder, inner: ModelClass) -> Iterator[ast.AST]:
    runs = True
    for one in finder.lineage(inner):
        init = one.method("__init__")
        if init is not None and runs:
            yield from ast.walk(init)
            runs = any("super" in ast.unparse(node) for node in ast.walk(init) if isinstance(node, ast.Call))
        yield from (node for node in one.node.body if isinstance(node, ast.Assign | ast.AnnAssign))


def _flag(finder: ClassFinder, inner: ModelClass, setter: SetterReading, forward: ForwardReading) -> str:
    """The flag in use, from whichever parts name one."""
    used = [name for one in forward.embedding for name in sorted(one.flags)]
    started = [name for name in defaults_of(finder, inner) if "embed" in name and "captur" in name]
    both = [name for name in setter.flags if name in used]
    return next(iter([*both, *setter.flags, *used, *started]), "")


def _default(finder: ClassFinder, inner: ModelClass, flag: str) -> Part:
    found = defaults_of(finder, inner).get(flag) if flag else None
    if found is None:
        name = f"self.{flag}" if flag else "no flag"
        return Part(
            "default", False, f"{inner.name}.__init__ gives {name} no default" if flag else "no flag for the embedding"
        )
    if found:
        return Part("default", False, f"self.{flag} starts as True, so every model captures the embedding")
    return Part("default", True, f"self.{flag} starts as False")


def _setter(setter: SetterReading, flag: str) -> Part:
    if setter.problem:
        return Part("setter", False, setter.problem)
    if flag and flag in setter.flags and setter.drops_minus_one:
        return Part("setter", True, setter.minus_one)
    if flag and not setter.flags:
        return Part("setter", False, f"{SETTER} never sets {flag}: {setter.minus_one}")
    return Part("setter", False, setter.minus_one)


def _forward(forward: ForwardReading, flag: str) -> Part:
    if forward.problem:
        return Part("forward", False, forward.problem)
    mine = [one for one in forward.embedding if flag in one.flags]
    if not mine:
        under = f" under self.{flag}" if flag else ""
        return Part("forward", False, f"the forward captures no embedding{under}")
    if len(mine) > 1:
        return Part("forward", False, "the forward captures the embedding twice")
    if mine[0].faults:
        return Part("forward", False, f"the forward's capture of the embedding is wrong: {'; '.join(mine[0].faults)}")
    return Part("forward", True, f"the forward captures the embedding under self.{flag}")


def _wrapper(finder: ClassFinder, classes: ModelClasses) -> Part:
    missing = missing_in_wrapper(finder, classes)
    if missing:
        return Part("wrapper", False, f"{classes.outer.name} has no {', '.join(missing)}: the server stops at start-up")
    setter = finder.method(classes.outer, SETTER)
    calls = [one for one in ast.walk(setter.node) if isinstance(one, ast.Call)] if setter is not None else []
    handed = [
        one for one in calls if dotted(one.func) == f"self.language_model.{SETTER}" and (one.args or one.keywords)
    ]
    if not handed:
        return Part("wrapper", False, f"{classes.outer.name}.{SETTER} does not hand the ids to its language model")
    return Part("wrapper", True, f"{classes.outer.name} hands the ids to {classes.language.name}")


def missing_in_wrapper(finder: ClassFinder, classes: ModelClasses) -> list[str]:
    """Methods that EAGLE-3 serving calls on the loaded model, which the text model has and its wrapper has not."""
    return [
        name
        for name in WRAPPED
        if finder.method(classes.language, name) is not None and finder.method(classes.outer, name) is None
    ]
