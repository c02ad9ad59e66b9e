"""Stores ten times as large as the memory, of little disk: files with holes, or few records listed many times."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import xxhash

from data_prep.capture.sample import CapturedSample
from data_prep.store import StoreManifest
from data_prep.store.shard import write_shard
from eagle3.atomic import write_json
from eagle3.shard_file import IDS, MASK, Entry, Shard
from eagle3.wiring import Site, Wiring

SHARD_RECORDS = 64  # of a file with holes
SPARSE = "holes"  # name of the raw store whose files have nothing in them


@dataclass(frozen=True)
class Shape:
    """What a record is.

    Args:
        sites: aux states a token, beside the teacher's.
        hidden: width H of each.
        tokens: of a record.
    """

    sites: int
    hidden: int
    tokens: int

    @property
    def names(self) -> list[str]:
        """The stored states."""
        return [*(site.name for site in self.wiring.stored_sites), "final"]

    @property
    def wiring(self) -> Wiring:
        """The first layers after the embedding."""
        return Wiring(tuple(Site(k + 1) for k in range(self.sites)), "final", "llama", self.sites + 2, self.hidden)

    @property
    def record_bytes(self) -> int:
        """Of a record's states, as they are trained on."""
        return (self.sites + 1) * self.hidden * 2 * self.tokens


def total_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def make_store(path: Path, kind: str, shape: Shape, size: int, distinct: int) -> Path:
    """A store that lists `size` bytes of states.

    Args:
        path: its folder.
        kind: `holes`, or a codec.
        shape: of its records, all alike.
        size: bytes of states that it lists.
        distinct: records that are really there, unless it is made of holes.
    """
    path.mkdir(parents=True)
    codec = "raw" if kind == SPARSE else kind
    write_json(path / "manifest.json", StoreManifest(shape.wiring, {"name": kind}, "none", codec=codec).to_dict())
    records = max(1, size // shape.record_bytes)
    if kind == SPARSE:
        for number in range(-(-records // SHARD_RECORDS)):
            _holes(path / f"shard-{number:05d}.json", shape, number)
    else:
        _relisted(path, kind, shape, distinct, -(-records // distinct))
    return path


def _holes(path: Path, shape: Shape, number: int) -> None:
    """A raw shard whose data file is a header and a hole."""
    tokens, told, at = SHARD_RECORDS * shape.tokens, {}, 0
    parts = [*((name, "BF16", [tokens, shape.hidden], 2 * shape.hidden) for name in shape.names)]
    for name, code, dims, row in [*parts, (IDS, "I32", [tokens], 4), (MASK, "U8", [tokens], 1)]:
        told[name] = {"dtype": code, "shape": dims, "data_offsets": [at, at + tokens * row]}
        at += tokens * row
    text = json.dumps(told).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    data = path.with_suffix(".safetensors")
    with open(data, "wb") as file:
        file.write(header)
        file.truncate(len(header) + at)
    nothing = bytes(shape.record_bytes + 5 * shape.tokens)  # what a hole reads as: states, ids and mask
    tokens_sha, sha = hashlib.sha256(nothing[: 5 * shape.tokens]).hexdigest(), hashlib.sha256(nothing).hexdigest()
    xxh3 = xxhash.xxh3_128(nothing).hexdigest()
    entries = tuple(
        Entry(f"r{number:05d}-{k:05d}", k * shape.tokens, shape.tokens, 0, tokens_sha, sha, xxh3=xxh3)
        for k in range(SHARD_RECORDS)
    )
    sha, size = hashlib.sha256(header).hexdigest(), len(header) + at
    shard = Shard(path, size, len(header), sha, tokens, entries, data.name, "raw", "bfloat16", shape.hidden)
    write_json(path, shard.to_dict())


def _relisted(path: Path, codec: str, shape: Shape, distinct: int, times: int) -> None:
    """One shard with states in it, and others that are hard links to it with records of other names."""
    samples = [_sample(shape, k) for k in range(distinct)]
    first = write_shard(path / "shard-00000.json", samples, shape.names[:-1], "bfloat16", codec)
    for number in range(1, times):
        sidecar = path / f"shard-{number:05d}.json"
        data = sidecar.with_suffix(".safetensors")
        os.link(str(first.data), data)
        entries = tuple(replace(entry, id=f"r{number:05d}-{k:05d}") for k, entry in enumerate(first.records))
        write_json(sidecar, replace(first, path=sidecar, data_name=data.name, records=entries).to_dict())


def _sample(shape: Shape, number: int) -> CapturedSample:
    """States spread as a residual stream's are: channels normal, with scales that differ from one to another."""
    gen = torch.Generator().manual_seed(number)
    states = {}
    for name in shape.names:
        scale = torch.randn(shape.hidden, generator=gen).exp_()
        states[name] = torch.randn(shape.tokens, shape.hidden, generator=gen).mul_(scale).bfloat16()
    ids = torch.zeros(shape.tokens, dtype=torch.int64)  # as the holes read
    return CapturedSample(f"r00000-{number:05d}", ids, ids.bool(), states, states.pop("final"), "final")


class Listed:
    """All records of a store as the prepared ones."""

    def __init__(self, record_ids: list[str], tokens: int) -> None:
        self.record_ids, self.lengths = record_ids, [tokens] * len(record_ids)
        self._tokens = np.zeros(tokens, np.int32)

    def tokens(self, index: int) -> np.ndarray:
        """Zeros, [T] int32."""
        return self._tokens


def evict(path: Path) -> None:
    """Have the page cache let go of a store's files."""
    seen: set[int] = set()
    for data in path.glob("*.safetensors"):
        if data.stat().st_ino not in seen:
            seen.add(data.stat().st_ino)
            with open(data, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
