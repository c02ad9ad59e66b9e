"""Two run folders compared, file by file and bit by bit; what cannot be equal is named here, and nothing else is.

A file that only one of them has is a difference, too: so is what a killed run left behind.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from eagle3.checked_json import without_checksum
from train.resume import Checkpoint

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
    "seconds", "data_wait", "finished", "measured", "captured", "resumed_from", "this_run", "url",
    "decode_seconds", "draft_seconds", "draft_share", "tokens_per_second", "baseline_tokens_per_second", "speedup",
    "speedup_median",
    "batch_tokens_per_second", "baseline_batch_tokens_per_second", "batch_speedup",
}  # fmt: skip
RANDOM_NAME = re.compile(r"(shard-.+)\.[0-9a-f]{16}(\.safetensors)")  # the data file of a shard
# The datasets library writes a fingerprint that hangs on times into state.json, whose checksum the manifest has.
FINGERPRINTS = {"_fingerprint", "state.json"}
VERSION = (
    "redraft"  # a text of this name is the commit that ran, which may move on meanwhile; other things are compared
)


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
        told = json.dumps(without_checksum(json.loads(path.read_text())))
        return _digest(_timeless(json.loads(told.replace(str(root), "ROOT")), path))
    if path.name == "metrics.jsonl":
        return _digest([_timeless(json.loads(line), path) for line in path.read_text().splitlines()])
    if path.suffix == ".pt":
        return state_digest(path)
    if path.suffix == ".safetensors":
        return _tensors_digest(path.read_bytes())
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _tensors_digest(content: bytes) -> str:
    """Of a safetensors file, whose library writes the header's entries in any order."""
    begin = 8 + int.from_bytes(content[:8], "little")
    return _digest([json.loads(content[8:begin]), hashlib.sha256(content[begin:]).hexdigest()])


def state_digest(path: Path) -> str:
    """Of a file of DeepSpeed's, whose format holds memory addresses: all that is in it, tensors by their bytes."""
    from train.world import import_deepspeed

    import_deepspeed()
    from train.safe_checkpoint import SafeCheckpointEngine

    sha = hashlib.sha256()
    _feed(sha, SafeCheckpointEngine().load(str(path)))
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        sha.update(f"{value.dtype} {tuple(value.shape)}".encode())
        sha.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, one in value.items():
            sha.update(repr(key).encode())
            _feed(sha, one)
    elif isinstance(value, list | tuple):
        sha.update(f"{type(value).__name__} {len(value)}".encode())
        for one in value:
            _feed(sha, one)
    elif hasattr(value, "__dict__") and not callable(value):
        _feed(sha, {type(value).__name__: vars(value)})
    else:
        sha.update(repr(value).encode())


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
    if path.parent.name.startswith("step-") and "files" in value:
        damage = Checkpoint(path.parent, value).damage()
        value = {**value, "files": sorted(value["files"]), "damage": damage}  # their content is compared for itself
    return {
        key: _timeless(one, path)
        for key, one in value.items()
        if key.rpartition("/")[2] not in TIMES
        and key not in FINGERPRINTS
        and not (key == VERSION and isinstance(one, str))
    }
