"""Fixtures over the real SGLang on a CPU (`make sglang-cpu`); where it is not set up, its tests are skipped by name."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

HARNESS = Path(__file__).resolve().parent / "sglang_cpu"


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=[str(path.parent)])
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


flags = _load("sglang_cpu_flags", HARNESS / "flags.py")


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The interpreter that has the real SGLang."""
    python = Path(os.environ.get("SGLANG_PYTHON") or flags.PYTHON)
    if not python.exists():
        pytest.skip("the SGLang harness is not set up: run `make sglang-cpu`")
    return python


@pytest.fixture(scope="session")
def sglang_env() -> dict[str, str]:
    """Environment of an SGLang process on a CPU, added to the test's own."""
    return dict(flags.SGLANG_CPU_ENV)


@pytest.fixture(scope="session")
def sglang_args() -> list[str]:
    """Flags that every SGLang server on a CPU needs."""
    return list(flags.SGLANG_CPU_ARGS)


@pytest.fixture(scope="session")
def sgl_kernel() -> ModuleType:
    """The stand-in kernels, imported without SGLang."""
    return sys.modules.get("sgl_kernel") or _load("sgl_kernel", HARNESS / "shim" / "sgl_kernel" / "__init__.py")
