"""Small trained drafts for tests that need one that accepts something, made once and kept under `.cache/`."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

from eagle3.atomic import sha256_json

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "drafts"
SETTINGS = ["data.max_samples=320", "data.max_length=128", "train.epochs=4", "train.save_every=10000"]


def tiny_kimi_run(target: Path, wiring: list[str] | None = None) -> Path:
    """The run folder of a draft for the tiny Kimi, trained through the front door for about half a minute.

    Args:
        target: the tiny Kimi's folder.
        wiring: site names; None = the native wiring.
    """
    overrides = ["conf=matrix_native", *SETTINGS, *([f"wiring.aux=[{','.join(wiring)}]"] if wiring else [])]
    return _trained("tiny_kimi", target, overrides)


def _trained(name: str, target: Path, overrides: list[str]) -> Path:
    """The run folder that the front door made for these settings; one test process makes it while others wait."""
    run = CACHE / f"{name}-{sha256_json([target.name, overrides])[:16]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{run.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (run / "served" / "config.json").exists():
            shutil.rmtree(run, ignore_errors=True)
            command = [sys.executable, str(ROOT / "train" / "run.py"), *overrides, f"run_dir={run}"]
            command += [f"target.path={target}", "track.wandb=disabled"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, done.stdout + done.stderr
    return run


def kimi_mini_run(target: Path) -> Path:
    """The run folder of a draft for the miniature of Kimi-K2.5, trained through `conf=kimi_k25 +size=mini`.

    Conversations are the shipped answers and hidden states come from transformers: about a minute.
    """
    settings = ["stages=[prepare,extract,train,export]", "capture.backend=hf", "capture.compute_dtype=float32"]
    settings += ["data.sources=[data/demo_answers.jsonl]", "train.processes=1", "target.trust_remote_code=true"]
    return _trained("kimi_mini", target, ["conf=kimi_k25", "+size=mini", *settings])
