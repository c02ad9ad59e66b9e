"""Apply, verify and revert the embedding patch of an SGLang tree.

Beside each changed file stands its original, `<file>.redraft-orig`, and in the package folder the record
`redraft-patch.json` with the SHA-256 of each file before and after. Both are written before the first file is changed,
so an interrupted apply can be finished or reverted.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.atomic import read_json, replacing, sha256_file, write_json
from eagle3.errors import IntegrityError, RedraftError
from eagle3.sglang_tree.parts import Part, read_model
from eagle3.sglang_tree.plan import models_of, plan_patch
from eagle3.sglang_tree.tree import SglangTree
from eagle3.sglang_tree.verdict import UNKNOWN, WHOLE, TreeVerdict, judge

RECORD = "redraft-patch.json"
BACKUP = ".redraft-orig"
PATCHED_FILES = ("srt/models/deepseek_v2.py", "srt/models/kimi_k25.py")
_AGAIN = "install this SGLang again"


@dataclass(frozen=True)
class Finding:
    """One model's state in a tree."""

    model_type: str
    verdict: TreeVerdict
    parts: tuple[Part, ...]

    @property
    def of_the_patch(self) -> bool:
        """True when this model's code is what the patch changes."""
        return self.verdict.file in PATCHED_FILES


def findings(tree: SglangTree, model_types: list[str] | None = None) -> list[Finding]:
    """The state of the models that the patch is about, or of those named.

    Raises:
        RedraftError: a named model is not in the tree.
    """
    out = []
    for model_type in model_types or models_of(tree):
        model = read_model(tree, model_type)
        out.append(Finding(model_type, judge(tree.version, model, model_type), model.parts))
    if not out:
        raise RedraftError("no model that the patch is about", where=str(tree.root), mend="name one with --model-type")
    return out


def state_of(found: list[Finding]) -> str:
    """`whole`, `none`, `half` or `unknown` for the tree: whole only when every model is."""
    states = {one.verdict.patch for one in found}
    if UNKNOWN in states:
        return UNKNOWN
    return states.pop() if len(states) == 1 else "half"


def apply(tree: SglangTree) -> list[str]:
    """Patch the tree; returns what was changed, empty when it was whole already.

    Raises:
        RedraftError: unknown code, a patch by half, or a file that cannot be written; nothing is changed then, except
            that a full disk can leave an apply unfinished, which `revert` undoes and another `apply` finishes.
    """
    tree, record = _before(tree)
    plan = plan_patch(tree)
    files = {**tree.overlay, **plan.files}
    targets = {name: tree.root / name for name in files}
    for path in targets.values():
        if path.is_symlink():
            raise RedraftError("a file to patch is a link", where=str(path), mend="give the tree that it points into")
    if not files:
        return []
    try:
        for name, path in targets.items():
            if name not in record["files"]:
                _keep(path)
            original = sha256_file(_backup(path))
            record["files"][name] = {"original": original, "patched": hashlib.sha256(files[name]).hexdigest()}
        write_json(tree.root / RECORD, record)
        for name, path in targets.items():
            _write(path, files[name])
    except OSError as err:
        raise _unwritable(tree, err, "apply") from None
    return plan.changes


def revert(tree: SglangTree) -> list[str]:
    """Put every original back, byte for byte; returns the files restored.

    Raises:
        RedraftError: nothing was applied by this tool, or a file was changed since; nothing is changed then.
    """
    record = _read_record(tree)
    names = sorted(record["files"])
    for name in names:
        _check_untouched(tree.root / name, record["files"][name])
    try:
        for name in names:
            path = tree.root / name
            _write(path, _backup(path).read_bytes())
        (tree.root / RECORD).unlink()
        for name in names:
            _backup(tree.root / name).unlink()
    except OSError as err:
        raise _unwritable(tree, err, "revert") from None
    return names


def record_state(tree: SglangTree) -> str:
    """In words, what the record says against what is on disk."""
    if not (tree.root / RECORD).is_file():
        return "no record: not applied by this tool"
    record = _read_record(tree)
    for name, sums in sorted(record["files"].items()):
        try:
            found = _check_untouched(tree.root / name, sums)
        except RedraftError as err:
            return f"applied by this tool, but {err}"
        if found != sums["patched"]:
            return f"applying was interrupted: {name} is still the original; apply again, or revert"
    return f"applied by this tool to {len(record['files'])} files, unchanged since; revert restores them"


def _before(tree: SglangTree) -> tuple[SglangTree, dict[str, Any]]:
    """The tree to patch, and the record to add to.

    After an interrupted apply that is the tree with its originals overlaid. A record none of whose files is patched
    any more (SGLang was installed over it) is void.
    """
    fresh = {"version": tree.version, "files": {}}
    if not (tree.root / RECORD).is_file():
        return tree, fresh
    record = _read_record(tree)
    sums = record["files"]
    done = [name for name in sums if _sum(tree.root / name) == sums[name]["patched"]]
    if not done:
        return tree, fresh
    for name in sums:
        _check_untouched(tree.root / name, sums[name])
    if len(done) == len(sums):
        return tree, record
    return tree.with_overlay({name: _backup(tree.root / name).read_bytes() for name in sums}), record


def _sum(path: Path) -> str:
    return sha256_file(path) if path.is_file() else ""


def _check_untouched(path: Path, sums: dict[str, str]) -> str:
    """The file's checksum, when it is the original or the patched one and the backup is the original."""
    backup = _backup(path)
    if not path.is_file() or not backup.is_file():
        lost = path if not path.is_file() else backup
        raise IntegrityError("a file of the patch is gone", where=str(lost), mend=_AGAIN)
    if sha256_file(backup) != sums["original"]:
        raise IntegrityError("the kept original was changed", where=str(backup), mend=_AGAIN)
    found = sha256_file(path)
    if found not in (sums["patched"], sums["original"]):
        raise IntegrityError(
            "a patched file was changed since",
            where=str(path),
            why="restoring the original would lose that change",
            mend=f"undo the change, or {_AGAIN}",
        )
    return found


def _read_record(tree: SglangTree) -> dict[str, Any]:
    path = tree.root / RECORD
    if not path.is_file():
        raise RedraftError(
            "this tree was not patched by this tool", where=str(tree.root), why=f"no {RECORD}", mend=_AGAIN
        )
    record: dict[str, Any] = read_json(path, _AGAIN)
    sums = record.get("files") if isinstance(record, dict) else None
    if not isinstance(sums, dict) or not all({"original", "patched"} <= set(one) for one in sums.values()):
        raise IntegrityError("the patch's record is not whole", where=str(path), mend=_AGAIN)
    return record


def _unwritable(tree: SglangTree, err: OSError, what: str) -> RedraftError:
    mend = f"check rights and space, and {what} again"
    return RedraftError("cannot write to this tree", where=str(tree.root), why=str(err), mend=mend)


def _backup(path: Path) -> Path:
    return path.with_name(path.name + BACKUP)


def _keep(path: Path) -> None:
    """Write the backup; one left by an older release is replaced."""
    with replacing(_backup(path)) as tmp:
        shutil.copy2(path, tmp)


def _write(path: Path, content: bytes) -> None:
    """Replace a file's content atomically, with the mode it had."""
    with replacing(path) as tmp:
        tmp.write_bytes(content)
        shutil.copymode(path, tmp)


__all__ = ["WHOLE", "Finding", "apply", "findings", "record_state", "revert", "state_of"]
