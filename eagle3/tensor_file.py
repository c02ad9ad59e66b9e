"""Write a safetensors file atomically, readable for whom other files are, and a full disk told as an `OSError`."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eagle3.atomic import put, sync
from eagle3.leftovers import temporary

_ERRNO = re.compile(r"os error (\d+)")


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write `tensors`, any shapes and dtypes, each contiguous, to `path`: whole or not at all.

    safetensors writes into a file of a random name beside the one it is given, for its writer's eyes only, and leaves
    it behind when killed. So it is given a temporary folder of its own, which `eagle3.leftovers` knows.

    Raises:
        OSError: the disk is full or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    work = temporary(path)
    work.mkdir()
    try:
        file = work / path.name
        try:
            save_file(tensors, file, metadata=metadata)
        except SafetensorError as err:
            raise _system_error(err, path) from err
        file.chmod(0o666 & ~_umask())
        sync(file)
        put(file, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _system_error(err: SafetensorError, path: Path) -> Exception:
    found = _ERRNO.search(str(err))
    return OSError(int(found[1]), os.strerror(int(found[1])), str(path)) if found else err


def _umask() -> int:
    """This process's mask; the kernel tells it without changing it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    except (OSError, StopIteration):
        return 0o022
