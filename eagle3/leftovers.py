"""Half-written files and folders of killed processes: named after their writer, and removed once it is dead.

`.<name>.<machine>-<process>-<random>.tmp` is on its way to becoming `<name>`; the same ending in `.old` was `<name>`
until a moment ago, and is put back where nothing has taken its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
import uuid
from pathlib import Path

AGE = 24 * 3600.0  # seconds; a living writer's file is written to all the time
_NAME = re.compile(
    r"\.(?P<name>.+)\.(?:(?P<machine>[0-9a-f]{8})-(?P<process>\d+)-[0-9a-f]{8}"
    r"|\d+-[0-9a-f]{8}|[0-9a-f]{16}|\d+)\.(?P<kind>tmp|old)"  # as earlier versions wrote: of unknown machines
)


def kernel() -> str:
    """What makes process ids comparable: the kernel's boot id and the process namespace; "" when it is not told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_ticks(pid: int) -> int:
    """When a process started, from the kernel's table; -1 when there is no such process, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return -1
    return -1 if fields[0] in ("Z", "X") else int(fields[19])


def temporary(path: Path, kind: str = "tmp") -> Path:
    """A name beside `path` for what is to take its place (`tmp`), or makes room for that (`old`)."""
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.{kind}")


def _machine() -> str:
    return hashlib.sha256(kernel().encode()).hexdigest()[:8]


def clear_leftovers(folder: Path, *, alone: bool = False, deep: bool = False) -> None:
    """Remove what dead writers left in `folder`; put back what one had moved aside.

    Safe beside living writers: only what was written on this machine by a process that has ended, or is a day old,
    counts as left. Where nothing can be removed (a folder that is only read) it stays.

    Args:
        folder: that may be absent.
        alone: nobody else writes here now, so whatever stands there was left.
        deep: look into the folders below, too.
    """
    for path in sorted(folder.rglob(".*") if deep else folder.glob(".*")):
        match = _NAME.fullmatch(path.name)
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours to remove
            if match and (alone or _dead(match) or time.time() - path.stat().st_mtime > AGE):
                _clear(path, path.with_name(match["name"]), match["kind"])


def _clear(path: Path, target: Path, kind: str) -> None:
    if kind == "old" and not target.exists():
        os.replace(path, target)
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _dead(match: re.Match[str]) -> bool:
    """Whether the writer ran on this machine and has ended."""
    return bool(kernel()) and match["machine"] == _machine() and start_ticks(int(match["process"])) < 0
