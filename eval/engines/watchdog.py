"""Run a command so that nothing of it outlives the process that asked for it.

`python watchdog.py OWNER_PID GRACE_S COMMAND...` starts the command and stands between it and its owner. It ends the
command and everything the command started when it is told to (SIGTERM) and when the owner is gone, even by `kill -9`,
which no handler in the owner could answer. It is a script of its own, and started in its own session, so that a
Ctrl-C at the terminal reaches the owner alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S = 0.25
SHORT_GRACE_S = 2.0  # for what a command that ended by itself left running
CHILD_ENV = "REDRAFT_SERVER_ENV"  # JSON object: variables for the command that must not touch this interpreter


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none slips away (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Be killed when the parent is (Linux): the last resort for the command, should the watchdog itself be killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _descendants() -> Iterator[psutil.Process]:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_all(grace_s: float) -> None:
    """Ask every descendant to end; after `grace_s`, kill what is left."""
    asked: set[int] = set()
    deadline = time.monotonic() + grace_s
    while left := list(_descendants()):
        late = time.monotonic() > deadline
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                if late:
                    process.kill()
                elif process.pid not in asked:
                    asked.add(process.pid)
                    process.terminate()
        time.sleep(0.05)
        _reap()


def main(argv: list[str]) -> int:
    """The command's exit code (128 + signal when a signal ended it); its descendants are gone when this returns."""
    owner, grace_s, command = int(argv[0]), float(argv[1]), argv[2:]
    added = json.loads(os.environ.pop(CHILD_ENV, "{}"))
    told = False

    def on_term(_signal: int, _frame: object) -> None:
        nonlocal told
        told = True

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent, env={**os.environ, **added}
        )
    except OSError as err:
        print(f"cannot start {command[0]}: {err.strerror}", flush=True)
        return 127
    while not told and os.getppid() == owner and child.poll() is None:
        time.sleep(POLL_S)
    code = child.poll()
    end_all(grace_s if code is None else min(grace_s, SHORT_GRACE_S))
    return 128 - code if code is not None and code < 0 else code or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
