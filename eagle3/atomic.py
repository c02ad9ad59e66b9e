"""Write files so that a reader sees the old content or the new, never a half."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from upath import UPath

from eagle3.errors import IntegrityError
from eagle3.leftovers import temporary


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries and with them a rename, so that it survives a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def put(written: Path, path: Path) -> None:
    """Let a flushed file take the name `path`, on the disk when this returns."""
    os.replace(written, path)
    sync(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; on success fsync it and rename it over `path`.

    On an exception the temporary file is removed and `path` is left as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = temporary(path)
    try:
        yield tmp
        sync(tmp)
        put(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def write_text(path: Path | UPath, text: str) -> None:
    """Write `text` (UTF-8) to `path` atomically: renamed over it locally, put as one object elsewhere."""
    if isinstance(path, Path):
        with replacing(path) as tmp:
            tmp.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)  # nothing to do where there are no folders
    path.fs.pipe_file(path.path, text.encode())


def write_json(path: Path | UPath, value: Any) -> None:
    """Write `value` as indented JSON to `path` atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(
    path: Path | UPath,
    mend: str = "delete the file and run the stage that writes it again",
    needs: Sequence[str] = (),
) -> Any:
    """Read a JSON file that holds one object, as all of ours and of a model's folder do.

    Raises:
        IntegrityError: the file is missing, not whole JSON, no object, or lacks a key of `needs`; `mend` ends its line.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise IntegrityError("file not found", where=str(path), mend=mend) from None
    except (ValueError, OSError, RecursionError) as err:
        raise IntegrityError("not a readable JSON file", where=str(path), why=str(err), mend=mend) from None
    if not isinstance(data, dict):
        why = f"it holds a {type(data).__name__}, not an object"
        raise IntegrityError("not a readable JSON file", where=str(path), why=why, mend=mend)
    lacking = [key for key in needs if key not in data]
    if lacking:
        raise IntegrityError("a JSON file lacks a key", where=str(path), why=", ".join(lacking), mend=mend)
    return data


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a JSON-able value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
