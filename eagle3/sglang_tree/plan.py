"""Work out what the embedding patch changes in a tree; nothing is written here.

The patch, for the DeepSeek file that Kimi-K2.5 is served with: a flag with its default in `__init__`; a setter that
takes -1 as the embedding; a forward that captures it first. Where they are needed it also gives the Kimi-K2.5 wrapper
the methods that EAGLE-3 serving calls, and sets the draft's ids before CUDA graphs are captured.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from eagle3.errors import RedraftError
from eagle3.sglang_tree.classes import SETTER, ClassFinder, ModelClass, self_attribute
from eagle3.sglang_tree.edits import SourceEdits
from eagle3.sglang_tree.forward import BOUNDARY, PACKER
from eagle3.sglang_tree.parts import FLAG, ModelReading, defaults_of, missing_in_wrapper, read_model
from eagle3.sglang_tree.tree import SglangTree
from eagle3.sglang_tree.verdict import NONE, WHOLE, patch_state

DEEPSEEK, KIMI = "deepseek_v3", "kimi_k25"
_BY = "Redraft's sglang_patch.py:"
_ONE_STAGE = "EAGLE-3 with the embedding (layer id -1) needs one pipeline stage: the embedding is on the first rank"


@dataclass(frozen=True)
class Plan:
    """What to write: new contents by file (path under the package), and what each change is, in words."""

    files: dict[str, bytes]
    changes: list[str]


def models_of(tree: SglangTree) -> list[str]:
    """The model types that the patch is about and that this tree serves."""
    finder = ClassFinder(tree)
    wanted = {DEEPSEEK: "DeepseekV3ForCausalLM", KIMI: "KimiK25ForConditionalGeneration"}
    return [model_type for model_type, name in wanted.items() if finder.anywhere(name) is not None]


def plan_patch(tree: SglangTree) -> Plan:
    """The changes that make a tree whole; none when it is.

    Raises:
        RedraftError: code of another shape than those known, or a patch applied by half; nothing is guessed.
    """
    types = models_of(tree)
    if DEEPSEEK not in types:
        raise RedraftError(
            "nothing to patch",
            where=str(tree.root),
            why="it has no DeepseekV3ForCausalLM",
            mend="give a whole tree of SGLang",
        )
    planner = _Planner(tree)
    planner.embedding(read_model(tree, DEEPSEEK))
    if KIMI in types:
        planner.wrapper(read_model(tree, KIMI))
    planner.graphs(read_model(tree, DEEPSEEK))
    plan = planner.plan()
    _check_result(tree.with_overlay(plan.files), types)
    return plan


class _Planner:
    def __init__(self, tree: SglangTree) -> None:
        self.tree = tree
        self.finder = ClassFinder(tree)
        self.edits: dict[str, SourceEdits] = {}
        self.changes: list[str] = []

    def plan(self) -> Plan:
        return Plan({name: edits.result() for name, edits in self.edits.items()}, self.changes)

    def edit(self, name: str) -> SourceEdits:
        if name not in self.edits:
            self.edits[name] = SourceEdits(self.tree.source(name))
        return self.edits[name]

    def embedding(self, model: ModelReading) -> None:
        """The default, the setter and the forward."""
        if model.problem:
            raise _unknown(self.tree, model.classes.inner, model.problem)
        if all(one.good for one in model.embedding_parts):
            return
        if model.flag or patch_state(model) != NONE:
            raise RedraftError(
                "the embedding patch is there by half",
                where=str(self.tree.root / model.classes.inner.file),
                why="; ".join(f"{one.name}: {one.why}" for one in model.embedding_parts if not one.good),
                mend="restore SGLang's own file (revert, or install this release again) and apply",
                page="sglang_patch",
            )
        self._default(model)
        self._setter(model)
        self._forward(model)

    def _default(self, model: ModelReading) -> None:
        inner = model.classes.inner
        owners = [inner, *(one for one in self.finder.heirs(inner) if _points_default(one) is not None)]
        for owner in owners:
            anchor = _points_default(owner)
            if anchor is None:
                raise _unknown(self.tree, owner, f"{owner.name}.__init__ does not begin self.layers_to_capture")
            if FLAG not in defaults_of(self.finder, owner):
                self.edit(owner.file).insert_after(anchor, [f"# {_BY} set by {SETTER}", f"self.{FLAG} = False"])
                self.changes.append(f"{owner.file}: {owner.name}.__init__ gives the flag its default")

    def _setter(self, model: ModelReading) -> None:
        found = self.finder.method(model.classes.language, SETTER)
        guard = _last_rank_guard(found.node) if found is not None else None
        if found is None or guard is None:
            raise _unknown(self.tree, model.classes.language, f"{SETTER} has no guard for the last pipeline rank")
        if not _sets_capture(found.node):
            raise _unknown(self.tree, found.owner, f"{SETTER} does not set self.capture_aux_hidden_states")
        ids = found.node.args.args[1].arg
        self.edit(found.owner.file).insert_after(
            guard,
            [
                "",
                f"# {_BY} -1 is the embedding; the other ids then name layer outputs",
                f"self.model.{FLAG} = bool({ids}) and -1 in {ids}",
                f"if self.model.{FLAG}:",
                "    if not self.pp_group.is_first_rank:",
                "        raise ValueError(",
                f'            "{_ONE_STAGE}"',
                "        )",
                "    self.capture_aux_hidden_states = True",
                f"    self.model.layers_to_capture = [val + 1 for val in {ids} if val >= 0]",
                "    return",
            ],
        )
        self.changes.append(f"{found.owner.file}: {found.owner.name}.{SETTER} takes -1 as the embedding")

    def _forward(self, model: ModelReading) -> None:
        forward, owner = model.forward, self.finder.method(model.classes.inner, "forward")
        assert forward.loop is not None and forward.condition is not None and owner is not None
        edits = self.edit(owner.owner.file)
        if forward.at_layer == BOUNDARY:
            # Layer 0's own boundary gathers and copies what enters it, which is the embedding.
            edits.replace(forward.condition, f"({{}} or ({forward.layer} == 0 and self.{FLAG}))")
            if forward.kind == PACKER:
                edits.replace(self._room(model), f"{{}} + int(self.{FLAG})")
        else:
            if not forward.hidden:
                raise _unknown(self.tree, owner.owner, "the forward does not keep the embedding in a local")
            edits.insert_before(
                forward.loop,
                [
                    f"# {_BY} a copy, for the norms of later layers add into this storage in place",
                    f"if self.{FLAG} and self.pp_group.is_first_rank:",
                    f"    {forward.collector}.append({forward.hidden}.clone())",
                ],
            )
        self.changes.append(f"{owner.owner.file}: {owner.owner.name}.forward captures the embedding first")

    def _room(self, model: ModelReading) -> ast.expr:
        """The argument that sizes the collector."""
        made = model.forward.made
        arguments = made.value.args if made is not None and isinstance(made.value, ast.Call) else []
        sized = [one for one in arguments if any(self_attribute(n) == "layers_to_capture" for n in ast.walk(one))]
        if len(sized) != 1:
            raise _unknown(self.tree, model.classes.inner, "the collector is not sized by layers_to_capture")
        return sized[0]

    def wrapper(self, model: ModelReading) -> None:
        """The methods that the Kimi-K2.5 wrapper lacks."""
        missing = missing_in_wrapper(self.finder, model.classes) if model.classes.wrapped else []
        if not missing:
            return
        outer = model.classes.outer
        lines = ["", f"# {_BY} EAGLE-3 serving calls these on the loaded model"]
        for name in missing:
            lines += [*_DELEGATES[name], ""]
        self.edit(outer.file).insert_after(outer.node.body[-1], lines[:-1])
        self.changes.append(f"{outer.file}: {outer.name} gets {', '.join(missing)}")

    def graphs(self, model: ModelReading) -> None:
        """Set the ids before graphs are captured, and do not reset them there."""
        for name, statements in model.graphs.resets.items():
            for statement in statements:
                self.edit(name).replace_statement(statement, [f"pass  # {_BY} the draft's ids are set already"])
            self.changes.append(f"{name}: does not put the default layers in place of the draft's ids")
        for name, late in model.graphs.late.items():
            self.edit(name).move_before(
                late.setting, late.capture, [f"# {_BY} moved up from below the capture of graphs"]
            )
            self.changes.append(f"{name}: sets the draft's ids before CUDA graphs are captured")


_DELEGATES = {
    SETTER: [
        f"def {SETTER}(self, layer_ids=None):",
        f"    self.language_model.{SETTER}(layer_ids)",
    ],
    "get_embed_and_head": [
        "def get_embed_and_head(self):",
        "    return self.language_model.get_embed_and_head()",
    ],
    "set_embed_and_head": [
        "def set_embed_and_head(self, embed, head):",
        "    self.language_model.set_embed_and_head(embed, head)",
    ],
}


def _points_default(owner: ModelClass) -> ast.stmt | None:
    """`self.layers_to_capture = []` at the top level of the class's own `__init__`."""
    init = owner.method("__init__")
    for node in init.body if init is not None else []:
        if isinstance(node, ast.Assign) and any(self_attribute(one) == "layers_to_capture" for one in node.targets):
            return node
    return None


def _last_rank_guard(function: ast.FunctionDef) -> ast.stmt | None:
    """`if not ...is_last_rank: return` among the function's first statements."""
    for node in function.body:
        if isinstance(node, ast.If) and "is_last_rank" in ast.unparse(node.test):
            leaves = [type(one) for one in node.body] == [ast.Return] and not node.orelse
            return node if leaves else None
    return None


def _sets_capture(function: ast.FunctionDef) -> bool:
    targets = [one for node in ast.walk(function) if isinstance(node, ast.Assign) for one in node.targets]
    return any(self_attribute(one) == "capture_aux_hidden_states" for one in targets)


def _unknown(tree: SglangTree, owner: ModelClass, why: str) -> RedraftError:
    return RedraftError(
        "this code is not what the patch knows, and nothing was changed",
        where=str(tree.root / owner.file),
        why=f"{why}; version {tree.version or 'unknown'}",
        mend="use a release that the patch was tested on (docs/sglang_patch.md), or train a draft on layers only",
    )


def _check_result(patched: SglangTree, types: list[str]) -> None:
    """Read the patched sources as if they were on disk: they must be whole Python and a whole patch."""
    for name, source in patched.overlay.items():
        try:
            compile(source, name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as err:
            raise RedraftError(
                "the patch would break a file; nothing was changed",
                where=name,
                why=str(err),
                mend="report this build's version; serve a layer-only draft meanwhile",
            ) from None
    for model_type in types:
        model = read_model(patched, model_type)
        if patch_state(model) != WHOLE:
            why = model.problem or "; ".join(f"{one.name}: {one.why}" for one in model.missing)
            raise RedraftError(
                "the patch does not fit this code; nothing was changed",
                where=f"{patched.root}, {model_type}",
                why=why,
                mend="use a release that the patch was tested on (docs/sglang_patch.md)",
            )
