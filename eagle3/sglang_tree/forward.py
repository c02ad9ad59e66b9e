"""Read how a model's forward captures: what it collects into, what it does at layer 0, and any embedding capture.

Three shapes are known. *Adding*: `collector.append(hidden + residual)` in the layer loop, which has no residual yet at
layer 0. *Adding with a guard*: the same, with the bare hidden states where the residual is None; they are kept by
reference, and the norms of later layers add into that storage in place. *Boundary*: the collector is handed to the
layer, which captures its own input once it is whole.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from eagle3.sglang_tree.classes import Method, self_attribute
from eagle3.sglang_tree.walker import SINGLE_RANK, Refused, Unreadable, Walker, dotted

ADDS, GUARDED, BOUNDARY = (
    "adds the residual",
    "adds the residual where there is one",
    "captures at each layer's boundary",
)
LIST, PACKER = "list", "packer"
_POINTS = ("layers_to_capture", "_is_layer_to_capture")
_EMBEDS = ("embed_tokens", "get_input_embeddings", "get_input_embedding")
_NO_FLAGS = ("pp_group", "layers_to_capture", "enable_a2a_moe", "first_k_dense_replace", "start_layer", "end_layer")


@dataclass(frozen=True)
class EmbeddingCapture:
    """A capture of the embedding that stands under a flag.

    Args:
        flags: attributes of `self` in its condition.
        faults: in words, why it does not give the embedding; empty when it does.
    """

    flags: frozenset[str]
    faults: tuple[str, ...]


@dataclass(frozen=True)
class ForwardReading:
    """A forward's capture.

    Args:
        collector: name of the local that collects states.
        kind: `LIST` or `PACKER` (sized when it is made).
        at_layer: `ADDS`, `GUARDED` or `BOUNDARY`.
        hidden: name of the local that holds the embedding before the loop.
        made: the statement that makes the collector.
        loop: the layer loop.
        condition: the test that decides whether a layer is captured.
        layer: name of the loop's layer number.
        embedding: captures of the embedding under a flag.
        problem: why it cannot be read; "" when it can.
    """

    collector: str = ""
    kind: str = ""
    at_layer: str = ""
    hidden: str = ""
    made: ast.Assign | None = None
    loop: ast.For | None = None
    condition: ast.expr | None = None
    layer: str = ""
    embedding: tuple[EmbeddingCapture, ...] = ()
    problem: str = ""


def read_forward(method: Method | None) -> ForwardReading:
    """Read a forward; an unknown shape is a reading with a `problem`, not an error."""
    if method is None:
        return ForwardReading(problem="the model has no forward")
    body = method.node.body
    loop = next((one for one in ast.walk(method.node) if isinstance(one, ast.For) and _mentions_points(one)), None)
    if loop is None or not isinstance(loop.target, ast.Name):
        return ForwardReading(problem="no layer loop that captures states")
    collector, at_layer, condition = _in_loop(loop)
    made = _made(method.node, collector)
    hidden = _embedding_local(method.node)
    if not collector or condition is None or made is None:
        return ForwardReading(problem="the layer loop captures in a way that is not known here")
    kind = LIST if _makes_list(made.value) else PACKER
    reading = ForwardReading(collector, kind, at_layer, hidden, made, loop, condition, loop.target.id)
    return _with_embedding(reading, body)


def in_code_order(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements of a body, nested ones included, in the order of the text."""
    for statement in body:
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from in_code_order(getattr(statement, name, []) or [])


def _mentions_points(node: ast.AST) -> bool:
    return any(
        (isinstance(one, ast.Attribute) and one.attr in _POINTS)
        or (isinstance(one, ast.Constant) and one.value in _POINTS)
        for one in ast.walk(node)
    )


def _in_loop(loop: ast.For) -> tuple[str, str, ast.expr | None]:
    """Collector, shape and condition of the per-layer capture."""
    for node in ast.walk(loop):
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.IfExp) and _mentions_points(node.value.test):
            return dotted(node.value.body).split(".")[0], BOUNDARY, node.value.test
        if isinstance(node, ast.If) and _mentions_points(node.test):
            appended = [one for one in ast.walk(node) if _appended(one) is not None]
            if appended:
                added = [_appended(one) for one in appended]
                guarded = any(isinstance(one, ast.IfExp) for one in added)
                return _owner(appended[0]), GUARDED if guarded else ADDS, node.test
    return "", "", None


def _appended(node: ast.AST) -> ast.expr | None:
    """What `collector.append(x)` or `.capture(x)` collects."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
        return None
    collects = node.func.attr in ("append", "capture") and isinstance(node.func.value, ast.Name)
    return node.args[0] if collects else None


def _owner(call: ast.AST) -> str:
    return dotted(call.func).split(".")[0] if isinstance(call, ast.Call) else ""


def _made(function: ast.FunctionDef, collector: str) -> ast.Assign | None:
    """The last plain assignment to the collector; conditional ones are no anchor."""
    found = None
    for statement in function.body:
        if isinstance(statement, ast.Assign) and [dotted(one) for one in statement.targets] == [collector]:
            found = statement
    return found


def _makes_list(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return dotted(value.func).split(".")[-1] in ("list", "AuxHiddenStateList")
    return isinstance(value, ast.List)


def _embedding_local(function: ast.FunctionDef) -> str:
    """The local that takes the embedding's result; "" when there is none."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            calls = [one for one in ast.walk(node.value) if isinstance(one, ast.Call)]
            if any(self_attribute(one.func) in _EMBEDS for one in calls):
                return node.targets[0].id
    return ""


# --- the embedding under a flag -------------------------------------------------------------------------------------


def _with_embedding(reading: ForwardReading, body: list[ast.stmt]) -> ForwardReading:
    captures = []
    for statement in in_code_order(body):
        if isinstance(statement, ast.If) and statement is not reading.loop:
            captures += _statement_capture(reading, statement)
    if reading.at_layer == BOUNDARY and reading.condition is not None:
        flags = _flags(reading.condition)
        if flags:
            captures.append(EmbeddingCapture(flags, tuple(_condition_faults(reading, flags))))
    return ForwardReading(**{**vars(reading), "embedding": tuple(captures)})


def _statement_capture(reading: ForwardReading, statement: ast.If) -> list[EmbeddingCapture]:
    """`if self.<flag>: collector.append(hidden)`, before the loop or at its head."""
    flags = _flags(statement.test)
    if not flags or _mentions_points(statement.test) or _contains(statement, reading.loop):
        return []
    calls = [one for one in ast.walk(statement) if _appended(one) is not None and _owner(one) == reading.collector]
    if not calls:
        return []
    return [EmbeddingCapture(flags, tuple(_faults(reading, statement, calls[0], flags)))]


def _faults(reading: ForwardReading, statement: ast.If, call: ast.AST, flags: frozenset[str]) -> Iterator[str]:
    value = _appended(call)
    assert value is not None and reading.loop is not None and reading.made is not None
    if reading.hidden not in {one.id for one in ast.walk(value) if isinstance(one, ast.Name)}:
        yield f"it appends `{ast.unparse(value)}`, which is not the embedding in `{reading.hidden}`"
    if statement.lineno < reading.made.lineno:
        yield "it appends before the collector is made"
    yield from _statement_condition_faults(reading, statement, flags)
    after = statement.lineno > (reading.loop.end_lineno or 0)
    inside = reading.loop.lineno < statement.lineno and not after
    if after or (
        inside and reading.layer not in {one.id for one in ast.walk(statement.test) if isinstance(one, ast.Name)}
    ):
        yield "it appends after layers have run"
    copies = any(
        isinstance(one, ast.Call) and dotted(one.func).endswith((".clone", "torch.clone")) for one in ast.walk(value)
    )
    captures = isinstance(call, ast.Call) and dotted(call.func).endswith(".capture")
    if reading.kind == LIST and not copies and not captures:
        yield "it keeps no copy: the norms of later layers add into the embedding's storage in place"
    yield from _room_fault(reading, flags)


def _statement_condition_faults(reading: ForwardReading, statement: ast.If, flags: frozenset[str]) -> Iterator[str]:
    for on in (True, False):
        try:
            holds = _holds(reading, statement.test, flags, on, 0)
        except (Unreadable, Refused):
            return
        if holds != on:
            yield f"its condition is {'false' if on else 'true'} with the flag {'on' if on else 'off'}"


def _condition_faults(reading: ForwardReading, flags: frozenset[str]) -> Iterator[str]:
    """The flag must add layer 0 to the captured layers, and no other."""
    assert reading.condition is not None
    for on, wanted in ((True, [0, 3]), (False, [3])):
        try:
            found = [layer for layer in range(6) if _holds(reading, reading.condition, flags, on, layer)]
        except (Unreadable, Refused) as err:
            yield f"its condition has {err}, which is not followed here"
            return
        if found != wanted:
            yield f"with the flag {'on' if on else 'off'} and layer 3 asked for, layers {found} are captured"
    yield from _room_fault(reading, flags)


def _holds(reading: ForwardReading, test: ast.expr, flags: frozenset[str], on: bool, layer: int) -> bool:
    facts = {f"self.{name}": on for name in flags}
    walker = Walker({**facts, **SINGLE_RANK, "self.layers_to_capture": [3], reading.layer: layer}, {})
    return bool(walker.value(test))


def _room_fault(reading: ForwardReading, flags: frozenset[str]) -> Iterator[str]:
    """A packer is sized when it is made: its size must count the embedding."""
    if reading.kind == PACKER and reading.made is not None and not (_flags(reading.made.value) & flags):
        yield "the collector is made without room for the embedding"


def _flags(node: ast.AST) -> frozenset[str]:
    names = {self_attribute(one) for one in ast.walk(node)} - {"", *_NO_FLAGS}
    for one in ast.walk(node):  # getattr(self, "flag", False)
        if isinstance(one, ast.Call) and dotted(one.func) == "getattr" and len(one.args) > 1:
            name = one.args[1]
            if dotted(one.args[0]) == "self" and isinstance(name, ast.Constant):
                names.add(str(name.value))
    return frozenset(names)


def _contains(outer: ast.AST, inner: ast.AST | None) -> bool:
    return any(one is inner for one in ast.walk(outer))
