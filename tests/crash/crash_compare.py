"""Two run folders compared, file by file and bit by bit; what cannot be equal is named here, and nothing else is.

A file that only one of them has is a difference, too: so is what a killed run left behind.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

# Files that may differ in content: they say when and how often something ran, or show speeds.
TOLD = {
    "run/run.json": "when it was started, by which command",
    "run/commands.log": "one line a start",
    "run/config.yaml": "the address of the chat server",
    "run/eval/table.txt": "speeds; results.json has all else",
    "run/eval/accept.png": "speeds",
    "run/eval/report.html": "speeds",
}
# Keys of JSON files and metrics rows that hold times, rates, or how much of the work fell to the last run.
TIMES = {
    "seconds", "data_wait", "finished", "captured", "resumed_from", "this_run", "url",
    "decode_seconds", "draft_seconds", "draft_share", "tokens_per_second", "baseline_tokens_per_second", "speedup",
    "batch_tokens_per_second", "baseline_batch_tokens_per_second", "batch_speedup",
}  # fmt: skip
RANDOM_NAME = re.compile(r"(shard-.+)\.[0-9a-f]{16}(\.safetensors)")  # the data file of a shard
FINGERPRINT = "_fingerprint"  # of a datasets folder: hangs on times


def compare(whole: Path, other: Path) -> list[str]:
    """Each file or folder that differs, with how: "missing", "left over" or "differs"."""
    want, have = contents(whole), contents(other)
    found = [f"{name} is missing" for name in sorted(want.keys() - have.keys())]
    found += [f"{name} is left over" for name in sorted(have.keys() - want.keys())]
    return found + [f"{name} differs" for name in sorted(want.keys() & have.keys()) if want[name] != have[name]]


def contents(root: Path) -> dict[str, str]:
    """Every file and folder below `root` -> a checksum of what must be equal in it."""
    return {_name(path.relative_to(root)): _content(path, root) for path in sorted(root.rglob("*"))}


def _name(path: Path) -> str:
    return RANDOM_NAME.sub(r"\1\2", str(path))


def _content(path: Path, root: Path) -> str:
    name = str(path.relative_to(root))
    if path.is_dir():
        return "folder"
    if name in TOLD or path.name.endswith(".lock"):
        return "there"
    if path.suffix == ".json":
        return _digest(_timeless(json.loads(path.read_text()), path))
    if path.name == "metrics.jsonl":
        return _digest([_timeless(json.loads(line), path) for line in path.read_text().splitlines()])
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _timeless(value: Any, path: Path) -> Any:
    """A JSON value without what cannot be equal."""
    if isinstance(value, list):
        return [_timeless(one, path) for one in value]
    if isinstance(value, str):
        return RANDOM_NAME.sub(r"\1\2", value)
    if not isinstance(value, dict):
        return value
    if path.parts[-2:] == ("store", "complete.json"):  # a sidecar's checksum covers the data file's random name
        value = {**value, "shards": sorted(value["shards"])}
    return {
        key: _timeless(one, path)
        for key, one in value.items()
        if key.rpartition("/")[2] not in TIMES and key != FINGERPRINT
    }
