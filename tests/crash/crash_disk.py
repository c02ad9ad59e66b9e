"""Disks that are full or read-only, where the system lets a test have them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = 4096
SPARE = 64 * PAGE  # of the file system's own, when there shall be room


@contextlib.contextmanager
def small_disk(folder: Path, size: int = 64 << 20) -> Iterator[Path]:
    """A tmpfs at `folder`; the test is skipped, with the reason, where the system lets nobody mount one."""
    folder.mkdir()
    mounted = _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    if mounted:
        pytest.skip(f"no tmpfs can be mounted here: {mounted}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def _mount(*words: str) -> str:
    """Mount; "" or why not."""
    try:
        done = subprocess.run(["mount", *words], capture_output=True, text=True, timeout=60)
    except OSError as err:
        return str(err)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


@contextlib.contextmanager
def nearly_full(disk: Path, free: int) -> Iterator[None]:
    """A file takes all but `free` bytes of the disk for the block."""
    filler = disk / "filler"
    with open(filler, "wb") as handle:
        os.posix_fallocate(handle.fileno(), 0, max(PAGE, shutil.disk_usage(disk).free - free))
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Nothing on the tmpfs `disk` can be written for the block."""
    assert not _mount("-o", "remount,ro", str(disk))
    try:
        yield
    finally:
        assert not _mount("-o", "remount,rw", str(disk))


def size_of(root: Path) -> int:
    """Bytes that the files below `root` take, in pages."""
    return sum(-(-path.stat().st_size // PAGE) * PAGE for path in root.rglob("*") if path.is_file())


def largest_file(root: Path, other: Path) -> int:
    """Bytes of the largest file below `root` that is not below `other`."""
    here = {path.relative_to(root): path.stat().st_size for path in root.rglob("*") if path.is_file()}
    return max(size for name, size in here.items() if not (other / name).exists())
