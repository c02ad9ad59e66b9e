"""The worker process that runs SGLang: started, spoken to in lines, and never left behind.

Lines of JSON go out on its stdin and come back on a pipe; states come back in anonymous files in memory, which the
kernel frees with the processes: two, so that one is read while the other is written. A worker that dies, hangs or fails
becomes one line with the end of its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from eagle3.errors import RedraftError

TAIL_LINES, TAIL_CHARS = 3, 400
SLOTS = 2  # batches whose states can lie in memory: one being read, one being written


class WorkerProcess:
    """One worker and the pipes to it.

    Args:
        command: the program; parent's id, reply file and the two states files are appended as numbers.
        env: variables added to this process's.
        log: file that takes the worker's stdout and stderr.

    Raises:
        RedraftError: the program cannot be started.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._states = [os.memfd_create(f"states{slot}") for slot in range(SLOTS)]
        self._replies, theirs = os.pipe()
        self._unread = b""
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(log, "wb") as sink:
                self._process = subprocess.Popen(
                    [*command, *map(str, (os.getpid(), theirs, *self._states))],
                    stdin=subprocess.PIPE,
                    stdout=sink,
                    stderr=sink,
                    env={**os.environ, **env},
                    pass_fds=(theirs, *self._states),
                    start_new_session=True,  # its ranks are in its group, and end with it
                )
        except OSError as err:
            for fd in (self._replies, *self._states):
                os.close(fd)
            raise RedraftError(
                "cannot start the SGLang worker",
                where="capture.sglang.python",
                why=f"{command[0]}: {err.strerror}",
                mend="name the Python interpreter of the environment that has SGLang",
            ) from None
        finally:
            os.close(theirs)

    @property
    def pid(self) -> int:
        """Process id of the worker, which is its group's too."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message. A worker that is gone is reported by the next `receive`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, event: str, timeout_s: float, during: str) -> dict[str, Any]:
        """Wait for the next message.

        Args:
            event: the kind expected.
            timeout_s: seconds to wait at most.
            during: what the worker is doing, for the error ("loading the target").

        Raises:
            RedraftError: the worker failed, died, said something else or was silent for too long; it is ended.
        """
        line = self._line(time.monotonic() + timeout_s)
        if line is None:
            self.kill()
            raise self._error(
                f"the SGLang worker was silent for {timeout_s:.0f} s while {during}",
                "",
                "raise capture.sglang.timeout_s (or start_timeout_s) if the target is that slow",
            )
        if not line:
            code = self._end()
            cause = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            mend = "read its log; a kill by signal 9 is often the system's lack of memory"
            raise self._error(f"the SGLang worker died while {during}", cause, mend)
        message = self._parse(line, during)
        if message.get("event") == "error":
            self._end()
            raise self._failure(message, during)
        if message.get("event") != event:
            self.kill()
            raise self._error(f"the SGLang worker gave an unexpected answer while {during}", line[:80].decode(), "")
        return message

    def states(self, slot: int) -> dict[str, torch.Tensor]:
        """The tensors in a slot; they lie in the shared memory that the next batch of this slot is written to.

        Raises:
            RedraftError: the worker wrote something else.
        """
        try:
            return load_file(f"/proc/self/fd/{self._states[slot]}")
        except (OSError, SafetensorError) as err:
            raise self._error("the SGLang worker's states are not readable", str(err), "") from None

    def close(self) -> None:
        """Let the worker end by itself, or end it after a few seconds; frees the states."""
        self._end()
        for fd in (self._replies, *self._states):
            with contextlib.suppress(OSError):
                os.close(fd)

    def kill(self) -> None:
        """End the worker and its ranks now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _end(self) -> int:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        code = self._process.poll()
        self.kill()  # whatever is left of its group
        return self._process.returncode if code is None else code

    def _line(self, deadline: float) -> bytes | None:
        """The next line, empty when the worker closed its end, None when the time is up."""
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            part = os.read(self._replies, 1 << 16)
            if not part:
                return b""
            self._unread += part
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _parse(self, line: bytes, during: str) -> dict[str, Any]:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            self.kill()
            raise self._error(f"the SGLang worker gave an unexpected answer while {during}", repr(line[:80]), "")
        return message

    def _failure(self, message: dict[str, Any], during: str) -> RedraftError:
        why = str(message.get("why", ""))[:TAIL_CHARS]
        if message.get("kind") == "memory":
            return RedraftError(
                f"SGLang ran out of memory while {during}",
                where=str(self.log),
                why=why,
                mend="lower capture.batch_tokens or capture.sglang.mem_fraction, or raise capture.sglang.tp",
            )
        if message.get("kind") == "rank":
            return self._error(f"a rank of the SGLang worker died while {during}", why, "read its log")
        return RedraftError(f"SGLang failed while {during}", where=str(self.log), why=why, mend="read its log")

    def _error(self, what: str, why: str, mend: str) -> RedraftError:
        tail = log_tail(self.log)
        why = "; ".join(part for part in (why, f"its log ends: {tail}" if tail else "") if part)
        return RedraftError(what, where=str(self.log), why=why, mend=mend)


def log_tail(log: Path) -> str:
    """The last lines of a log that say something, from the last error on where there is one."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    errors = [line for line in lines if re.match(r"(\[[^]]*\] )?[\w.]*(Error|Exception)\b", line)]
    chosen = errors[-1:] or lines[-TAIL_LINES:]
    return " | ".join(chosen)[-TAIL_CHARS:]
