"""The seal: written when a store is whole, so that a shard that went missing later is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle3.atomic import read_json
from eagle3.checked_json import read_checked, write_checked
from eagle3.errors import IntegrityError
from eagle3.place import Place, exists, list_files, remove, sha256
from eagle3.shard_file import Shard, find_shards, mend_of

NAME = "complete.json"


def write_seal(store: Place, shards: Sequence[Shard]) -> bool:
    """Record the counts and the checksum of every sidecar; a sidecar holds the checksums of its data file.

    Safe without locks: the shards are listed again once the seal is written, and it is removed when one came in
    between. A shard that comes later removes the seal itself (`unseal`). So no seal outlives a shard it does not know.

    Returns:
        Whether the store is sealed.
    """
    seal = _sealed(shards)
    write_checked(store / NAME, seal)
    if {path.name for path in list_files(store, "shard-*.json")} == set(seal["shards"]):
        return True
    break_seal(store)
    return False


def _sealed(shards: Sequence[Shard]) -> dict[str, Any]:
    """What the seal says of these shards."""
    records = {entry.id: entry for shard in shards for entry in shard.records}
    return {
        "records": len(records),
        "tokens": sum(entry.tokens for entry in records.values()),
        "supervised": sum(entry.supervised for entry in records.values()),
        "shards": {shard.path.name: sha256(shard.path) for shard in shards},
    }


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
    sealed, found, mend = read_checked(store / NAME, mend_of(store)), _sealed(shards), mend_of(store)
    told = sealed.get("shards")
    if not isinstance(told, dict):
        raise IntegrityError("not a store's seal", where=str(store / NAME), why="it lists no shards", mend=mend)
    missing, added = sorted(set(told) - set(found["shards"])), sorted(set(found["shards"]) - set(told))
    if missing:
        raise IntegrityError("a shard is missing", where=str(store), why=", ".join(missing[:5]), mend=mend)
    if added:
        what = "the store holds a shard it was not sealed with"
        raise IntegrityError(what, where=str(store), why=added[0], mend=mend)
    for shard in shards:
        if found["shards"][shard.path.name] != told[shard.path.name]:
            what = "a shard's sidecar was changed after the store was finished"
            raise IntegrityError(what, where=str(shard.path), why=shard.holds, mend=mend)
    if sealed != found:
        raise IntegrityError("the seal counts other records", where=str(store / NAME), mend=mend)


def is_whole(store: Place) -> bool:
    """Whether the store is finished and holds every shard it was sealed with; reads the sidecars, no states.

    Raises:
        IntegrityError: a sidecar or the seal is damaged, or was changed.
    """
    if not is_sealed(store):
        return False
    names = {path.name for path in list_files(store, "shard-*.json")}
    told = read_checked(store / NAME, mend_of(store)).get("shards")
    if isinstance(told, dict) and not set(told) <= names:
        return False
    check_seal(store, find_shards(store))
    return True
