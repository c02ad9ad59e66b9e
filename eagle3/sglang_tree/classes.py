"""Find a model's classes in an SGLang tree: through base classes, across files, and through multimodal wrappers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from eagle3.errors import RedraftError
from eagle3.sglang_tree.tree import MODELS, SglangTree

SETTER = "set_eagle3_layers_to_capture"
_PACKAGE = "sglang.srt.models."

ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "apertus": "ApertusForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "exaone_moe": "ExaoneMoEForCausalLM",
}


@dataclass(frozen=True)
class ModelClass:
    """A class and the file that it stands in."""

    file: str
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return self.node.name

    def method(self, name: str) -> ast.FunctionDef | None:
        """The class's own method `name`."""
        return next((one for one in self.node.body if isinstance(one, ast.FunctionDef) and one.name == name), None)


@dataclass(frozen=True)
class Method:
    """A method and the class that defines it."""

    owner: ModelClass
    node: ast.FunctionDef


@dataclass(frozen=True)
class ModelClasses:
    """The classes that capture for one architecture.

    Args:
        outer: the class that the server loads; a wrapper when it holds a `language_model`.
        language: the text model (the outer class itself when there is no wrapper).
        inner: its `self.model`, whose forward walks the layers.
    """

    outer: ModelClass
    language: ModelClass
    inner: ModelClass

    @property
    def wrapped(self) -> bool:
        return self.outer.name != self.language.name


class ClassFinder:
    """Looks classes up by name, following imports between model files."""

    def __init__(self, tree: SglangTree) -> None:
        self.tree = tree
        self._modules: dict[str, ast.Module] = {}

    def module(self, file: str) -> ast.Module:
        if file not in self._modules:
            self._modules[file] = self.tree.parse(file)
        return self._modules[file]

    def in_file(self, file: str, name: str) -> ModelClass | None:
        """The class `name` as `file` knows it: defined there or imported from another model file."""
        for node in self.module(file).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return ModelClass(file, node)
        for one in ast.walk(self.module(file)):
            if isinstance(one, ast.ImportFrom) and (one.module or "").startswith(_PACKAGE):
                other = f"{MODELS}/{(one.module or '').removeprefix(_PACKAGE).replace('.', '/')}.py"
                meant = [alias.name for alias in one.names if (alias.asname or alias.name) == name]
                if meant and other != file and self.tree.has(other):
                    return self.in_file(other, meant[0])
        return None

    def anywhere(self, name: str) -> ModelClass | None:
        """The class `name`, defined in any model file."""
        needle = f"class {name}".encode()
        for file in self.tree.model_files():
            if needle in self.tree.source(file):
                for node in self.module(file).body:
                    if isinstance(node, ast.ClassDef) and node.name == name:
                        return ModelClass(file, node)
        return None

    def lineage(self, start: ModelClass) -> Iterator[ModelClass]:
        """The class and its bases in SGLang's model files, depth first."""
        yield start
        for base in start.node.bases:
            found = self.in_file(start.file, base.id) if isinstance(base, ast.Name) else None
            if found is not None:
                yield from self.lineage(found)

    def method(self, start: ModelClass, name: str) -> Method | None:
        """The method that an instance of `start` would run."""
        for one in self.lineage(start):
            node = one.method(name)
            if node is not None:
                return Method(one, node)
        return None

    def heirs(self, base: ModelClass) -> list[ModelClass]:
        """Classes in other model files, or the same one, that inherit from `base`."""
        out = []
        for file in self.tree.model_files():
            if base.name.encode() not in self.tree.source(file):
                continue
            for node in self.module(file).body:
                if isinstance(node, ast.ClassDef) and node.name != base.name:
                    one = ModelClass(file, node)
                    if any(up.name == base.name and up.file == base.file for up in self.lineage(one)):
                        out.append(one)
        return out

    def built(self, owner: ModelClass, attribute: str) -> ModelClass | None:
        """The class whose instance `__init__` puts into `self.<attribute>`, also through a helper such as
        `_init_model`.
        """
        for one in self.lineage(owner):
            init = one.method("__init__")
            for value in _assigned(init, attribute) if init is not None else []:
                found = self._class_of_call(owner, one, value)
                if found is not None:
                    return found
        return None

    def _class_of_call(self, owner: ModelClass, holder: ModelClass, value: ast.expr) -> ModelClass | None:
        if not isinstance(value, ast.Call):
            return None
        if isinstance(value.func, ast.Name):
            return self.in_file(holder.file, value.func.id)
        helper = self.method(owner, value.func.attr) if isinstance(value.func, ast.Attribute) else None
        if helper is None:
            return None
        for node in ast.walk(helper.node):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                return self._class_of_call(owner, helper.owner, node.value)
        return None


def _assigned(function: ast.FunctionDef, attribute: str) -> list[ast.expr]:
    """Everything that the function assigns to `self.<attribute>` (a default of None may come before the class)."""
    return [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and any(self_attribute(one) == attribute for one in node.targets)
    ]


def self_attribute(node: ast.AST) -> str:
    """`x` for the expression `self.x`; "" for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return ""


def find_classes(finder: ClassFinder, model_type: str, architecture: str = "") -> ModelClasses:
    """The classes that serve a target.

    Args:
        model_type: used to look the architecture up when `architecture` is empty.
        architecture: as in the target's config ("DeepseekV3ForCausalLM").

    Raises:
        RedraftError: unknown model type, no such class in this tree, or its parts are not found.
    """
    name = architecture or ARCHITECTURES.get(model_type, "")
    if not name:
        raise RedraftError(
            "unknown model type",
            why=f"found {model_type!r}",
            mend=f"give the architecture, or one of {', '.join(sorted(ARCHITECTURES))}",
        )
    outer = finder.anywhere(name)
    if outer is None:
        raise RedraftError(
            "this SGLang has no such model",
            where=str(finder.tree.root / MODELS),
            why=f"no class {name}; version {finder.tree.version or 'unknown'}",
            mend="use a release that serves this target",
        )
    language = finder.built(outer, "language_model") or outer
    inner = finder.built(language, "model")
    if inner is None:
        raise RedraftError(
            "cannot follow this model's code",
            where=str(finder.tree.root / outer.file),
            why=f"{language.name}.__init__ does not put a class of SGLang's into self.model",
            mend="read it by hand, or measure the running server with the live probe",
        )
    return ModelClasses(outer, language, inner)
