"""The seal: written when a store is whole, so that a shard that went missing later is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data_prep.store.shard import MEND, Shard
from eagle3.atomic import read_json, sha256_file, write_json
from eagle3.errors import IntegrityError

NAME = "complete.json"


def write_seal(store: Path, shards: Sequence[Shard]) -> None:
    """Record the counts and the checksum of every sidecar; a sidecar holds the checksums of its data file."""
    records = {entry.id: entry for shard in shards for entry in shard.records}
    write_json(
        store / NAME,
        {
            "records": len(records),
            "tokens": sum(entry.tokens for entry in records.values()),
            "supervised": sum(entry.supervised for entry in records.values()),
            "shards": {shard.path.name: sha256_file(shard.path) for shard in shards},
        },
    )


def break_seal(store: Path) -> None:
    """Remove the seal, before a store grows."""
    (store / NAME).unlink(missing_ok=True)


def is_sealed(store: Path) -> bool:
    """True when the store was finished."""
    return (store / NAME).is_file()


def check_seal(store: Path, shards: Sequence[Shard]) -> None:
    """Compare the shards found with those sealed.

    Raises:
        IntegrityError: a shard is missing, was added, or its sidecar changed.
    """
    sealed = read_json(store / NAME, mend="delete the file and run the extract stage again")["shards"]
    found = {shard.path.name: sha256_file(shard.path) for shard in shards}
    mend = "run the extract stage again: only what is missing is captured anew"
    missing = sorted(set(sealed) - set(found))
    if missing:
        raise IntegrityError("a shard is missing", where=str(store), why=", ".join(missing[:5]), mend=mend)
    added = sorted(set(found) - set(sealed))
    if added:
        raise IntegrityError(
            "the store holds a shard it was not sealed with", where=str(store), why=added[0], mend=mend
        )
    for name, digest in sealed.items():
        if found[name] != digest:
            raise IntegrityError(
                "a shard's sidecar was changed after the store was finished", where=str(store / name), mend=MEND
            )
