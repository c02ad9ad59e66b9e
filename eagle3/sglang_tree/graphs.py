"""Read whether a build captures its CUDA graphs before it sets the draft's layer ids.

SGLang 0.5.6 to 0.5.10 call the setter without ids when they capture, and set the ids of the draft's config only
afterwards: what a replayed graph returns are the default layers, whatever the ids. Later builds set the ids first.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from eagle3.sglang_tree.classes import SETTER
from eagle3.sglang_tree.tree import SglangTree
from eagle3.sglang_tree.walker import dotted

RUNNERS = ("srt/model_executor/cuda_graph_runner.py", "srt/model_executor/model_runner.py")
CAPTURE = "init_device_graphs"


@dataclass(frozen=True)
class LateSetting:
    """A function that captures graphs and sets the ids after: statements of one body."""

    capture: ast.stmt
    setting: ast.stmt


@dataclass(frozen=True)
class GraphReading:
    """The order of capture and ids.

    Args:
        read: the files were there.
        resets: by file, statements that call the setter without ids.
        late: by file, ids set after the capture.
    """

    read: bool
    resets: dict[str, list[ast.Expr]]
    late: dict[str, LateSetting]

    @property
    def wrong(self) -> bool:
        """Graphs hold the default layers, whatever the ids."""
        return bool(self.resets or self.late)

    @property
    def words(self) -> str:
        if not self.wrong:
            return "the ids are set before CUDA graphs are captured"
        return (
            "CUDA graphs are captured with the default layers before the ids are set, so ids other than the default "
            "hold only with --disable-cuda-graph"
        )


def read_graphs(tree: SglangTree) -> GraphReading:
    """Read the runners of a tree; a tree that has only model files reads as `read=False`."""
    here = [name for name in RUNNERS if tree.has(name)]
    resets: dict[str, list[ast.Expr]] = {}
    late: dict[str, LateSetting] = {}
    for name in here:
        nodes = list(ast.walk(tree.parse(name)))
        found = [one for one in nodes if isinstance(one, ast.Expr) and _is_reset(one.value)]
        if found:
            resets[name] = found
        calls = [one for one in nodes if isinstance(one, ast.Call)]
        captures = [one for one in calls if dotted(one.func) == f"self.{CAPTURE}"]
        settings = [one for one in calls if _is_setter(one) and not _is_reset(one)]
        for function in nodes:
            setting = _late(function.body, captures, settings) if isinstance(function, ast.FunctionDef) else None
            if setting is not None:
                late[name] = setting
    return GraphReading(RUNNERS[1] in here, resets, late)


def _is_reset(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _is_setter(node) and not node.args and not node.keywords


def _is_setter(node: ast.Call) -> bool:
    return dotted(node.func).endswith(f".model.{SETTER}")


def _late(body: list[ast.stmt], captures: list[ast.Call], settings: list[ast.Call]) -> LateSetting | None:
    """The first capture and the first setting of one body, when they come in that order."""
    capture = next((one for one in body if _holds_any(one, captures)), None)
    setting = next((one for one in body if _holds_any(one, settings)), None)
    if capture is None or setting is None or setting.lineno <= capture.lineno:
        return None
    return LateSetting(capture, setting)


def _holds_any(statement: ast.stmt, calls: list[ast.Call]) -> bool:
    return any(statement.lineno <= one.lineno <= (statement.end_lineno or 0) for one in calls)
