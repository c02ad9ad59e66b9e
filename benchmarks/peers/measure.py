"""One case: every side's memory, the check that all do the same work, then the clock, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.agreement import compare, mean_losses
from benchmarks.peers.cases import Case
from benchmarks.peers.documents import CaseFiles, write_case
from benchmarks.peers.protocol import SideFailed, Worker
from benchmarks.peers.sides import OURS, SideSpec

LEAST_ROUNDS = 3
PROFILED = 12  # operators told of each side
Say = Callable[[str], None]
Result = dict[str, Any]
Settings = dict[str, Any]


@dataclass(frozen=True)
class Budget:
    """How long to measure a case.

    Args:
        rounds: timed rounds, at most.
        case_s: seconds that the rounds of a case should last; three are taken however long they last.
        threads: of every side's operators.
        profile: take one more step of each side under torch's profiler.
    """

    rounds: int
    case_s: float
    threads: int
    profile: bool = False


def measure(case: Case, sides: list[SideSpec], budget: Budget, folder: Path, say: Say) -> Result:
    """Measure one case.

    A side that fails is told in its own part of the result, and the others go on.

    Args:
        case: the sizes.
        sides: peers first, we last.
        budget: how long.
        folder: for the case's files and the workers' stderr.
        say: told how far it is.

    Returns:
        JSON-able: the case, supervised tokens, the check, and for each side its seconds, rates and memory or `error`.
    """
    say(f"{case.name}: drawing weights and documents")
    files = write_case(case, folder / "case")
    with ExitStack() as stack:
        session = _Session(case, files, sides)
        for side in sides:
            say(f"{case.name}: {side.name} starts; its first two steps")
            session.start(side, partial(_worker, stack, side, files, budget, folder))
        say(f"{case.name}: losses and gradients beside ours")
        session.check()
        session.take_turns(budget, lambda number: say(f"{case.name}: round {number}"))
        if budget.profile:
            session.profile()
    _rates(session.result)
    return session.result


class _Session:
    """The workers that still take part in a case, and what is known of it so far."""

    def __init__(self, case: Case, files: CaseFiles, sides: list[SideSpec]) -> None:
        self.case, self.files = case, files
        # What a peer was told not to train: told in the result, and no reason to refuse it.
        self.frozen = {side.name: {"lm_head.weight"} for side in sides if side.settings.get("head") == "frozen"}
        self.workers: dict[str, Worker] = {}
        self.result: Result = {
            "case": asdict(case),
            "documents": files.lengths,
            "tokens": case.tokens,
            "supervised_tokens": files.counts[0],
            "check": {},
            "sides": {side.name: {} for side in sides},
        }

    def _with(self, side: str, work: Callable[[Worker], dict[str, Any]]) -> None:
        """Do `work` with a side and note what it gives; on failure note why, and go on without the side."""
        try:
            found = work(self.workers[side])
        except SideFailed as err:
            found = {"error": err.why or str(err)}
            self.workers.pop(side).close()
        self.result["sides"][side].update(found)

    def start(self, side: SideSpec, make: Callable[[Settings], Worker]) -> None:
        """Two steps of a fresh process for each of the side's ways; the fastest stays, the least memory counts."""
        best: dict[str, Any] = {}
        tried: list[dict[str, Any]] = []
        for way in side.ways:
            worker = make(way)
            try:
                found = _first_steps(worker)
            except SideFailed as err:
                worker.close()
                tried.append({"settings": way, "error": err.why or str(err)})
                continue
            tried.append({"settings": way, "seconds": found["first_steps_s"][1], "mib": found["memory_mib"]["peak"]})
            slower: Worker | None = worker
            if not best or found["first_steps_s"][1] < best["first_steps_s"][1]:
                slower, best = self.workers.get(side.name), found
                self.workers[side.name] = worker
            if slower is not None:
                slower.close()
        if best:
            least = min(way["mib"] for way in tried if "mib" in way)
            best = {**best, "memory_mib": {**best["memory_mib"], "peak": least}}
        self.result["sides"][side.name].update(best or {"error": tried[0]["error"]}, ways=tried)

    def check(self) -> None:
        """Give every side the case's weights again and compare; a peer that does something else is not timed."""
        if OURS not in self.workers:
            return
        self._with(OURS, self._our_losses)
        for side in [name for name in self.workers if name != OURS and OURS in self.workers]:
            self._with(side, self._compare)

    def _our_losses(self, worker: Worker) -> dict[str, Any]:
        worker.ask("reload")
        self.result["check"][OURS] = {"losses": mean_losses(worker.ask("loss"), self.files)}
        return {}

    def _compare(self, worker: Worker) -> dict[str, Any]:
        ours = self.workers[OURS]
        worker.ask("reload")
        losses = self.result["check"][OURS]["losses"], mean_losses(worker.ask("loss"), self.files)
        theirs = worker.ask("gradients")
        # Our gradient of the peer's own objective: the same cross entropies with the peer's factors.
        own = ours.ask("gradients", factors=theirs["factors"])
        gradients = own["gradients"], theirs["gradients"]
        agreement = compare(*losses, *gradients, self.case.dtype, self.frozen.get(worker.side, set()))
        self.result["check"][worker.side] = asdict(agreement)
        if not agreement.agrees:
            raise SideFailed(f"{worker.side} computes something else", where="check", why=agreement.words)
        return {}

    def profile(self) -> None:
        """Where the time of one more step goes, by operator."""
        for side in list(self.workers):
            self._with(side, _profile)

    def take_turns(self, budget: Budget, say: Callable[[int], None]) -> None:
        """A B C A B C ...: one step of each side a turn, while the others wait for their input."""
        seconds: dict[str, list[float]] = {side: [] for side in self.workers}

        def one(worker: Worker) -> dict[str, Any]:
            seconds[worker.side].append(worker.ask("step")["seconds"])
            return {}

        started = time.monotonic()
        for number in range(1, budget.rounds + 1):
            say(number)
            for side in list(self.workers):
                self._with(side, one)
            if number >= LEAST_ROUNDS and (time.monotonic() - started) * (number + 1) / number > budget.case_s:
                break
        for side in self.workers:
            self.result["sides"][side]["seconds"] = seconds[side]


def _worker(stack: ExitStack, side: SideSpec, files: CaseFiles, budget: Budget, folder: Path, way: Settings) -> Worker:
    log = folder / f"{side.name}-{side.ways.index(way)}.log"
    command = side.command(files.folder)
    return stack.enter_context(Worker(side.name, command, side.settings | way, budget.threads, log))


def _profile(worker: Worker) -> dict[str, Any]:
    return {"profile": worker.ask("profile", rows=PROFILED)}


def _first_steps(worker: Worker) -> dict[str, Any]:
    """The first step compiles and makes the optimizer's state; the second's peak is the side's memory."""
    about = worker.ask("hello")
    before = worker.ask("memory")
    first = worker.ask("step")["seconds"]
    worker.ask("reset_peak")
    second = worker.ask("step")["seconds"]
    memory = {"peak": worker.ask("memory")["peak"], "before": before["now"], "baseline": before["baseline"]}
    return {"about": about, "first_steps_s": [first, second], "memory_mib": memory}


def _rates(result: Result) -> None:
    """Add medians and tokens a second, and our ratios to the best peer."""
    sides = result["sides"]
    for side in sides.values():
        if "seconds" in side:
            median = statistics.median(side["seconds"])
            side["median_s"] = median
            side["tokens_per_s"] = result["tokens"] / median
            side["supervised_per_s"] = result["supervised_tokens"] / median
    result["ratios"] = ratios(sides)


def ratios(sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ours beside the best peer's: `speed` (times as fast), its `spread` over rounds, `memory` (share of the peak).

    The best peer in speed and the best in memory may be two. Empty when there is nobody to compare with.
    """
    ours = sides.get(OURS, {})
    peers = {name: side for name, side in sides.items() if name != OURS and "median_s" in side}
    if "median_s" not in ours or not peers:
        return {}
    fastest = min(peers, key=lambda name: peers[name]["median_s"])
    smallest = min(peers, key=lambda name: peers[name]["memory_mib"]["peak"])
    rounds = [theirs / mine for theirs, mine in zip(peers[fastest]["seconds"], ours["seconds"], strict=True)]
    return {
        "fastest_peer": fastest,
        "speed": peers[fastest]["median_s"] / ours["median_s"],
        "spread": [min(rounds), max(rounds)],
        "smallest_peer": smallest,
        "memory": ours["memory_mib"]["peak"] / peers[smallest]["memory_mib"]["peak"],
    }
