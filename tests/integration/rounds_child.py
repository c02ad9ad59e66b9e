"""A run of the front door, in a process of its own that a fork server starts quickly, killed or not."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from train.front.config import register, typed

CONVERSATIONS = 26


def write_conversations(path: Path) -> None:
    words = "the cat sat on a mat and saw one red bird fly over it so it ran up the tall tree".split()
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


def run(root: Path, model: Path, kwargs: dict[str, Any] | None = None) -> str:
    """Run the pipeline; what it prints."""
    import torch

    from train.front.console import console
    from train.front.pipeline import run_pipeline

    torch.set_num_threads(1)
    os.environ["COLUMNS"] = "200"
    register()
    config = typed(OmegaConf.create(settings(root, model, **(kwargs or {}))))
    told = io.StringIO()
    before, console.file = console.file, told
    try:
        with contextlib.redirect_stdout(told):
            run_pipeline(config)
    finally:
        console.file = before
    return told.getvalue()
