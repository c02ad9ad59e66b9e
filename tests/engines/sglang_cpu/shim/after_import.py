"""Tests only: call a function on a module as soon as it has been imported, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

Patch = Callable[[Any], None]


class PatchingLoader(Loader):
    """Runs the module as its own loader would, then the patch."""

    def __init__(self, loader: Loader, patch: Patch) -> None:
        self.loader, self.patch = loader, patch

    def create_module(self, spec: ModuleSpec) -> Any:
        """As the module's own loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """As the module's own loader, then the patch."""
        self.loader.exec_module(module)
        self.patch(module)


class PatchingFinder(MetaPathFinder):
    """Finds the modules that have a patch, each once."""

    def __init__(self, patches: dict[str, Patch]) -> None:
        self.patches = dict(patches)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's own spec with a loader that patches; None for every other module."""
        patch = self.patches.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            raise ImportError(f"{name} is not there to be patched: this harness is made for SGLang 0.5.23")
        spec.loader = PatchingLoader(spec.loader, patch)
        return spec


def patch_after_import(patches: dict[str, Patch]) -> None:
    """Call `patches[name](module)` when the module of that name has been imported."""
    sys.meta_path.insert(0, PatchingFinder(patches))
