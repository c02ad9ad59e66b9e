"""Write a shard: a safetensors file of concatenated records, then a JSON sidecar that says what is in it.

The sidecar is written last, so a shard exists exactly when its sidecar does, and it names its data file. Checksums
cover every byte of the data file: one over the header, and one per record over its bytes of every tensor, so that
damage is laid at the record it hit. `eagle3.shard_file` reads what is written here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash

from data_prep.capture.sample import CapturedSample
from data_prep.store.encoders import Encoders
from data_prep.store.manifest import StoreManifest
from data_prep.store.seal import unseal
from eagle3.atomic import write_json
from eagle3.errors import DataError
from eagle3.place import Place, create, exists, list_files, modified, remove, writing
from eagle3.shard_file import IDS, MASK, Entry, Shard
from eagle3.state_codec import CODECS, ITEMSIZE, Bytes, Part, to_bytes

__all__ = ["Entry", "Shard", "publish", "remove_orphans", "supervised_count", "tokens_sha256", "write_shard"]

ORPHAN_AGE = 24 * 3600.0  # seconds; between a data file and its sidecar lie milliseconds
ENCODERS = 8  # records encoded at a time, where the caller does not say
_DATA_NAME = re.compile(r"shard-(?P<name>.+)\.[0-9a-f]{16}\.safetensors")


def supervised_count(loss_mask: torch.Tensor) -> int:
    """Number of learnable tokens: mask on, and two tokens before it to predict it from. `loss_mask` is [T]."""
    return int(loss_mask[2:].sum())


def tokens_sha256(input_ids: Any, loss_mask: Any) -> str:
    """Checksum of a record's tokens and mask (sequences or tensors [T]), as in `Entry.tokens_sha256`."""
    ids = np.asarray(input_ids, dtype=np.int32)
    mask = np.asarray(loss_mask, dtype=np.uint8)
    return hashlib.sha256(ids.tobytes() + mask.tobytes()).hexdigest()


def write_shard(
    path: Path,
    samples: Sequence[CapturedSample],
    sites: Sequence[str],
    dtype: str,
    codec: str = "raw",
    store: str = "",
) -> Shard:
    """Write a shard under a name that only this writer uses. `path` is the sidecar's; its data file has its name.

    `store` is the key of the store's manifest.

    Raises:
        OSError: the disk is full or the file cannot be written.
        DataError: the codec cannot keep a state.
    """
    shard = _write_data(path, path.with_suffix(".safetensors").name, samples, sites, dtype, codec, store)
    write_json(path, shard.to_dict())
    return shard


def publish(
    store: Place,
    name: str,
    samples: Sequence[CapturedSample],
    sites: Sequence[str],
    manifest: StoreManifest,
    encoders: Encoders | None = None,
) -> Shard:
    """Write `samples` as shard `name`, unless another writer published it first; any number may try at once.

    The data file gets a name of its own; then the sidecar `shard-<name>.json` is created exclusively. The first writer
    wins: the others remove their data file. A crash in between leaves a data file that no sidecar names, which readers
    ignore; see `remove_orphans`. A seal that does not know the shard is removed. `encoders` may be others' too.

    Returns:
        The shard that is in the store now, the winner's: this writer's if `samples` are what it holds.

    Raises:
        OSError: the disk is full or the file cannot be written.
        DataError: the codec cannot keep a state.
        IntegrityError: the winner's sidecar is not readable.
    """
    path = store / f"shard-{name}.json"
    data_name = f"shard-{name}.{uuid.uuid4().hex[:16]}.safetensors"
    shard = _write_data(path, data_name, samples, sites, manifest.dtype, manifest.codec, manifest.key, encoders)
    try:
        create(path, json.dumps(shard.to_dict(), indent=2, ensure_ascii=False) + "\n")
        winner = Shard.read(path)  # the sidecar decides, whatever the file system's answer was
    except BaseException:
        if not exists(path):
            remove(shard.data)
        raise
    if winner.data_name != shard.data_name:
        remove(shard.data)
    unseal(store, path.name)
    return winner


def remove_orphans(store: Place, age: float = ORPHAN_AGE) -> list[str]:
    """Remove data files that no sidecar can name any more; safe beside living writers. Returns their names.

    A data file is surely dead when the sidecar of its shard names another one, for a sidecar is created once: its
    writer lost and will remove it itself, or is gone. Where there is no sidecar, its writer may be about to create
    it, which takes milliseconds: the file is dead once it is `age` seconds old. Files of version 1 are left alone.
    """
    removed = []
    now = time.time()
    for path in list_files(store, "shard-*.safetensors"):
        match = _DATA_NAME.fullmatch(path.name)
        if match is None:
            continue
        sidecar = path.parent / f"shard-{match['name']}.json"
        if Shard.read(sidecar).data_name != path.name if exists(sidecar) else now - modified(path) > age:
            remove(path)
            removed.append(path.name)
    return removed


@dataclass
class _Record:
    """A record while it is written: its first row, its running checksums, the sizes of its pieces without rows."""

    sample: CapturedSample
    start: int
    sha: Any = field(default_factory=hashlib.sha256)
    xxh3: Any = field(default_factory=xxhash.xxh3_128)
    sizes: dict[str, int] = field(default_factory=dict)

    def entry(self) -> Entry:
        """What the sidecar says of it."""
        sample = self.sample
        tokens_sha = tokens_sha256(sample.input_ids, sample.loss_mask)
        supervised = supervised_count(sample.loss_mask)
        sums = {"sha256": self.sha.hexdigest(), "xxh3": self.xxh3.hexdigest()}
        return Entry(sample.record_id, self.start, sample.tokens, supervised, tokens_sha, sizes=self.sizes, **sums)


class _DataFile:
    """A data file while it is written: every piece goes straight to its place.

    The header stands first and tells lengths that are known last, so room is kept for it.

    Args:
        handle: the file.
        tensors: name -> part, in file order.
        tokens: rows of each tensor that has rows.
    """

    def __init__(self, handle: BinaryIO, tensors: dict[str, Part], tokens: int) -> None:
        self.handle, self.tensors, self.tokens = handle, tensors, tokens
        self.begin: dict[str, int] = {}
        self.end: dict[str, int] = {}
        self.size = 0
        for name, part in tensors.items():
            if part.row is not None:
                self.begin[name], self.end[name] = self.size, self.size + tokens * part.row_bytes
                self.size = self.end[name]
        longest = dict.fromkeys(tensors, 10**15)
        self.room = len(_header(tensors, tokens, longest, longest))

    def put(self, record: _Record, name: str, piece: Bytes) -> None:
        """Write a record's piece; those without rows stand behind all others, one tensor after the other."""
        part = self.tensors[name]
        if part.row is not None:
            at = self.begin[name] + record.start * part.row_bytes
        else:
            self.begin.setdefault(name, self.size)
            at, record.sizes[name] = self.size, len(piece)
            self.size = self.end[name] = at + len(piece)
        self.handle.seek(self.room + at)
        self.handle.write(piece.data)
        record.sha.update(piece.data)
        record.xxh3.update(piece.data)

    def finish(self) -> bytes:
        """Write the header, and return it."""
        header = _header(self.tensors, self.tokens, self.begin, self.end, self.room)
        self.handle.seek(0)
        self.handle.write(header)
        return header


def _write_data(
    path: Place,
    data_name: str,
    samples: Sequence[CapturedSample],
    sites: Sequence[str],
    dtype: str,
    codec: str,
    store: str,
    encoders: Encoders | None = None,
) -> Shard:
    """Write the data file beside the sidecar `path`."""
    starts = list(accumulate((sample.tokens for sample in samples), initial=0))
    records = [_Record(sample, start) for sample, start in zip(samples, starts, strict=False)]
    names, width = [*sites, "final"], samples[0].final.shape[-1]
    parts = CODECS[codec].parts(dtype, width)
    with (
        writing(path.parent / data_name) as tmp,
        open(tmp, "wb") as handle,
        nullcontext(encoders) if encoders else Encoders(min(ENCODERS, os.cpu_count() or 1)) as pool,
    ):
        file = _DataFile(handle, _plan(names, dtype, width, codec), starts[-1])
        for name in names:
            encode = partial(_encode, name=name, codec=codec)
            encoded = map(encode, records) if codec == "raw" else pool.map(encode, records)  # raw: nothing to compute
            for record, pieces in zip(records, encoded, strict=True):
                for part, piece in zip(parts, pieces, strict=True):
                    file.put(record, name + part.suffix, piece)
        for record in records:
            file.put(record, IDS, to_bytes(record.sample.input_ids.to(torch.int32)))
            file.put(record, MASK, to_bytes(record.sample.loss_mask.to(torch.uint8)))
        header = file.finish()
    sha = hashlib.sha256(header).hexdigest()
    entries = tuple(record.entry() for record in records)
    return Shard(
        path, file.room + file.size, file.room, sha, starts[-1], entries, data_name, codec, dtype, width, store
    )


def _encode(record: _Record, name: str, codec: str) -> list[Bytes]:
    sample = record.sample
    try:
        return CODECS[codec].encode(sample.final if name == "final" else sample.sites[name])
    except DataError as err:
        where = f"record {sample.record_id}, {name}"
        raise DataError(err.what, where=where, why=err.why, mend=err.mend) from None


def _plan(names: Sequence[str], dtype: str, width: int, codec: str) -> dict[str, Part]:
    """The file's tensors in file order.

    Raw ones stand as in version 1. Others stand widest numbers first, so that each begins at a multiple of its numbers'
    size, and those without rows last.
    """
    parts = CODECS[codec].parts(dtype, width)
    tensors = {name + part.suffix: part for name in names for part in parts}
    tensors |= {IDS: Part("", "I32", ()), MASK: Part("", "U8", ())}
    if codec == "raw":
        return tensors
    return dict(sorted(tensors.items(), key=lambda item: (item[1].row is None, -ITEMSIZE[item[1].code])))


def _header(tensors: dict[str, Part], tokens: int, begin: dict[str, int], end: dict[str, int], room: int = 0) -> bytes:
    """The safetensors header: its length in 8 bytes, then JSON, then spaces up to a multiple of 8 or to `room`."""
    told = {}
    for name, part in tensors.items():
        shape = [end[name] - begin[name]] if part.row is None else [tokens, *part.row]
        told[name] = {"dtype": part.code, "shape": shape, "data_offsets": [begin[name], end[name]]}
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * max(-len(text) % 8, room - 8 - len(text))
    return len(text).to_bytes(8, "little") + text
