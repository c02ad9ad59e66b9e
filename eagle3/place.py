"""A folder on this machine or on any file system that fsspec knows, and files written there whole or not at all.

A `Place` is a `pathlib.Path` for local folders (read by position, renamed, locked) and a `UPath` for the rest, where
a file is put as one object and read by byte ranges. Credentials come from the environment or the tools' own files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from upath import UPath

from eagle3.atomic import replacing, sync
from eagle3.errors import RedraftError
from eagle3.leftovers import temporary

Place: TypeAlias = Path | UPath


def store_place(text: str | Place) -> Place:
    """The place that `text` names: a local path, `file://`, or another fsspec URL such as `s3://bucket/folder`.

    Raises:
        RedraftError: the URL carries a user and password, or no installed package knows its protocol.
    """
    if isinstance(text, Path | UPath):
        return text
    if "://" not in text:
        return Path(text)
    refuse_password(text)
    try:
        parts = urlsplit(text)
        if parts.scheme in ("file", "local"):
            return Path(parts.path)
        place = UPath(text)
        place.fs  # noqa: B018  makes the file system, which needs its package
    except (ImportError, ValueError) as err:
        mend = "install the package that fsspec names, or give a local path"
        raise RedraftError("no file system for this path", where=text, why=str(err), mend=mend) from None
    return place


def refuse_password(text: str) -> None:
    """Refuse a URL that carries a password, which would end up in configurations, manifests and logs.

    Raises:
        RedraftError: without showing it.
    """
    address = text.partition("://")[2].partition("/")[0]
    user, at, host = address.rpartition("@")
    if at and ":" in user:
        where = f"{text.partition('://')[0]}://...@{host}"
        mend = "leave it out: credentials are taken from the environment or the file system's own settings"
        raise RedraftError("a path must not carry a password", where=where, mend=mend)


def create(path: Place, text: str) -> bool:
    """Create `path` with `text` (UTF-8), unless it exists; False when another was first.

    Local and shared POSIX file systems: a complete file is hard-linked to the name, which fails when the name is
    taken; where there are no hard links, the file is opened exclusively. Elsewhere fsspec's `create` mode is asked
    for, which is exclusive in one request where the file system has it (S3 `If-None-Match`, GCS generations) and a
    check before the write where it has not.
    """
    if isinstance(path, Path):
        return _create_local(path, text.encode())
    if exists(path):
        return False
    try:
        path.fs.pipe_file(path.path, text.encode(), mode="create")
    except FileExistsError:
        return False
    return True


def _create_local(path: Path, content: bytes) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = temporary(path)
    try:
        _write_synced(tmp, "wb", content)
        try:
            os.link(tmp, path)
        except FileExistsError:
            return os.stat(tmp).st_nlink > 1  # NFS: the link was made, its first answer was lost
        except OSError:  # a file system without hard links
            try:
                _write_synced(path, "xb", content)
            except FileExistsError:
                return False
        sync(path.parent)
        return True
    finally:
        tmp.unlink(missing_ok=True)


def _write_synced(path: Path, mode: str, content: bytes) -> None:
    with open(path, mode) as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())


@contextlib.contextmanager
def writing(path: Place) -> Iterator[Path]:
    """Yield a local temporary file; on success it becomes `path`, whole: renamed locally, put as one object elsewhere.

    On an exception nothing is left behind.
    """
    if isinstance(path, Path):
        with replacing(path) as tmp:
            yield tmp
        return
    with tempfile.TemporaryDirectory(prefix="redraft-") as folder:
        tmp = Path(folder) / path.name
        yield tmp
        path.parent.mkdir(parents=True, exist_ok=True)  # nothing to do where there are no folders
        path.fs.put_file(str(tmp), path.path)


def list_files(folder: Place, pattern: str) -> list[Place]:
    """The files directly in `folder` that match a glob `pattern`, by name; asked anew, past any cached listing."""
    if not isinstance(folder, Path):
        folder.fs.invalidate_cache()
    return sorted(folder.glob(pattern), key=lambda path: path.name)


def exists(path: Place) -> bool:
    """Whether there is such a file now, past any cached listing."""
    if not isinstance(path, Path):
        path.fs.invalidate_cache()
    return path.exists()


def sha256(path: Place) -> str:
    """Hex SHA-256 of a (small) file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def remove(path: Place) -> None:
    """Remove a file, if it is there."""
    path.unlink(missing_ok=True)


def modified(path: Place) -> float:
    """When a file was written last, in seconds since the epoch; now, where the file system does not tell."""
    if isinstance(path, Path):
        return path.stat().st_mtime
    try:
        return float(path.fs.modified(path.path).timestamp())
    except NotImplementedError:
        return time.time()
