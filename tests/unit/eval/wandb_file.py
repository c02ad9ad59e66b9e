"""Read back what wandb wrote offline: records in a log of 32 KiB blocks, each piece behind a header of 7 bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEAD = 32768, 7
WHOLE, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """The records of one file, in order."""
    from wandb.proto import wandb_internal_pb2

    raw = path.read_bytes()
    assert raw[:4] == b":W&B"
    place, parts = HEAD, []
    while place + HEAD <= len(raw):
        left = BLOCK - place % BLOCK
        kind = raw[place + 6] if left >= HEAD else 0
        if not kind:
            place += left
            continue
        (length,) = struct.unpack_from("<H", raw, place + 4)
        parts.append(raw[place + HEAD : place + HEAD + length])
        place += HEAD + length
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def runs(folder: Path) -> list[dict[str, Any]]:
    """Each time the run was opened, in order: the run's record, its rows, its summary, its artifacts by name."""
    import json

    out = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        one: dict[str, Any] = {"rows": [], "summary": {}, "artifacts": {}}
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                one["run"] = record.run
            elif kind == "history":
                one["rows"].append({_name(i): json.loads(i.value_json) for i in record.history.item})
            elif kind == "summary":
                one["summary"] |= {_name(i): json.loads(i.value_json) for i in record.summary.update}
            elif kind == "artifact":
                one["artifacts"][record.artifact.name] = record.artifact
        out.append(one)
    return out


def _name(item: Any) -> str:
    return item.key or "/".join(item.nested_key)
