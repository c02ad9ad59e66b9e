"""Find an SGLang package on disk and read its modules by their syntax trees; nothing of it is imported or run."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from eagle3.errors import RedraftError

MODELS = "srt/models"
_MEND = "give the folder of the sglang package, its site-packages, a repository with python/sglang, or a Python"


@dataclass(frozen=True)
class SglangTree:
    """An SGLang package.

    Args:
        root: the package folder (`.../sglang`).
        version: as the package states it ("0.5.23"); "" when it does not.
        overlay: contents that stand for files of the tree (path under `root` -> bytes): a patch is read this way
            before it is written.
    """

    root: Path
    version: str
    overlay: Mapping[str, bytes] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """True when the tree has the file `name`, a path under `root`."""
        return name in self.overlay or (self.root / name).is_file()

    def source(self, name: str) -> bytes:
        """Contents of the file `name`.

        Raises:
            RedraftError: no such file, or it cannot be read.
        """
        if name in self.overlay:
            return self.overlay[name]
        try:
            return (self.root / name).read_bytes()
        except OSError as err:
            raise RedraftError(
                "cannot read a file of SGLang",
                where=str(self.root / name),
                why=str(err),
                mend="give a whole tree of SGLang",
            ) from None

    def parse(self, name: str) -> ast.Module:
        """Syntax tree of the file `name`.

        Raises:
            RedraftError: no such file, or not Python.
        """
        try:
            return _parsed(self.source(name))
        except (SyntaxError, ValueError) as err:
            raise RedraftError(
                "a file of SGLang is not readable Python",
                where=str(self.root / name),
                why=str(err),
                mend="install this SGLang again",
            ) from None

    def model_files(self) -> list[str]:
        """Paths under `root` of the model files, sorted."""
        return sorted(f"{MODELS}/{path.name}" for path in (self.root / MODELS).glob("*.py"))

    def with_overlay(self, files: Mapping[str, bytes]) -> SglangTree:
        """The same tree with `files` in place of what is on disk."""
        return SglangTree(self.root, self.version, {**self.overlay, **files})


@lru_cache(maxsize=64)  # a patch reads the same large files several times; nobody changes the trees
def _parsed(source: bytes) -> ast.Module:
    return ast.parse(source)


def read_tree(tree: Path) -> SglangTree:
    """Find the SGLang package at `tree`.

    Args:
        tree: the package folder, a site-packages that holds it, a repository root (`python/sglang`), the root of a
            virtual environment, or a Python interpreter that has it.

    Raises:
        RedraftError: no SGLang with model files there.
    """
    tree = Path(tree).expanduser()
    if not tree.exists():
        raise RedraftError("no such SGLang tree", where=str(tree), mend=_MEND)
    root = _of_interpreter(tree) if tree.is_file() else _package_folder(tree)
    if root is None:
        raise RedraftError("not an SGLang tree", where=str(tree), why=f"no {MODELS} in it", mend=_MEND)
    return SglangTree(root, _version(root))


def _package_folder(tree: Path) -> Path | None:
    inside = [
        tree,
        tree / "sglang",
        tree / "python" / "sglang",
        *sorted(tree.glob("lib/python3*/site-packages/sglang")),
    ]
    return next((one for one in inside if (one / MODELS).is_dir()), None)


def _of_interpreter(python: Path) -> Path | None:
    """The package that an interpreter would import, asked without importing it."""
    if not os.access(python, os.X_OK):
        return None
    code = "import importlib.util as u; s = u.find_spec('sglang'); print(s.submodule_search_locations[0] if s else '')"
    try:
        answer = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60, cwd="/")
    except (OSError, subprocess.TimeoutExpired):
        return None
    folder = answer.stdout.strip()
    return _package_folder(Path(folder)) if folder else None


def _version(root: Path) -> str:
    for name in ("_version.py", "version.py"):
        if (root / name).is_file():
            found = _stated_version((root / name).read_bytes())
            if found:
                return found
    installed = sorted(root.parent.glob("sglang-*.dist-info"))
    return installed[-1].name.removeprefix("sglang-").removesuffix(".dist-info") if installed else ""


def _stated_version(source: bytes) -> str:
    """The release number assigned to `__version__`, or ""."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if "__version__" in names and re.match(r"\d+\.\d+", str(node.value.value)):
                return str(node.value.value)
    return ""
