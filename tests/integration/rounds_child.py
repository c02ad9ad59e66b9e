"""A run of the front door, in a process of its own that a fork server starts quickly, killed or not."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from train.front.config import register, typed

CONVERSATIONS = 26


def write_conversations(path: Path) -> None:
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "red", "bird", "fly", "over", "so", "it"]
    with open(path, "w", encoding="utf-8") as out:
        for n in range(CONVERSATIONS):
            asked = " ".join(words[(n * 3 + k) % len(words)] for k in range(2 + n % 3))
            told = " ".join(words[(n * 7 + k * (1 + n % 4)) % len(words)] for k in range(5 + n % 9))
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
            out.write(json.dumps({"id": f"c{n:02d}", "messages": turns}) + "\n")


def settings(root: Path, model: Path, **more: Any) -> dict[str, Any]:
    """A small run on an 8-layer Llama of hidden size 64: 5 steps of 5 conversations an epoch."""
    train = {"ttt_steps": 2, "global_batch_size": 5, "micro_batch_size": 5, "lr": 1e-3, "save_every": 2, "epochs": 1}
    base: dict[str, Any] = {
        "name": "rounds",
        "run_dir": str(root / "run"),
        "stages": ["prepare", "extract", "train"],
        "mark_latest": False,
        "paths": {"prepared": str(root / "prepared"), "store": str(root / "store"), "selected": "x", "answers": "x"},
        "target": {
            "name": "tiny", "path": str(model), "model_type": "llama",
            "num_layers": 8, "hidden_size": 64, "vocab_size": 320,
        },
        "wiring": {"aux": ["layer_2", "layer_4", "layer_5"]},
        "data": {"sources": [str(root.parent / "conversations.jsonl")], "max_length": 96, "val_fraction": 0.1},
        "capture": {"batch_tokens": 200},
        "store": {"shard_tokens": 300, "verify_records": 1},
        "draft": {"vocab_size": 64},
        "train": train,
        "track": {"wandb": "disabled"},
        "export": {"convention": "sglang-0.5.23"},
        "eval": {"prompt_sets": ["x.jsonl"]},
    }  # fmt: skip
    for key, value in more.items():
        base[key] = {**base[key], **value} if isinstance(value, dict) else value
    return base


def die_at(moment: tuple[str, int, bool]) -> None:
    """Let this process kill itself (signal 9) at the n-th call of "module.function": before it, or after."""
    path, count, after = moment
    module, _, name = path.rpartition(".")
    holder = importlib.import_module(module)
    real, calls = getattr(holder, name), itertools.count(1)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        now = next(calls) == count
        if now and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if now:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(holder, name, deadly)


def run(root: Path, model: Path, more: dict[str, Any] | None = None, die: tuple[str, int, bool] | None = None) -> str:
    """Run the pipeline; what it prints."""
    import torch

    from train.front.console import console
    from train.front.pipeline import run_pipeline

    torch.set_num_threads(1)
    os.environ["COLUMNS"] = "200"
    register()
    if die is not None:
        die_at(die)
    config = typed(OmegaConf.create(settings(root, model, **(more or {}))))
    told = io.StringIO()
    before, console.file = console.file, told
    try:
        run_pipeline(config)
    finally:
        console.file = before
    return told.getvalue()
