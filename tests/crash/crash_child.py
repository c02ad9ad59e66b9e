"""The front door in a child process that a fork server starts quickly, and that dies at a named moment if told to.

Two things are replaced, for they take seconds (`quick=False` leaves them, too): Hydra's composition of the command
line, and the start of training's workers, which are forked from the child instead of started as fresh Pythons.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import runpy
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf

PROGRAM = Path(__file__).resolve().parents[2] / "train" / "run.py"

# Calls around which a stage may be killed, as "module.function"; what lies between two of them is met by kills at a
# random time. `torn` moments cut the file that the call has just written or flushed, as a kill within a write does.
POINTS = (
    "os.fsync", "os.replace", "os.rename", "os.link", "os.unlink", "os.rmdir", "os.mkdir", "torch.save",
    "safetensors.torch.serialize_file", "fcntl.flock",
)  # fmt: skip
WRITES = ("os.fsync", "torch.save", "safetensors.torch.serialize_file")

_real: dict[str, Callable[..., Any]] = {}  # what is behind the watched ones


@dataclass(frozen=True)
class Moment:
    """A named moment: call number `number` (from 0, over all of `POINTS`) of one of a stage's processes.

    Args:
        process: "main", or "rank0", "rank1", ... of training's workers.
        number: which call; a process that makes fewer ends by itself.
        name: what that call was in the uninterrupted run, for the table.
        how: "before" the call, "after" it, or "torn": after it, its file cut short.
    """

    process: str
    number: int
    name: str
    how: str


@dataclass(frozen=True)
class Orders:
    """What a child is told.

    Args:
        root: its working folder.
        words: of the command line.
        said: file that its output goes to.
        moment: when to die, if at a named moment.
        gone: folder that goes away at `moment` instead, under the name `<gone>.gone`.
        calls: file that every call of `POINTS` is noted in, if wanted.
        quick: compose without Hydra, and fork training's workers.
        user: user id to run as; 0 = whoever starts it.
        file_limit: bytes that a file may have at most, as on a full disk; 0 = no limit.
        process: this process's name in moments.
    """

    root: Path
    words: list[str]
    said: Path
    moment: Moment | None = None
    gone: Path | None = None
    calls: Path | None = None
    quick: bool = True
    user: int = 0
    file_limit: int = 0
    process: str = "main"


def child(orders: Orders, begun: Connection) -> None:
    """Run the front door as leader of a process group of its own; the exit code is the program's."""
    os.setsid()
    os.chdir(orders.root)
    log = os.open(orders.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ["COLUMNS"] = "300"
    import torch

    torch.set_num_threads(1)
    if orders.quick:
        _fork_workers(orders)
    if orders.file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (orders.file_limit, orders.file_limit))
    if orders.user:
        os.setgroups([])
        os.setuid(orders.user)
    arm(orders)
    begun.send_bytes(b"begun")
    begun.close()
    sys.argv = [str(PROGRAM), "--config-path", str(orders.root), "--config-name", "config", *orders.words]
    if orders.quick:
        sys.exit(_cli(orders))
    runpy.run_path(str(PROGRAM), run_name="__main__")


def _cli(orders: Orders) -> int:
    """The program's own entry, given a configuration that is merged here."""
    import train.run as program

    def compose() -> None:
        loaded: Any = OmegaConf.load(orders.root / "config.yaml")
        for key in ("defaults", "hydra"):
            del loaded[key]
        words = OmegaConf.from_dotlist([word.removeprefix("++") for word in orders.words])
        stage(OmegaConf.merge(loaded, words))

    stage = program.compose_and_run.__wrapped__  # type: ignore[attr-defined]  without Hydra's decorator
    program.compose_and_run, program.apply_sweep = compose, lambda _config: None
    return program.cli()


def arm(orders: Orders) -> None:
    """Put a watch on every call of `POINTS` in this process."""
    if orders.moment is None and orders.calls is None:
        return
    log = os.open(orders.calls, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if orders.calls else None
    count = itertools.count()
    mine = orders.moment if orders.moment and orders.moment.process == orders.process else None
    act = partial(_go_away, orders.gone) if orders.gone else die
    for name in POINTS:
        module, _, function = name.rpartition(".")
        holder = sys.modules.get(module) or __import__(module, fromlist=["_"])
        real = _real.setdefault(name, getattr(holder, function))  # a forked worker has the watched ones
        setattr(holder, function, _watched(name, real, count, mine, act, log, orders.process))


def _watched(
    name: str,
    real: Callable[..., Any],
    count: Any,
    moment: Moment | None,
    act: Callable[[], None],
    log: int | None,
    process: str,
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        number = next(count)
        if log is not None:
            os.write(log, f"{process} {name}\n".encode())
        due = moment is not None and number >= moment.number
        if due and moment is not None and moment.how == "before":
            act()
        result = real(*args, **kwargs)
        if due and moment is not None:
            if moment.how == "torn" and name in WRITES:
                tear(name, args)
            act()
        return result

    return call


def _go_away(folder: Path) -> None:
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}.gone"))


def die() -> None:
    """Kill the whole process group."""
    os.killpg(0, signal.SIGKILL)


def tear(name: str, args: tuple[Any, ...]) -> None:
    """Cut the file that the call wrote: one that nobody reads yet in half, of others the last few bytes."""
    place = {"os.fsync": 0, "torch.save": 1, "safetensors.torch.serialize_file": 1}[name]
    path = os.readlink(f"/proc/self/fd/{args[0]}") if name == "os.fsync" else str(args[place])
    with contextlib.suppress(OSError):
        found = os.stat(path)
        if stat.S_ISREG(found.st_mode):
            whole = name == "os.fsync" and ".tmp" not in path
            os.truncate(path, max(found.st_size - 5, 0) if whole else found.st_size // 2)


# ------------------------------------------------------------------------------------------------- training's workers


class ForkedWorker:
    """Stands in for `subprocess.Popen` of a training worker: the same arguments, environment, pipe and exit code."""

    orders: Orders
    ends: list[int] = []  # noqa: RUF012  the pipes' ends that fresh Pythons would not inherit

    def __init__(self, command: list[str], env: dict[str, str], stdin: int) -> None:
        assert command[1:3] == ["-m", "train.worker"] and stdin == subprocess.PIPE
        reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os._exit(self._work(command[3:], env, reading, writing))
        os.close(reading)
        self.ends.append(writing)
        self.stdin = os.fdopen(writing, "wb")
        self.code: int | None = None

    def _work(self, words: list[str], env: dict[str, str], reading: int, writing: int) -> int:
        code = 1
        try:
            os.dup2(reading, 0)
            for end in [reading, writing, *self.ends, *_locks()]:
                with contextlib.suppress(OSError):
                    os.close(end)
            os.environ.clear()
            os.environ.update(env)
            arm(replace(self.orders, process=f"rank{env['RANK']}"))
            from train.worker import main

            code = main(words)
        except SystemExit as err:
            code = int(err.code or 0)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        return code

    def poll(self) -> int | None:
        """The exit code, or None."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for the end."""
        for _ in range(int(timeout / 0.01)):
            if (code := self.poll()) is not None:
                return code
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("worker", timeout)

    def kill(self) -> None:
        """Kill it."""
        os.kill(self.pid, signal.SIGKILL)


def _locks() -> list[int]:
    """Open lock files: a fresh Python would not have them."""
    held = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").endswith(".lock"):
                held.append(int(name))
    return held


def _fork_workers(orders: Orders) -> None:
    import train.launch

    ForkedWorker.orders = orders
    stand_in = SimpleNamespace(Popen=ForkedWorker, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    train.launch.subprocess = stand_in  # type: ignore[assignment]
