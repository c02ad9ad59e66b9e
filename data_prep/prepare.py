"""Conversations -> prepared/: token ids and loss masks on disk, split into training and validation.

prepared/train and prepared/val are HF datasets (`load_from_disk`) with the columns record_id (string), input_ids
(list of int32, [T]), loss_mask (list of uint8, [T]) and source (string), and what the source says of a record:
conversation (its id there: several records may come from one), domain, language, provenance (JSON), finish_reason,
truncated; prepared/manifest.json says how they came about. Folders without the latter columns can be read too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value, disable_progress_bars, load_from_disk
from datasets.arrow_writer import ArrowWriter

from data_prep.config import DataConfig
from data_prep.conversations import Conversation, read_conversations
from data_prep.render import Refused, Rendered, Renderer
from data_prep.store.lock import FileLock, LockHeldError
from eagle3.atomic import sha256_file, sync
from eagle3.checked_json import read_checked, write_checked
from eagle3.errors import DataError, IntegrityError, RedraftError

FEATURES = Features(
    {
        "record_id": Value("string"),
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("uint8")),
        "source": Value("string"),
    }
)
ORIGIN = Features(
    {
        "conversation": Value("string"),
        "domain": Value("string"),
        "language": Value("string"),
        "provenance": Value("string"),
        "finish_reason": Value("string"),
        "truncated": Value("bool"),
    }
)
COLUMNS = Features({**FEATURES, **ORIGIN})
SPLITS = ("train", "val")
NAMED_SKIPS = 1000  # skipped records that the manifest names one by one; all are counted
MEND = "run the prepare stage again: it writes the folder anew, and nothing is captured again"


def prepare(cfg: DataConfig, tokenizer: Any, out: Path, advance: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Render all conversations of `cfg` and write them to the folder `out`, which appears whole or not at all.

    The split is decided by a hash of the conversation's id and `cfg.seed`, so it stays when conversations are added,
    and all records of one conversation are on one side; records whose tokens and mask equal an earlier record's are
    skipped, so that no validation record is trained on.

    Args:
        cfg: what to read and how to render it.
        tokenizer: the target's Hugging Face tokenizer.
        out: folder to write; an older one there is replaced.
        advance: called with 1 after each conversation.

    Returns:
        The manifest: tokenizer_hash, template_hash, markers, counts (records read are conversations), kinds (records
        and tokens per domain and language), skipped, settings, seed, content (a hash per split), files (one per file).

    Raises:
        RedraftError: another process prepares there.
        DataError: a source or record is bad, or nothing is left to train on; with `cfg.on_nothing_to_learn == "refuse"`
            also a record without anything to learn (NothingToLearnError).
    """
    cfg.validate()
    renderer = Renderer.of(cfg, tokenizer)
    out = Path(out)
    with _alone(out):
        return _prepare(cfg, renderer, out, advance)


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the place: runs with folders of their own may share one prepared set.

    Raises:
        RedraftError: another process prepares there.
    """
    try:
        lock = FileLock(out.with_name(f".{out.name}.lock"))
    except LockHeldError:
        mend = "wait for it, then run the same command again, or choose another paths.prepared"
        raise RedraftError("another process is preparing this data", where=str(out), mend=mend) from None
    try:
        yield
    finally:
        lock.release()


def _prepare(cfg: DataConfig, renderer: Renderer, out: Path, advance: Callable[[int], None] | None) -> dict[str, Any]:
    work = out.with_name(f".{out.name}.tmp")  # one name, so that a rerun clears what a killed run left
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        skipped, read = _render_all(cfg, renderer, work, advance)
        sets = {split: Dataset.from_file(str(work / f"{split}.arrow")) for split in SPLITS}
        sets = _never_empty(sets, cfg, skipped)
        manifest = {
            "tokenizer_hash": renderer.tokenizer_hash,
            "template_hash": renderer.template_hash,
            "markers": renderer.family,
            "counts": {**{s: count_rows(sets[s]) for s in SPLITS}, "read": read, "skipped": len(skipped)},
            "kinds": {split: count_kinds(sets[split]) for split in SPLITS},
            "skipped": skipped[:NAMED_SKIPS],
            "settings": asdict(cfg),
            "seed": cfg.seed,
            "content": {split: content_hash(sets[split]) for split in SPLITS},
        }
        disable_progress_bars()
        for split in SPLITS:
            # an empty set needs its one shard asked for, else the folder cannot be read again
            sets[split].save_to_disk(str(work / split), num_shards=None if len(sets[split]) else 1)
        del sets
        for split in SPLITS:
            (work / f"{split}.arrow").unlink()
        manifest = write_manifest(work, manifest)
        replace_folder(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return manifest


def in_validation(record_id: str, seed: int, fraction: float) -> bool:
    """Whether a record is held out: its hash, read as a number in [0, 1), lies below `fraction`."""
    return _place(record_id, seed) < fraction


def load_prepared(path: Path, split: str) -> Dataset:
    """Open one split that `prepare` wrote.

    Raises:
        IntegrityError: the folder is missing, was not written completely, was changed since, or holds other columns.
    """
    path = Path(path)
    check_files(path, split)
    try:
        dataset = load_from_disk(str(path / split))
    except Exception as err:
        why = f"{type(err).__name__}: {err}"
        raise IntegrityError("prepared data cannot be read", where=str(path / split), why=why, mend=MEND) from None
    features = dict(dataset.features) if isinstance(dataset, Dataset) else {}
    needed = {name: features.get(name) for name in FEATURES}
    if needed != dict(FEATURES) or any(COLUMNS.get(name) != kind for name, kind in features.items()):
        raise IntegrityError("prepared data has other columns", where=str(path / split), mend=MEND)
    return dataset


def read_manifest(path: Path, mend: str = MEND) -> dict[str, Any]:
    """The manifest of the prepared set in folder `path`, less its checksum.

    Raises:
        IntegrityError: it is missing, or is not what was written.
    """
    return read_checked(Path(path) / "manifest.json", mend)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Write the manifest, last of all, with the checksum of every other file of the set; returns it."""
    files = {split: {p.name: sha256_file(p) for p in sorted((folder / split).iterdir())} for split in SPLITS}
    manifest = {**manifest, "files": files}
    write_checked(folder / "manifest.json", manifest)
    return manifest


def check_files(path: Path, split: str) -> None:
    """Compare the files of a split with the checksums in the manifest; sets of older versions have none.

    A file that was compared is compared again once its size or time of change differs.

    Raises:
        IntegrityError: naming the file.
    """
    for name, digest in read_manifest(path).get("files", {}).get(split, {}).items():
        file = path / split / name
        try:
            facts = file.stat()
        except OSError:
            raise IntegrityError("a prepared file is missing", where=str(file), mend=MEND) from None
        seen = (str(file.resolve()), facts.st_size, facts.st_mtime_ns, digest)
        if seen not in _compared:
            if sha256_file(file) != digest:
                what = "a prepared file is damaged"
                raise IntegrityError(what, where=str(file), why="its checksum differs", mend=MEND)
            _compared.add(seen)


_compared: set[tuple[str, int, int, str]] = set()


def supervised_ids(dataset: Any, vocab_size: int) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Each row of a prepared set with the ids that the loss supervises in it.

    These are the masked-in positions from 2 on (the draft's first prediction is token 2).

    Raises:
        DataError: a token id lies outside the target's vocabulary.
    """
    for row in dataset.with_format("numpy"):
        ids = np.asarray(row["input_ids"])
        if len(ids) and int(ids.max()) >= vocab_size:
            raise DataError(
                "token id outside the vocabulary", where=str(row.get("record_id", "prepared data")),
                why=f"id {int(ids.max())}, the target has {vocab_size} tokens", mend="use the target's own tokenizer",
            )  # fmt: skip
        yield row, ids[2:][np.asarray(row["loss_mask"])[2:].astype(bool)]


def count_supervised(dataset: Dataset, vocab_size: int) -> np.ndarray:
    """How often each token is to be predicted: [vocab_size] int64 over the positions the loss supervises.

    Raises:
        DataError: a token id lies outside the target's vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for _, learnt in supervised_ids(dataset, vocab_size):
        counts += np.bincount(learnt, minlength=vocab_size)
    return counts


def _place(record_id: str, seed: int) -> float:
    digest = hashlib.sha256(f"{seed}:{record_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class _Sink:
    """Takes rendered records and sorts them into the splits, twins left out."""

    def __init__(self, cfg: DataConfig, work: Path) -> None:
        self.cfg = cfg
        self.skipped: list[dict[str, str]] = []
        self.usable = 0  # conversations that gave a record
        self._names: set[str] = set()
        self._seen: dict[bytes, str] = {}
        self._writers = {
            split: ArrowWriter(path=str(work / f"{split}.arrow"), features=COLUMNS, writer_batch_size=256)
            for split in SPLITS
        }

    def take(self, conv: Conversation, found: list[Rendered | Refused]) -> None:
        """Write what a conversation gave. Raises NothingToLearnError where nothing to learn shall be refused."""
        split = SPLITS[in_validation(conv.record_id, self.cfg.seed, self.cfg.val_fraction)]
        written = 0
        for one in found:
            if isinstance(one, Refused):
                if self.cfg.on_nothing_to_learn == "refuse":
                    raise one.error
                self.skipped.append({"record": one.record_id, "why": one.error.why})
            elif self._is_new(one, conv):
                self._writers[split].write(asdict(one) | _origin(conv))
                written += 1
        self.usable += bool(written)

    def _is_new(self, rendered: Rendered, conv: Conversation) -> bool:
        name = rendered.record_id
        if name in self._names:
            raise DataError(
                "two records with one id", where=f"{conv.source}, record {conv.record_id}",
                why=f"its record {name!r} is named like another conversation", mend="give each its own id",
            )  # fmt: skip
        self._names.add(name)
        twin = self._seen.setdefault(_digest(rendered), name)
        if twin != name:
            self.skipped.append({"record": name, "why": f"same tokens as {twin}"})
        return twin == name

    def close(self) -> None:
        """Finish the files."""
        for writer in self._writers.values():
            writer.finalize()
            writer.close()


def _render_all(
    cfg: DataConfig, renderer: Renderer, work: Path, advance: Callable[[int], None] | None
) -> tuple[list[dict[str, str]], int]:
    """Stream all records into work/train.arrow and work/val.arrow; return (skipped records, conversations read)."""
    sink = _Sink(cfg, work)
    read = 0
    try:
        for conv in read_conversations(cfg.sources, cfg.split):
            if cfg.max_samples and sink.usable >= cfg.max_samples:
                break
            read += 1
            sink.take(conv, renderer.records(conv))
            if advance:
                advance(1)
    finally:
        sink.close()
    return sink.skipped, read


def _origin(conv: Conversation) -> dict[str, Any]:
    return {
        "source": conv.source,
        "conversation": conv.record_id,
        "domain": conv.domain,
        "language": conv.language,
        "provenance": json.dumps(conv.provenance, ensure_ascii=False, sort_keys=True),
        "finish_reason": conv.finish_reason,
        "truncated": conv.truncated,
    }


def _digest(rendered: Rendered) -> bytes:
    ids = np.asarray(rendered.input_ids, dtype=np.int32).tobytes()
    return hashlib.sha256(ids + bytes(rendered.loss_mask)).digest()


def _never_empty(sets: dict[str, Dataset], cfg: DataConfig, skipped: list[dict[str, str]]) -> dict[str, Dataset]:
    """Move one conversation where chance left a wanted split empty. Raises DataError when there are too few."""
    wanted = 1 + (cfg.val_fraction > 0)
    total = sum(len(set(dataset["conversation"])) for dataset in sets.values())
    if total < wanted:
        why = f"{total} usable conversations, {len(skipped)} records skipped"
        if skipped:
            why += f", the first ({skipped[0]['record']}) because: {skipped[0]['why']}"
        raise DataError(
            "not enough data to train on", where=", ".join(cfg.sources), why=why,
            mend=f"give at least {wanted} records with answers to learn, or change data.max_length and data.turns",
        )  # fmt: skip
    for empty, other in (("val", "train"), ("train", "val")):
        if len(sets[empty]) == 0 and (empty == "train" or cfg.val_fraction > 0):
            owners = list(sets[other]["conversation"])
            places = {owner: _place(owner, cfg.seed) for owner in owners}
            chosen = (min if empty == "val" else max)(places, key=lambda owner: places[owner])
            moved = [i for i, owner in enumerate(owners) if owner == chosen]
            rest = [i for i, owner in enumerate(owners) if owner != chosen]
            return {empty: sets[other].select(moved), other: sets[other].select(rest)}
    return sets


def count_kinds(dataset: Dataset) -> dict[str, dict[str, int]]:
    """Records and tokens of a split by `domain/language` of their sources; "-" where a source says nothing."""
    kinds: dict[str, dict[str, int]] = {}
    for row in dataset.select_columns(["domain", "language", "input_ids"]).with_format("numpy"):
        kind = kinds.setdefault(f"{row['domain'] or '-'}/{row['language'] or '-'}", {"records": 0, "tokens": 0})
        kind["records"] += 1
        kind["tokens"] += len(row["input_ids"])
    return dict(sorted(kinds.items()))


def count_rows(dataset: Dataset) -> dict[str, int]:
    """Records, tokens and supervised tokens of a split, as the manifest has them."""
    tokens = supervised = 0
    for row in dataset.with_format("numpy"):
        tokens += len(row["input_ids"])
        supervised += int(np.asarray(row["loss_mask"])[2:].astype(bool).sum())
    return {"records": len(dataset), "tokens": tokens, "supervised_tokens": supervised}


def content_hash(dataset: Dataset) -> str:
    """SHA-256 over the ids, tokens and masks of a split."""
    digest = hashlib.sha256()
    for row in dataset:
        ids = np.asarray(row["input_ids"], dtype=np.int32).tobytes()
        digest.update(row["record_id"].encode() + b"\0" + ids + bytes(row["loss_mask"]))
    return digest.hexdigest()


def replace_folder(work: Path, out: Path) -> None:
    """Put the finished folder in place; a reader finds the old one, none, or the new one."""
    for folder, _, files in os.walk(work):
        for name in files:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        sync(Path(folder))
    old = out.with_name(f".{out.name}.old.tmp")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.replace(out, old)
    os.replace(work, out)
    sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)
