"""The seal: written when a store is whole, so that a shard that went missing later is noticed."""

from __future__ import annotations

from collections.abc import Sequence

from eagle3.atomic import read_json, write_json
from eagle3.errors import IntegrityError
from eagle3.place import Place, exists, list_files, remove, sha256
from eagle3.shard_file import MEND, Shard

NAME = "complete.json"


def write_seal(store: Place, shards: Sequence[Shard]) -> bool:
    """Record the counts and the checksum of every sidecar; a sidecar holds the checksums of its data file.

    Safe without locks: the shards are listed again once the seal is written, and it is removed when one came in
    between. A shard that comes later removes the seal itself (`unseal`). So no seal outlives a shard it does not know.

    Returns:
        Whether the store is sealed.
    """
    records = {entry.id: entry for shard in shards for entry in shard.records}
    shards_by_name = {shard.path.name: sha256(shard.path) for shard in shards}
    seal = {
        "records": len(records),
        "tokens": sum(entry.tokens for entry in records.values()),
        "supervised": sum(entry.supervised for entry in records.values()),
        "shards": shards_by_name,
    }
    write_json(store / NAME, seal)
    if {path.name for path in list_files(store, "shard-*.json")} == set(shards_by_name):
        return True
    break_seal(store)
    return False


def break_seal(store: Place) -> None:
    """Remove the seal, before a store grows."""
    remove(store / NAME)


def unseal(store: Place, sidecar: str) -> None:
    """Remove a seal that does not know the shard whose sidecar has just been created."""
    if exists(store / NAME):
        try:
            if sidecar in read_json(store / NAME)["shards"]:
                return
        except (IntegrityError, KeyError):
            pass  # not whole, or removed just now
        break_seal(store)


def is_sealed(store: Place) -> bool:
    """True when the store was finished."""
    return exists(store / NAME)


def check_seal(store: Place, shards: Sequence[Shard]) -> None:
    """Compare the shards found with those sealed.

    Raises:
        IntegrityError: a shard is missing, was added, or its sidecar changed.
    """
    sealed = read_json(store / NAME, mend="delete the file and run the extract stage again")["shards"]
    found = {shard.path.name: sha256(shard.path) for shard in shards}
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
