"""One shard: a safetensors file of concatenated records, and a JSON sidecar that says what is in it.

The sidecar is written last, so a shard exists exactly when its sidecar does, and it names its data file. Checksums
cover every byte of the data file: one over the header, and one per record over its rows of every tensor, so that damage
is laid at the record it hit.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from data_prep.capture.sample import CapturedSample
from data_prep.store.manifest import StoreManifest
from eagle3.atomic import read_json, write_json
from eagle3.errors import IntegrityError
from eagle3.place import Place, create, modified, remove, writing

FORMAT = "redraft-shard"
OLD, VERSION = 1, 2  # 1: the data file has the sidecar's name
ORPHAN_AGE = 24 * 3600.0  # seconds; between a data file and its sidecar lie milliseconds
MEND = "delete this shard's two files and run the extract stage again: only its records are captured anew"
_DATA_NAME = re.compile(r"shard-(?P<name>.+)\.[0-9a-f]{16}\.safetensors")
CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # safetensors' names


@dataclass(frozen=True)
class Entry:
    """One record of a shard: rows `start` to `start + tokens` of each tensor.

    `supervised` counts the tokens that a draft can learn (mask on, position 2 or later). `tokens_sha256` is over ids
    and mask, `sha256` over those and all states.
    """

    id: str
    start: int
    tokens: int
    supervised: int
    tokens_sha256: str
    sha256: str


@dataclass(frozen=True)
class Shard:
    """A finished shard as its sidecar tells it; `path` is the sidecar's, `data_name` the data file's, beside it."""

    path: Path
    bytes: int
    header_bytes: int
    header_sha256: str
    tokens: int
    records: tuple[Entry, ...]
    data_name: str

    @property
    def data(self) -> Path:
        """The safetensors file."""
        return self.path.parent / self.data_name

    @classmethod
    def read(cls, path: Path) -> Shard:
        """Read a sidecar.

        Raises:
            IntegrityError: it is not readable or not a sidecar of this version.
        """
        raw = read_json(path, mend=MEND)
        try:
            if raw["format"] != FORMAT or raw["version"] not in (OLD, VERSION):
                raise KeyError(f"format {raw['format']!r} version {raw['version']!r}")
            records = tuple(Entry(**entry) for entry in raw["records"])
            data = path.with_suffix(".safetensors").name if raw["version"] == OLD else raw["data_name"]
            return cls(path, raw["bytes"], raw["header_bytes"], raw["header_sha256"], raw["tokens"], records, data)
        except (KeyError, TypeError) as err:
            raise IntegrityError("not a shard's sidecar", where=str(path), why=str(err), mend=MEND) from None

    def check(self) -> None:
        """Compare the data file's size and header with the sidecar; cheap, reads only the header.

        Raises:
            IntegrityError: the file is missing, cut short, or has another header; names the shard and its records.
        """
        size = self.data.stat().st_size if self.data.is_file() else -1
        if size != self.bytes:
            what = "a shard's data file is missing" if size < 0 else "a shard is truncated"
            if size > self.bytes:
                what = "a shard has another size than was written"
            why = "" if size < 0 else f"{size} bytes where {self.bytes} were written; "
            raise IntegrityError(what, where=str(self.data), why=why + self.holds, mend=MEND)
        with open(self.data, "rb") as handle:
            header = handle.read(self.header_bytes)
        if hashlib.sha256(header).hexdigest() != self.header_sha256:
            raise IntegrityError("a shard's header is damaged", where=str(self.data), why=self.holds, mend=MEND)

    def to_dict(self) -> dict[str, Any]:
        """The sidecar's content; `read` reads it back."""
        return {"format": FORMAT, "version": VERSION, **{k: v for k, v in asdict(self).items() if k != "path"}}

    @property
    def holds(self) -> str:
        """Names the records, for a message."""
        names = [entry.id for entry in self.records]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return f"it holds {len(names)} records: {', '.join(names[:5])}{more}"

    def tensors(self) -> dict[str, np.memmap]:
        """Map each tensor of the data file; 16-bit floats come as int16 bits, for numpy has no bfloat16."""
        with open(self.data, "rb") as handle:
            header = json.loads(handle.read(self.header_bytes)[8:])
        kinds = {"BF16": np.int16, "F16": np.int16, "F32": np.float32, "I32": np.int32, "U8": np.uint8}
        out = {}
        for name, info in header.items():
            offset = self.header_bytes + info["data_offsets"][0]
            shape = tuple(info["shape"])
            out[name] = np.memmap(self.data, dtype=kinds[info["dtype"]], mode="r", offset=offset, shape=shape)
        return out

    def verify(self) -> None:
        """Read every byte and compare with the checksums.

        Raises:
            IntegrityError: naming the shard and every damaged record.
        """
        self.check()
        tensors = self.tensors()
        bad = []
        for entry in self.records:
            rows = slice(entry.start, entry.start + entry.tokens)
            tokens_sha, sha = _hashes(
                [np.ascontiguousarray(t[rows]).reshape(-1).view(np.uint8) for t in tensors.values()]
            )
            if (tokens_sha, sha) != (entry.tokens_sha256, entry.sha256):
                bad.append(entry.id)
        if bad:
            why = f"checksums differ for {len(bad)} of {len(self.records)} records: {', '.join(bad[:5])}"
            raise IntegrityError("a shard is damaged", where=str(self.data), why=why, mend=MEND)


def supervised_count(loss_mask: torch.Tensor) -> int:
    """Number of learnable tokens: mask on, and two tokens before it to predict it from. `loss_mask` is [T]."""
    return int(loss_mask[2:].sum())


def tokens_sha256(input_ids: Any, loss_mask: Any) -> str:
    """Checksum of a record's tokens and mask (sequences or tensors [T]), as in `Entry.tokens_sha256`."""
    ids = np.asarray(input_ids, dtype=np.int32)
    mask = np.asarray(loss_mask, dtype=np.uint8)
    return hashlib.sha256(ids.tobytes() + mask.tobytes()).hexdigest()


def write_shard(path: Path, samples: Sequence[CapturedSample], sites: Sequence[str], dtype: str) -> Shard:
    """Write a shard under a name that only this writer uses. `path` is the sidecar's; its data file has its name."""
    shard = _write_data(path, path.with_suffix(".safetensors").name, samples, sites, dtype)
    write_json(path, shard.to_dict())
    return shard


def publish(
    store: Place, name: str, samples: Sequence[CapturedSample], sites: Sequence[str], manifest: StoreManifest
) -> Shard:
    """Write `samples` as shard `name`, unless another writer published it first; any number may try at once.

    The data file gets a name of its own; then the sidecar `shard-<name>.json` is created exclusively. The first writer
    wins: the others remove their data file. A crash in between leaves a data file that no sidecar names, which readers
    ignore; see `remove_orphans`.

    Returns:
        The shard that is in the store now, the winner's: this writer's if `samples` are what it holds.

    Raises:
        OSError: the disk is full or the file cannot be written.
        IntegrityError: the winner's sidecar is not readable.
    """
    path = store / f"shard-{name}.json"
    shard = _write_data(path, f"shard-{name}.{uuid.uuid4().hex[:16]}.safetensors", samples, sites, manifest.dtype)
    try:
        create(path, json.dumps(shard.to_dict(), indent=2, ensure_ascii=False) + "\n")
        winner = Shard.read(path)  # the sidecar decides, whatever the file system's answer was
    except BaseException:
        if not path.exists():
            remove(shard.data)
        raise
    if winner.data_name != shard.data_name:
        remove(shard.data)
    return winner


def remove_orphans(store: Place, age: float = ORPHAN_AGE) -> list[str]:
    """Remove data files that no sidecar can name any more; safe beside living writers. Returns their names.

    A data file is surely dead when the sidecar of its shard names another one, for a sidecar is created once: its
    writer lost and will remove it itself, or is gone. Where there is no sidecar, its writer may be about to create
    it, which takes milliseconds: the file is dead once it is `age` seconds old. Files of version 1 are left alone.
    """
    removed = []
    now = time.time()
    for path in store.glob("shard-*.safetensors"):
        match = _DATA_NAME.fullmatch(path.name)
        if match is None:
            continue
        sidecar = path.parent / f"shard-{match['name']}.json"
        if Shard.read(sidecar).data_name != path.name if sidecar.exists() else now - modified(path) > age:
            remove(path)
            removed.append(path.name)
    return removed


def _write_data(
    path: Path, data_name: str, samples: Sequence[CapturedSample], sites: Sequence[str], dtype: str
) -> Shard:
    """Write the data file beside the sidecar `path`. Rows go straight from the samples to it: nothing is copied."""
    names = [*sites, "final"]
    header = _header(samples, names, dtype)
    with writing(path.parent / data_name) as tmp, open(tmp, "wb") as handle:
        handle.write(header)
        for name in names:
            _write_all(handle, (_bytes(_state(sample, name)) for sample in samples))
        _write_all(handle, (_bytes(sample.input_ids.to(torch.int32)) for sample in samples))
        _write_all(handle, (_bytes(sample.loss_mask.to(torch.uint8)) for sample in samples))
        size = handle.tell()
    records, start = [], 0
    for sample in samples:
        states = [_state(sample, name) for name in names]
        parts = [*states, sample.input_ids.to(torch.int32), sample.loss_mask.to(torch.uint8)]
        hashes = _hashes([_bytes(part) for part in parts])
        records.append(Entry(sample.record_id, start, sample.tokens, supervised_count(sample.loss_mask), *hashes))
        start += sample.tokens
    return Shard(path, size, len(header), hashlib.sha256(header).hexdigest(), start, tuple(records), data_name)


def _state(sample: CapturedSample, name: str) -> torch.Tensor:
    return sample.final if name == "final" else sample.sites[name]


def _header(samples: Sequence[CapturedSample], names: Sequence[str], dtype: str) -> bytes:
    """The safetensors header: its length in 8 bytes, then JSON padded with spaces to a multiple of 8."""
    tokens = sum(sample.tokens for sample in samples)
    width = samples[0].final.shape[-1]
    itemsize = getattr(torch, dtype).itemsize
    layout = [(name, CODES[dtype], [tokens, width], tokens * width * itemsize) for name in names]
    layout += [("input_ids", "I32", [tokens], tokens * 4), ("loss_mask", "U8", [tokens], tokens)]
    header, offset = {}, 0
    for name, code, shape, size in layout:
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes in memory order [n] uint8, uncopied when it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _write_all(handle: BinaryIO, parts: Iterable[np.ndarray]) -> None:
    for part in parts:
        handle.write(part.data)


def _hashes(parts: Sequence[np.ndarray]) -> tuple[str, str]:
    """(hash of the last two parts, which are ids and mask; hash of all parts)."""
    tokens = hashlib.sha256()
    for part in parts[-2:]:
        tokens.update(part.data)
    everything = hashlib.sha256()
    for part in parts:
        everything.update(part.data)
    return tokens.hexdigest(), everything.hexdigest()
