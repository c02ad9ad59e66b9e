"""Find the damaged files of a store, and remove them, so that extraction makes these again and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from data_prep.store.manifest import StoreManifest
from data_prep.store.reader import check_own
from data_prep.store.seal import NAME, break_seal, check_seal, is_sealed
from eagle3.checked_json import read_checked
from eagle3.errors import IntegrityError, RedraftError
from eagle3.place import Place, list_files, remove
from eagle3.shard_file import Shard


@dataclass(frozen=True)
class Finding:
    """One damaged file.

    Args:
        path: a sidecar (its shard is damaged), the manifest or the seal.
        line: what is wrong, and which records it concerns.
    """

    path: Place
    line: str


def find_damage(store: Place, advance: Callable[[int], None] | None = None) -> list[Finding]:
    """Read every byte of the store in folder `store` and compare it with the checksums.

    `advance` is called with the tokens of each shard.

    Raises:
        RedraftError: there is no store.
    """
    paths = list_files(store, "shard-*.json")
    if not paths and not list_files(store, "manifest.json"):
        raise RedraftError("no store here", where=str(store), mend="give the folder of a store: paths.store of a run")
    found, whole, manifest = [], [], None
    try:
        manifest = StoreManifest.read(store)
    except RedraftError as err:
        found.append(Finding(store / "manifest.json", _line(err)))
    sealed = _sealed_names(store, found)
    for path in paths:
        try:
            shard = Shard.read(path)
            if manifest is not None:
                check_own([shard], manifest)
            shard.verify()
            whole.append(shard)
            if advance:
                advance(shard.tokens)
        except IntegrityError as err:
            found.append(Finding(path, _line(err)))
    found += [Finding(store / name, f"a shard is missing [{store / name}]") for name in sorted(sealed - _names(paths))]
    if sealed and not found:
        try:
            check_seal(store, whole)
        except IntegrityError as err:
            found.append(Finding(store / NAME, _line(err)))
    return found


def remove_damage(store: Place, findings: list[Finding]) -> None:
    """Remove the files found and the seal; a shard goes with its data file, its sidecar first.

    The seal goes first of all, so that no reader takes what is left for the whole.
    """
    if not findings:
        return
    break_seal(store)
    for finding in findings:
        remove(finding.path)
        stem = finding.path.name.removesuffix(".json")
        if stem.startswith("shard-"):
            for path in (*list_files(store, f"{stem}.safetensors"), *list_files(store, f"{stem}.*.safetensors")):
                if path.name.removeprefix(stem).count(".") <= 2:  # shard-a's, not those of shard-a.1
                    remove(path)


def _sealed_names(store: Place, found: list[Finding]) -> set[str]:
    """The shards that the seal lists; none without one, and a finding where it is damaged."""
    if not is_sealed(store):
        return set()
    try:
        told = read_checked(store / NAME, "")["shards"]
        return {str(name) for name in told}
    except (IntegrityError, KeyError, TypeError) as err:
        found.append(Finding(store / NAME, str(err)))
        return set()


def _names(paths: list[Place]) -> set[str]:
    return {path.name for path in paths}


def _line(err: RedraftError) -> str:
    return str(type(err)(err.what, where=err.where, why=err.why))
