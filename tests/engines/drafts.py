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
    overrides = [*SETTINGS, *([f"wiring.aux=[{','.join(wiring)}]"] if wiring else [])]
    run = CACHE / f"tiny_kimi-{sha256_json([target.name, overrides])[:16]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{run.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (run / "served" / "config.json").exists():
            shutil.rmtree(run, ignore_errors=True)
            command = [sys.executable, str(ROOT / "train" / "run.py"), "conf=matrix_native", f"run_dir={run}"]
            command += [f"target.path={target}", "track.wandb=disabled", *overrides]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, done.stdout + done.stderr
    return run
