"""Write files so that a reader sees the old content or the new, never a half."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from upath import UPath

from eagle3.errors import IntegrityError


def fsync_dir(folder: Path) -> None:
    """Flush a folder's entries, so that a rename inside it survives a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; on success fsync it and rename it over `path`.

    On an exception the temporary file is removed and `path` is left as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")  # ids repeat from node to node
    try:
        yield tmp
        fd = os.open(tmp, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(tmp, path)
        fsync_dir(path.parent)
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


def read_json(path: Path | UPath, mend: str = "delete the file and run the stage that writes it again") -> Any:
    """Read a JSON file.

    Raises:
        IntegrityError: the file is missing or not whole JSON; `mend` ends its line.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise IntegrityError("file not found", where=str(path), mend=mend) from None
    except (ValueError, OSError) as err:
        raise IntegrityError("not a readable JSON file", where=str(path), why=str(err), mend=mend) from None


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex SHA-256 of a JSON-able value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
