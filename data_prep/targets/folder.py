"""Write a model folder so that it either stands whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3.atomic import sha256_json, sync
from eagle3.errors import RedraftError
from eagle3.leftovers import clear_leftovers, temporary

RECORD = "made_by.json"  # stands beside config.json: which maker and settings wrote the folder


def _fsync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync(path)
            continue
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())
    sync(folder)


@contextlib.contextmanager
def building(path: Path, recipe: dict[str, Any]) -> Iterator[Path]:
    """Yield an empty temporary sibling folder; on success record `recipe` in it and rename it to `path`.

    Args:
        path: the folder to build; a folder written by an earlier recipe of ours is replaced.
        recipe: JSON-able settings that decide the content; `is_built` compares them.

    Raises:
        RedraftError: `path` exists and was not written by a maker.
    """
    path = Path(path)
    if path.exists() and any(path.iterdir()) and not (path / RECORD).exists():
        raise RedraftError(
            "target folder holds other files",
            where=str(path),
            why=f"it has no {RECORD}, so this tool did not write it",
            mend="choose another target.path, or empty the folder",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(path.parent)
    tmp = temporary(path)
    tmp.mkdir()
    try:
        yield tmp
        record = {"key": sha256_json(recipe), "recipe": recipe}
        (tmp / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        _fsync_tree(tmp)
        if path.exists():
            shutil.rmtree(path)
        os.rename(tmp, path)
        sync(path.parent)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def is_built(path: Path, recipe: dict[str, Any]) -> bool:
    """True when `path` was finished by a maker with this very recipe."""
    try:
        record = json.loads((Path(path) / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("key") == sha256_json(recipe)
