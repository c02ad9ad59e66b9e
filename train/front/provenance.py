"""What a run was made with: resolved config, command line, commit, versions, hardware."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eagle3.atomic import write_json, write_text
from eagle3.redact import hidden, hidden_words
from train.front.config import PROJECT_ROOT, RedraftConfig

PACKAGES = ("redraft", "torch", "deepspeed", "transformers", "datasets", "safetensors", "wandb", "hydra-core", "numpy")

# A saved config is a primary config of its own: `train/run.py --config-path RUN --config-name config` reads it.
RERUN_HEAD = """\
defaults:
  - _self_
  - override hydra/hydra_logging: none
  - override hydra/job_logging: none
hydra:
  output_subdir: null
  run:
    dir: .
  job_logging: {}
"""


def git_state() -> dict[str, Any]:
    """Commit and whether tracked files differ from it; nulls outside a git checkout."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", *args], cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit, status = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "modified": bool(status) if status is not None else None}


def package_versions() -> dict[str, str | None]:
    """Installed version of each package that can move a number."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def cpu_model() -> str:
    """The processor's name as Linux reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def memory_bytes() -> int:
    """Physical memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def hardware() -> dict[str, Any]:
    """Cores, memory and GPUs."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": cpu_model(), "cores": os.cpu_count(), "memory_bytes": memory_bytes(), "gpus": gpus}


def write_provenance(config: RedraftConfig, run_dir: Path) -> None:
    """Write `config.yaml` (resolved, usable as a config again) and `run.json` into the run folder."""
    text = OmegaConf.to_yaml(OmegaConf.create(asdict(config)))
    write_text(run_dir / "config.yaml", RERUN_HEAD + hidden(text))
    words = hidden_words(sys.argv)
    facts = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [sys.executable, *words],
        "git": git_state(),
        "versions": package_versions(),
        "hardware": hardware(),
    }
    write_json(run_dir / "run.json", facts)
    with open(run_dir / "commands.log", "a", encoding="utf-8") as log:
        log.write(f"{facts['started']} {' '.join(words)}\n")
