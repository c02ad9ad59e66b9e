"""Claims on units of work, held as files in a folder that all workers see (a shared POSIX file system will do).

A claim is the file `<unit>.<generation>`, created exclusively: its content names the owner, its modification time is
the owner's heartbeat. The newest generation is the one that counts. A claim whose owner is gone is taken over by
creating the next generation, which only one can; so no worker ever removes another's living claim by mistake. A unit's
claims are removed by the worker that finished it.

Claims only save work. Two workers on one unit do no harm, since a shard is published once (`shard.publish`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from eagle3.leftovers import kernel, start_ticks
from eagle3.place import create

BEATS = 6  # heartbeats within the time after which a claim is stale
MAX_BEAT = 30.0  # seconds
_CLAIM = re.compile(r"(?P<unit>.+)\.(?P<generation>\d+)")
_CLOCK = ".clock-"


@dataclass(frozen=True)
class Owner:
    """A process, so described that another can tell whether it is the same one and whether it lives.

    Args:
        host: the machine's name.
        kernel: boot id and process namespace: process ids can be compared only where these are equal.
        pid: process id there.
        started: when that process started, in the kernel's ticks; tells it from a later one of the same id.
        token: random, one a worker.
        since: when the worker began, in seconds since the epoch by its own clock; for the reader of a message.
    """

    host: str
    kernel: str
    pid: int
    started: int
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    since: float = field(default_factory=time.time)

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        return cls(socket.gethostname(), kernel(), os.getpid(), start_ticks(os.getpid()))

    @classmethod
    def read(cls, text: str) -> Owner | None:
        """Read what a claim holds; None when it is not (yet) readable."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    def surely_dead(self) -> bool:
        """True when this process can see that the owner has ended; False when it lives or nobody here can tell."""
        if not self.kernel or self.kernel != kernel():
            return False
        return start_ticks(self.pid) != self.started

    @property
    def name(self) -> str:
        """`process 4711 on node7`."""
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Held:
    """A claim as another worker sees it: the unit, its owner (None: not readable), seconds since its last heartbeat."""

    unit: str
    owner: Owner | None
    age: float
    alive: bool

    @property
    def words(self) -> str:
        """`u00012 by process 4711 on node7, heard of 3 s ago`."""
        whose = self.owner.name if self.owner else "a worker that gives no name"
        return f"{self.unit} by {whose}, heard of {max(self.age, 0):.0f} s ago"


class Claims:
    """This worker's claims in `folder`; a thread keeps them fresh until they are released.

    Ages are measured on the file server's clock: a file of one's own is touched, and its time is "now". So the clocks
    of the nodes may differ. Where the file system takes times from its clients instead, a difference of clocks makes
    claims look older or younger by as much, which costs time and nothing else.

    Args:
        folder: shared by all workers on this work; made when absent.
        timeout_s: a claim not heard of for so long is stale. Longer than the file system caches attributes (NFS: 60 s).
        on_takeover: called with a unit's name when it was taken over from an owner that surely is dead.
    """

    def __init__(self, folder: Path, timeout_s: float, on_takeover: Callable[[str], None] | None = None) -> None:
        self.folder, self.timeout_s = folder, timeout_s
        self.owner = Owner.here()
        self._on_takeover = on_takeover or (lambda _unit: None)
        self._held: dict[str, Path] = {}  # unit -> the claim's file
        self._guard, self._stop = threading.Lock(), threading.Event()
        self._clock = folder / f"{_CLOCK}{self.owner.token}"
        self._thread = threading.Thread(target=self._keep_fresh, name="claims", daemon=True)
        self._thread.start()

    def take(self, unit: str) -> bool:
        """Claim `unit`, if nobody alive holds it. Whoever gets True looks next whether the unit was finished before."""
        newest = max(self._generations(unit), default=-1)
        dead = False
        if newest >= 0:
            held = self._look(unit, newest)
            if held is not None and held.alive:
                return False
            dead = held is not None and held.owner is not None and held.owner.surely_dead()
        path = self.folder / f"{unit}.{newest + 1}"
        if not create(path, json.dumps(asdict(self.owner)) + "\n"):
            return False
        with self._guard:
            self._held[unit] = path
        if dead:
            self._on_takeover(unit)
        return True

    def release(self, unit: str) -> None:
        """Give `unit` up, with the claims of dead owners before; nothing happens when it is not held."""
        with self._guard:
            path = self._held.pop(unit, None)
        if path is None:
            return
        mine = int(path.name.rpartition(".")[2])
        for generation in sorted(self._generations(unit)):  # the newest last: until then the unit stays claimed
            if generation <= mine:
                (self.folder / f"{unit}.{generation}").unlink(missing_ok=True)

    def others(self) -> list[Held]:
        """The claims that other workers hold, living ones first."""
        newest: dict[str, int] = {}
        for unit, generation in self._all():
            newest[unit] = max(generation, newest.get(unit, -1))
        looked = [self._look(unit, generation) for unit, generation in sorted(newest.items())]
        found = [held for held in looked if held and not (held.owner and held.owner.token == self.owner.token)]
        return sorted(found, key=lambda held: not held.alive)

    def close(self) -> None:
        """Release everything and end the heartbeat."""
        self._stop.set()
        self._thread.join()
        for unit in list(self._held):
            self.release(unit)
        self._clock.unlink(missing_ok=True)

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(self) -> Iterator[tuple[str, int]]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return
        for name in names:
            match = None if name.startswith(".") else _CLAIM.fullmatch(name)
            if match:
                yield match["unit"], int(match["generation"])

    def _generations(self, unit: str) -> list[int]:
        return [generation for name, generation in self._all() if name == unit]

    def _look(self, unit: str, generation: int) -> Held | None:
        """The claim as it is now; None when it was released meanwhile."""
        try:
            with open(self.folder / f"{unit}.{generation}", encoding="utf-8") as handle:  # opened: NFS asks its server
                owner, beat = Owner.read(handle.read()), os.fstat(handle.fileno()).st_mtime
        except FileNotFoundError:
            return None
        age = self._now() - beat
        alive = age <= self.timeout_s and not (owner is not None and owner.surely_dead())
        return Held(unit, owner, age, alive)

    def _now(self) -> float:
        """The file server's clock, in seconds since the epoch."""
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # the folder was cleared away meanwhile
                self._clock.touch()
                return self._clock.stat().st_mtime

    def _keep_fresh(self) -> None:
        while not self._stop.wait(min(self.timeout_s / BEATS, MAX_BEAT)):
            with self._guard:
                held = list(self._held.values())
            for path in held:
                with contextlib.suppress(OSError):  # gone: taken away by hand; the work goes on all the same
                    os.utime(path)


def clear(folder: Path) -> None:
    """Remove a claims folder whose work is all done; a worker that still looks into it makes it anew."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # fails while other work is claimed there
