"""`conf=kimi_k25 +size=mini`: the preset on its miniature, with other sizes and the same run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from kimi.tokenizer import vocab_size

ROOT = Path(__file__).resolve().parents[3]
# What the miniature's preset may change: sizes, places, and the learning rate that goes with a size.
SIZES = {
    "target": {"path", "hidden_size", "vocab_size"},
    "select": {"total", "max_tokens"},
    "regenerate": {"max_tokens", "concurrency"},
    "data": {"max_samples", "max_length", "val_fraction"},
    "capture": {"batch_tokens", "sglang.tp"},
    "draft": {"vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"},
    "store": {"shard_tokens"},
    "train": {"processes", "epochs", "lr", "global_batch_size", "micro_batch_size", "dtype"},
    "eval": {"max_prompts", "max_new_tokens", "batch_sizes", "server.tp"},
}


def composed(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "train" / "run.py"), *arguments, "--cfg", "job"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(yaml.safe_load(done.stdout))


def flat(tree: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {name: tree}
    return {key: value for k, sub in tree.items() for key, value in flat(sub, f"{name}.{k}" if name else k).items()}


def test_only_sizes_and_places_change() -> None:
    real, mini = flat(composed("conf=kimi_k25")), flat(composed("conf=kimi_k25", "+size=mini"))
    changed = {name for name in real.keys() | mini.keys() if real.get(name) != mini.get(name)}
    assert changed <= {f"{part}.{key}" for part, keys in SIZES.items() for key in keys}
    assert mini["target.vocab_size"] == vocab_size() and mini["target.hidden_size"] == 64
    assert mini["stages"] == real["stages"] and mini["wiring.aux"] == real["wiring.aux"]
    assert mini["target.num_layers"] == real["target.num_layers"] == 61
    a_step = mini["train.processes"] * mini["train.micro_batch_size"]
    assert mini["train.global_batch_size"] % a_step == 0
