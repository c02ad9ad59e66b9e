"""Stands in for the SGLang worker: speaks its protocol, computes states from a formula, and misbehaves on demand.

Run as `python fake_worker.py <mode> <parent-pid> <reply-fd> <states-fd> <states-fd>`; imports no torch: starts at once.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

H, LAYERS = 8, 6


def state(layer: int, tokens: Any) -> np.ndarray:
    """[T, H] float32: what "enters layer `layer`"; layer LAYERS is `final`, LAYERS + 1 `final_normed`."""
    t = np.asarray(tokens, dtype=np.float64)[:, None]
    return np.sin(0.37 * t + 1.3 * np.arange(H)[None] + 0.9 * layer).astype(np.float32)


class Fake:
    def __init__(self, mode: str, reply: Any, states_fds: list[int]) -> None:
        self.mode, self.reply, self.states_fds = mode, reply, states_fds
        self.batches = 0

    def say(self, event: str, **facts: Any) -> None:
        self.reply.write(json.dumps({"event": event, **facts}) + "\n")
        self.reply.flush()

    def load(self, job: dict[str, Any]) -> None:
        self.job = job
        self.sites = [i + (0 if self.mode == "off_by_one" else 1) for i in job["ids"]]
        if self.mode == "die_loading":
            print("Traceback (most recent call last):\nValueError: no such architecture", file=sys.stderr, flush=True)
            os._exit(3)
        if self.mode == "error_loading":
            self.say("error", kind="engine", why="ValueError: unknown model")
            os._exit(1)
        if self.mode == "hang_loading":
            time.sleep(600)
        if self.mode == "grandchild":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(job["model"], "pids").write_text(f"{os.getpid()} {child.pid}")
        version = "0.5.9" if self.mode == "other_version" else "0.5.23"
        limits = {"max_tokens": 24, "max_requests": 3, "max_length": 20}
        self.say("ready", version=version, dtype="bfloat16", model="Fake", **limits)

    def run(self, command: dict[str, Any]) -> None:
        self.batches += 1
        if self.mode == "die_second" and self.batches == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "hang":
            time.sleep(600)
        if self.mode == "memory":
            self.say("error", kind="memory", why="OutOfMemoryError: tried to allocate 20 GiB")
            os._exit(1)
        if self.mode == "rank":
            print("torch.OutOfMemoryError: CUDA out of memory", file=sys.stderr, flush=True)
            self.say("error", kind="rank", why="rank 1 died with exit code 1")
            os._exit(1)
        if self.mode == "garbage":
            self.reply.write("not JSON\n")
            self.reply.flush()
            return
        pairs = list(zip(command["keys"], command["ids"], strict=True))
        if self.mode == "reversed":
            pairs.reverse()
        records = [{"key": key, "rows": len(ids)} for key, ids in pairs]
        tokens = [t for _, ids in pairs for t in ids]
        self.spoil(records, pairs)
        if self.mode == "other_tokens":
            tokens[-1] += 1
        tensors = self.tensors(tokens, command["measure"])
        data = save(tensors)
        fd = self.states_fds[command["slot"]]
        os.ftruncate(fd, 0)
        os.pwrite(fd, data[: 40 if self.mode == "cut" else None], 0)
        ranks = {str(r): {"aux": 0.0, "teacher": 0.0} for r in range(1, self.job["tp"])}
        if self.mode == "partial_sums":
            ranks["1"]["aux"] = 0.08
        batch = command["batch"] + (self.mode == "other_batch")
        self.say("batch", batch=batch, records=records, ranks=ranks)

    def spoil(self, records: list[dict[str, Any]], pairs: list[Any]) -> None:
        if self.mode == "rows":
            records[0]["rows"] -= 1
        if self.mode == "missing":
            records.pop()
        if self.mode == "foreign":
            records[0]["key"] = "someone else"
        if self.mode == "twice":
            records[1]["key"] = records[0]["key"]

    def tensors(self, tokens: list[int], measure: int) -> dict[str, np.ndarray]:
        aux = np.concatenate([state(k, tokens) for k in self.sites], axis=1)
        teacher = state(LAYERS if self.job["teacher"] == "final" else LAYERS + 1, tokens)
        if self.mode == "nan":
            teacher[-1, 3] = np.nan
        out = {"tokens": np.asarray(tokens, dtype=np.int64), "aux": aux, "teacher": teacher}
        if measure:
            names = ["embedding", *(f"layer_{k}" for k in range(1, LAYERS)), "final", "final_normed"]
            names = names[:3] if self.mode == "no_hooks" else names
            out |= {f"site.{name}": state(k, tokens[:measure]) for k, name in enumerate(names)}
        return out


def main() -> None:
    mode, parent, reply_fd, *states_fds = sys.argv[1], *map(int, sys.argv[2:])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    fake = Fake(mode, os.fdopen(reply_fd, "w"), states_fds)
    fake.load(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        fake.run(json.loads(line))


if __name__ == "__main__":
    main()
