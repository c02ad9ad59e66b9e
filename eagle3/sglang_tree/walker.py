"""Follow a small function through its syntax tree on given values: enough Python for a capture setter, and no more.

A setter says what ids mean, and hands choose many spellings for one rule. So it is read by what it does to sample
ids, not by its text: its statements are walked here on plain integers and lists. Nothing is imported or executed;
whatever is not in the short list below raises `Unreadable`, and the reader then says that it cannot tell.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "len": len,
    "list": list,
    "tuple": tuple,
    "set": set,
    "sorted": sorted,
    "any": any,
    "all": all,
    "min": min,
    "max": max,
    "int": int,
    "bool": bool,
    "hasattr": lambda *_: True,
}
_SILENT = ("logger", "logging", "warnings", "print")
_GROUPS = ("self.pp_group", "get_pp_group()", "get_parallel().pp_group")
_RANK = {"is_last_rank": True, "is_first_rank": True, "world_size": 1, "rank_in_group": 0}
SINGLE_RANK: dict[str, Any] = {f"{group}.{name}": value for group in _GROUPS for name, value in _RANK.items()}
"""What pipeline groups say on a server with one pipeline stage."""

_MAX_STEPS = 20_000


class Unreadable(Exception):
    """A construct that this walker does not follow; the text names it."""


class Refused(Exception):
    """The function raises on these values."""


class _Returned(Exception):
    pass


class Walker:
    """Walks one function.

    Args:
        facts: values of dotted names that the function may read ("self.config.num_hidden_layers" -> 61).
        sinks: dotted names of methods with one argument that stand for an assignment
            ("self.model.set_layers" -> "self.model.layers_to_capture").
    """

    def __init__(self, facts: Mapping[str, Any], sinks: Mapping[str, str]) -> None:
        self.values: dict[str, Any] = dict(facts)
        self.sinks = sinks
        self._steps = 0

    def run(self, function: ast.FunctionDef, arguments: Mapping[str, Any]) -> None:
        """Walk the body; afterwards `values` holds what was assigned.

        Raises:
            Unreadable: something outside the short list.
            Refused: the function raises.
        """
        self.values.update(arguments)
        try:
            self._block(function.body)
        except _Returned:
            return
        except (TypeError, IndexError, ValueError, KeyError, ZeroDivisionError) as err:
            raise Refused(str(err)) from None

    def value(self, expression: ast.expr) -> Any:
        """The value of one expression.

        Raises:
            Unreadable, Refused: as `run`.
        """
        try:
            return self._value(expression)
        except (TypeError, IndexError, ValueError, KeyError, ZeroDivisionError) as err:
            raise Refused(str(err)) from None

    def _block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._steps += 1
            if self._steps > _MAX_STEPS:
                raise Unreadable("a loop without end")
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Pass() | ast.Import() | ast.ImportFrom():
                return
            case ast.Expr(value=value):
                self._bare(value)
            case ast.Assign(targets=targets, value=value):
                self._assign(targets, self._value(value))
            case ast.AnnAssign(target=target, value=value):
                if value is not None:
                    self._assign([target], self._value(value))
            case ast.If(test=test, body=body, orelse=orelse):
                self._block(body if self._value(test) else orelse)
            case ast.For(target=ast.Name(id=name), iter=iterable, body=body, orelse=[]):
                for item in list(self._value(iterable)):
                    self.values[name] = item
                    self._block(body)
            case _:
                self._leaving(node)

    def _leaving(self, node: ast.stmt) -> None:
        """Statements that may end the walk."""
        match node:
            case ast.Assert(test=test):
                if not self._value(test):
                    raise Refused("an assertion")
            case ast.Return():
                raise _Returned
            case ast.Raise():
                raise Refused(ast.unparse(node))
            case _:
                raise Unreadable(f"`{ast.unparse(node).splitlines()[0]}`")

    def _bare(self, node: ast.expr) -> None:
        """An expression whose value is dropped: a docstring, a log line, a list's `append`, a sink."""
        if isinstance(node, ast.Constant):
            return
        if not isinstance(node, ast.Call):
            raise Unreadable(f"`{ast.unparse(node)}`")
        name = dotted(node.func)
        if name.split(".")[0] in _SILENT:
            return
        if name in self.sinks and len(node.args) + len(node.keywords) == 1:
            given = node.args[0] if node.args else node.keywords[0].value
            self.values[self.sinks[name]] = self._value(given)
        elif name.endswith((".append", ".extend", ".remove")) and isinstance(self._list_of(node), list):
            getattr(self._list_of(node), name.rsplit(".", 1)[1])(self._value(node.args[0]))
        else:
            raise Unreadable(f"`{ast.unparse(node)}`")

    def _list_of(self, call: ast.Call) -> Any:
        return self._value(call.func.value) if isinstance(call.func, ast.Attribute) else None

    def _assign(self, targets: list[ast.expr], value: Any) -> None:
        for target in targets:
            name = dotted(target)
            if not name:
                raise Unreadable(f"`{ast.unparse(target)} = ...`")
            self.values[name] = value

    def _value(self, node: ast.expr) -> Any:
        self._steps += 1
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name() | ast.Attribute():
                return self._read(node)
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return [self._value(one) for one in items]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _BINARY[type(op)](self._value(left), self._value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._value(operand)
            case ast.BoolOp() | ast.Compare() | ast.IfExp():
                return self._choice(node)
            case ast.Subscript(value=value, slice=index) if not isinstance(index, ast.Slice):
                return self._value(value)[self._value(index)]
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self._comprehension(node)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
                return _CALLS[name](*([] if name == "hasattr" else [self._value(one) for one in args]))
            case _:
                raise Unreadable(f"`{ast.unparse(node)}`")

    def _choice(self, node: ast.BoolOp | ast.Compare | ast.IfExp) -> Any:
        if isinstance(node, ast.IfExp):
            return self._value(node.body if self._value(node.test) else node.orelse)
        if isinstance(node, ast.BoolOp):
            value: Any = None
            for one in node.values:
                value = self._value(one)
                if bool(value) == isinstance(node.op, ast.Or):
                    break
            return value
        left = self._value(node.left)
        for op, one in zip(node.ops, node.comparators, strict=True):
            right = self._value(one)
            if not _COMPARE[type(op)](left, right):
                return False
            left = right
        return True

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> list[Any]:
        only = node.generators[0]
        if len(node.generators) != 1 or not isinstance(only.target, ast.Name):
            raise Unreadable(f"`{ast.unparse(node)}`")
        out = []
        for item in list(self._value(only.iter)):
            self.values[only.target.id] = item
            if all(self._value(one) for one in only.ifs):
                out.append(self._value(node.elt))
        return list(dict.fromkeys(out)) if isinstance(node, ast.SetComp) else out

    def _read(self, node: ast.expr) -> Any:
        name = dotted(node)
        if name not in self.values:
            raise Unreadable(f"`{ast.unparse(node)}`")
        return self.values[name]


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of plain names, which may begin with a call without arguments; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    if isinstance(node, ast.Call) and not node.args and not node.keywords and isinstance(node.func, ast.Name):
        return f"{node.func.id}()"
    return ""
