"""The coordinator's end of the protocol: a worker process, asked one thing at a time."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
from pathlib import Path
from typing import Any, TextIO

from eagle3.errors import RedraftError

REPOSITORY = Path(__file__).resolve().parents[2]


class SideFailed(RedraftError):
    """A side that could not do what it was asked: its cell says so, the others go on."""


class Worker:
    """One side's process. A context manager: leaving it ends the process.

    Args:
        side: its name, for messages.
        command: program and arguments.
        settings: given to it as `PEERS_SETTINGS`.
        threads: of its operators.
        log: file that takes what it prints.
        limit_s: seconds an answer may take.
    """

    def __init__(
        self, side: str, command: list[str], settings: dict[str, Any], threads: int, log: Path, limit_s: float = 3600
    ) -> None:
        self.side, self.limit_s, self.log = side, limit_s, log
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PEERS_SETTINGS": json.dumps(settings)}
        environment.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        self._output: TextIO = log.open("w")
        # Answers have a pipe of their own: libraries print to stdout.
        read, write = os.pipe()
        environment["PEERS_ANSWERS"] = str(write)
        self._answers: TextIO = os.fdopen(read)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            text=True,
            bufsize=1,
            env=environment,
            cwd=REPOSITORY,
            pass_fds=(write,),
        )
        os.close(write)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            SideFailed: it answered with an error, died, wrote something else, or took too long.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failed(op, self._death()) from None
        line = self._line(op)
        try:
            answer = json.loads(line)
        except ValueError:
            raise self._failed(op, f"not an answer: {line[:80]!r}") from None
        if not answer.pop("ok", False):
            raise self._failed(op, str(answer.get("error", "no reason given")))
        return answer

    def _line(self, op: str) -> str:
        """The next answer; whole lines are written at once, so a readable pipe has one."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            if not selector.select(self.limit_s):
                self._process.kill()
                raise self._failed(op, f"no answer in {self.limit_s:.0f} s")
        line = self._answers.readline()
        if not line:
            raise self._failed(op, self._death())
        return line

    def _death(self) -> str:
        code = self._process.wait(timeout=60)
        if code == -9:
            return "killed, as the kernel does when memory runs out"
        last = [line for line in self.log.read_text().splitlines() if line.strip()]
        return f"ended with {code}: {last[-1][:200] if last else 'it printed nothing'}"

    def _failed(self, op: str, why: str) -> SideFailed:
        return SideFailed(f"{self.side} failed", where=op, why=why)

    def close(self) -> None:
        """End the process: gently, by the end of its input, then not."""
        for stream in (self._process.stdin, self._answers):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
