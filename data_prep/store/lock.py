"""A lock that dies with its owner: the kernel drops it when the process ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class LockHeldError(Exception):
    """Another process (or another handle in this one) holds the lock."""


class FileLock:
    """An exclusive `flock` on `path`, taken at once or refused.

    Where the file system has no locks, nothing is refused, as in `train.front.pipeline.locked`.

    Raises:
        LockHeldError: it is held elsewhere.
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            if err.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(self._fd)
                raise LockHeldError(str(path)) from None

    def release(self) -> None:
        """Give the lock up; more than once does no harm."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def waiting_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` for the block, waiting for it; for short critical sections."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
