"""The worker's end of the protocol: one request a line on stdin, one answer a line on a pipe, both JSON.

A worker waits for its next request without using the processor, so that another side can be timed meanwhile. This
module is imported in the peers' environments too: the standard library, torch and safetensors are all it may use.

Requests: `hello`; `reload` (the case's weights again); `loss` (forward alone: `kind` "ce" or "kl", and its sum over
the supervised rows of each step); `gradients` (forward and backward of the side's own objective, with the factor that
each step's sum has in it, document by document); `step` (one whole training step); `memory`; `reset_peak`; `profile`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

Handler = Callable[[dict[str, Any]], dict[str, Any]]
SAMPLED = 256  # numbers of each gradient that are compared one by one


class Side(Protocol):
    """What a worker module provides: one tool's model, loss and optimizer on one case."""

    def about(self) -> dict[str, Any]:
        """Versions, settings, optimizer."""

    def reload(self) -> None:
        """Put the case's weights back."""

    def loss(self) -> dict[str, Any]:
        """`{"kind": "ce" | "kl", "sums": [K floats]}`."""

    def gradients(self, request: dict[str, Any]) -> dict[str, Any]:
        """`{"gradients": {served name: fingerprint}, "factors": [[K floats] per document]}`."""

    def step(self) -> float:
        """One whole training step; its loss."""


class CaseReader:
    """The files of a case; every weight must be asked for by name.

    Args:
        folder: as `benchmarks.peers.documents.write_case` left it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        whole = json.loads((folder / "case.json").read_text())
        self.case, self.shape, self.lengths = whole["case"], whole["shape"], whole["lengths"]
        self.steps, self.decay = int(self.case["steps"]), float(whole["decay"])
        self.settings: dict[str, Any] = json.loads(os.environ.get("PEERS_SETTINGS", "{}"))
        self.device = torch.device(self.case["device"])
        self.dtype: torch.dtype = getattr(torch, self.case["dtype"])

    def weights(self, names: dict[str, str], unused: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """The case's weights under the tool's own names.

        Args:
            names: name here -> name there, every one that the tool takes.
            unused: names here that the tool has no place for.

        Raises:
            KeyError: a name of the case that neither lists.
        """
        with safe_open(self.folder / "weights.safetensors", framework="pt") as file:
            strange = set(file.keys()) ^ (set(names) | set(unused))
            if strange:
                raise KeyError(f"weights that are not accounted for: {sorted(strange)}")
            return {there: file.get_tensor(here) for here, there in names.items()}

    def names(self) -> list[str]:
        """All weights of the case."""
        with safe_open(self.folder / "weights.safetensors", framework="pt") as file:
            return sorted(file.keys())

    def data(self, *names: str) -> list[list[Tensor]]:
        """Named data tensors, each cut into documents."""
        with safe_open(self.folder / "data.safetensors", framework="pt") as file:
            return [list(file.get_tensor(name).split(self.lengths)) for name in names]


def fingerprint(gradient: Tensor) -> dict[str, Any]:
    """A gradient's norm, and evenly spaced numbers of it."""
    flat = gradient.detach().flatten().double()
    stride = max(1, flat.numel() // SAMPLED)
    return {"norm": float(flat.norm()), "sample": flat[::stride][:SAMPLED].tolist()}


def resident(field: str = "VmRSS") -> float:
    """MiB of this process in memory now ("VmRSS"), or its mark ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1024


def _memory(device: torch.device, baseline: float) -> dict[str, Any]:
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return {"now": now / 2**20, "peak": peak / 2**20, "baseline": 0.0}
    return {"now": resident(), "peak": resident("VmHWM"), "baseline": baseline}


def _reset_peak(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # puts VmHWM back to the present size
    return {}


def _timed(side: Side, device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    loss = side.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return {"seconds": time.perf_counter() - start, "loss": loss}


def _profile(side: Side, rows: int) -> dict[str, Any]:
    """Where a step's time goes: the operators with the largest own time, seconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        side.step()
    events = sorted(seen.key_averages(), key=lambda e: -e.self_cpu_time_total)
    total = sum(e.self_cpu_time_total for e in events)
    top = [{"op": e.key, "seconds": e.self_cpu_time_total / 1e6, "calls": e.count} for e in events[:rows]]
    return {"total": total / 1e6, "operators": top}


def handlers(
    side: Side, device: torch.device, baseline: float
) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    """What each request does."""

    def reload(_: dict[str, Any]) -> dict[str, Any]:
        side.reload()
        return {}

    return {
        "hello": lambda _: side.about(),
        "reload": reload,
        "loss": lambda _: side.loss(),
        "gradients": side.gradients,
        "step": lambda _: _timed(side, device),
        "memory": lambda _: _memory(device, baseline),
        "reset_peak": lambda _: _reset_peak(device),
        "profile": lambda request: _profile(side, int(request.get("rows", 12))),
    }


def serve(build: Callable[[CaseReader], Side]) -> None:
    """Build the side for the case folder named on the command line, then answer requests until stdin ends.

    Answers go to the descriptor that `PEERS_ANSWERS` names (stdout without it): libraries print to stdout.
    """
    answers = os.fdopen(int(os.environ.get("PEERS_ANSWERS", "1")), "w")
    _first_to_go()
    torch.manual_seed(0)
    known: dict[str, Handler] = {}
    try:
        reader, baseline = CaseReader(Path(sys.argv[1])), resident()
        known = handlers(build(reader), reader.device, baseline)
    except Exception as err:
        known = {"hello": _raising(err)}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": True, **known[request["op"]](request)}
        except Exception as err:
            traceback.print_exc()
            reason = (str(err).strip().splitlines() or [""])[0]
            answer = {"ok": False, "error": f"{type(err).__name__}: {reason}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _raising(err: Exception) -> Handler:
    def fail(_: dict[str, Any]) -> dict[str, Any]:
        raise err

    return fail


def _first_to_go() -> None:
    """When memory runs out, let the kernel end this process rather than another one."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
