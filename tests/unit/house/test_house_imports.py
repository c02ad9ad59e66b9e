"""The design's import rules: the ground floor knows nobody, the packages meet only at the front door."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"eagle3", "data_prep", "train", "eval"}
ALLOWED = {
    "eagle3": {"eagle3"},
    "data_prep": {"eagle3", "data_prep"},
    "train": {"eagle3", "train"},
    "eval": {"eagle3", "eval"},
}


def is_front_door(path: Path) -> bool:
    relative = path.relative_to(ROOT)
    return relative.as_posix() == "train/run.py" or relative.parts[:2] == ("train", "front")


def imported_packages(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
            if node.module.startswith("train.front") and not is_front_door(path):
                names.add("train.front")
    return names & (PACKAGES | {"train.front"})


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_package_imports_only_what_the_design_allows(package: str) -> None:
    files = [path for path in (ROOT / package).rglob("*.py") if not is_front_door(path)]
    assert files
    wrong = {
        str(path.relative_to(ROOT)): sorted(imported_packages(path) - ALLOWED[package])
        for path in files
        if imported_packages(path) - ALLOWED[package]
    }
    assert not wrong
