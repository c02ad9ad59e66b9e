"""Start a server as a child process, wait until it answers, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from eagle3.errors import RedraftError
from eagle3.redact import hidden_words
from eval.engines.watchdog import CHILD_ENV

WATCHDOG = Path(__file__).with_name("watchdog.py")
GRACE_S = 15.0  # between asking a server to end and killing it
POLL_S = 0.3
TAIL_BYTES = 64 * 1024
_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\]\s*)?(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b.*")
_LOUD_LINE = re.compile(r"\b(?:error|fatal|killed|out of memory|cannot|failed|abort(?:ed)?)\b", re.IGNORECASE)


class ServerProcess:
    """A started server: its address, its log, and whether it still runs."""

    def __init__(self, name: str, url: str, log: Path, popen: subprocess.Popen[bytes]) -> None:
        self.name, self.url, self.log = name, url, log
        self._popen = popen

    @property
    def pid(self) -> int:
        """Process id of the watchdog that holds the server."""
        return self._popen.pid

    def died(self) -> str:
        """Empty while the server runs; else one clause: exit code and the last error in its log."""
        code = self._popen.poll()
        return "" if code is None else f"it ended with code {code}; {last_words(self.log)}"

    def wait_ready(self, path: str, timeout_s: float) -> None:
        """Return once `GET path` answers 200.

        Raises:
            RedraftError: the server ended, or did not answer in time; the line holds the last error of its log.
        """
        deadline = time.monotonic() + timeout_s
        with httpx.Client(base_url=self.url, timeout=10.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                if gone := self.died():
                    raise self._failure("the server did not start", gone)
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(path).status_code == 200:
                        return
                time.sleep(POLL_S)
        raise self._failure("the server did not become ready", f"no answer in {timeout_s:g} s; {last_words(self.log)}")

    def _failure(self, what: str, why: str) -> RedraftError:
        return RedraftError(what, where=self.name, why=why, mend=f"read {self.log}, then eval.server in the config")

    def stop(self) -> None:
        """End the server and everything it started; returns when they are gone."""
        self._popen.terminate()
        try:
            self._popen.wait(GRACE_S + 15.0)
        except subprocess.TimeoutExpired:
            self._popen.kill()  # takes the server along, by its parent-death signal
            self._popen.wait()


@contextlib.contextmanager
def server_process(
    name: str, command: Sequence[str], url: str, log: Path, env: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Run `command` until the block is left, in whatever way: also on an exception, on Ctrl-C and on `kill -9` of us.

    Args:
        name: of the server, for error lines.
        command: program and arguments.
        url: where it will listen.
        log: receives its output; replaced if it exists.
        env: added to this process's environment, for the command.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    guard = [sys.executable, str(WATCHDOG), str(os.getpid()), str(GRACE_S), *command]
    with open(log, "wb") as sink:
        sink.write((" ".join(hidden_words(command)) + "\n").encode())
        sink.flush()
        popen = subprocess.Popen(
            guard,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, CHILD_ENV: json.dumps(dict(env or {}))},
            start_new_session=True,
        )
    server = ServerProcess(name, url, log, popen)
    try:
        yield server
    finally:
        server.stop()


def free_port(host: str) -> int:
    """A port that nothing listens on at this moment.

    Raises:
        RedraftError: `host` is no address of this machine.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])
    except OSError as err:
        raise RedraftError(
            "cannot listen", where=f"eval.server.host={host}", why=str(err), mend="use an address of this machine"
        ) from None


def last_words(log: Path) -> str:
    """The last error lines of a log, for one sentence: exception lines first, else loud ones, else the last line."""
    try:
        with open(log, "rb") as handle:
            handle.readline()  # the command itself
            handle.seek(max(handle.tell(), log.stat().st_size - TAIL_BYTES))
            lines = handle.read().decode(errors="replace").splitlines()
    except OSError as err:
        return f"no log ({err.strerror})"
    lines = [line.strip() for line in lines if line.strip()][-400:]
    if not lines:
        return "its log is empty"
    errors = [line for line in lines if _ERROR_LINE.match(line)] or [line for line in lines if _LOUD_LINE.search(line)]
    chosen = list(dict.fromkeys(errors or lines))[-2:]
    return "its log says: " + " | ".join(line[:300] for line in chosen)
