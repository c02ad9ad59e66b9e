"""A store as one of many writers sees it: what it holds, and publishing shards that belong to no writer."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from data_prep.capture.sample import CapturedSample
from data_prep.store.encoders import Encoders
from data_prep.store.manifest import StoreManifest
from data_prep.store.reader import check_own
from data_prep.store.seal import break_seal, write_seal
from data_prep.store.shard import Entry, Shard, publish, remove_orphans
from data_prep.store.writer import cannot_write, check_sample, join_store
from eagle3.errors import IntegrityError
from eagle3.leftovers import clear_leftovers
from eagle3.place import Place, exists, list_files, modified, remove
from eagle3.shard_file import check_shards, find_shards

RETRIES = 3
TEMPORARY = re.compile(r"\.shard-(?P<name>.+?)(\.[0-9a-f]{16})?(\.safetensors|\.json)\..+\.tmp")
STALE_TEMPORARY = 24 * 3600.0  # seconds; a living writer's temporary file is written to all the time


class SharedStore:
    """Joins the store in folder `path`, made when absent; any number of processes may, on any number of nodes.

    A shard is published whole under a name that says what it holds, by whoever comes first, so no lock is needed among
    processes. Several threads of one may publish, each shards of other names.

    Raises:
        WiringError, RedraftError: the store exists with another identity, or the folder cannot be written.
        IntegrityError: a finished shard is damaged.
    """

    def __init__(self, path: Place, manifest: StoreManifest) -> None:
        self.path, self.manifest = path, manifest
        self._guard = threading.Lock()
        self.sites = [site.name for site in manifest.wiring.stored_sites]
        try:
            join_store(path, manifest)
        except OSError as err:
            raise cannot_write(path, err) from err
        self._seen: set[str] = set()
        self.done: dict[str, Entry] = {}
        shards = find_shards(path)
        check_own(shards, manifest)
        check_shards(shards)
        for shard in shards:
            self._add(shard)

    def _add(self, shard: Shard) -> None:
        with self._guard:
            self._seen.add(shard.path.name)
            self.done.update({entry.id: entry for entry in shard.records})

    def refresh(self, names: Iterable[str]) -> None:
        """Read the shards of these names that other writers published meanwhile."""
        for name in names:
            self._free_name(name)

    def _free_name(self, name: str) -> str:
        """`name`, or `name.1`, `name.2` ... when it is taken; the shards found on the way are read.

        A name is taken without all its records being there when a store was begun by another cut of the records, or
        lost a shard of such a one.
        """
        number, free = 0, name
        while f"shard-{free}.json" in self._seen or exists(self.path / f"shard-{free}.json"):
            if f"shard-{free}.json" not in self._seen:
                try:
                    self._add(Shard.read(self.path / f"shard-{free}.json"))
                except IntegrityError:
                    if exists(self.path / f"shard-{free}.json"):
                        raise
            number += 1
            free = f"{name}.{number}"
        return free

    def open_to_growth(self) -> None:
        """Withdraw the seal, before the first shard is added."""
        break_seal(self.path)

    def publish(self, name: str, samples: Sequence[CapturedSample], encoders: Encoders | None = None) -> None:
        """Write those of `samples` that the store does not hold as shard `name`, unless another writer was first.

        `encoders` encode; None = threads of its own.

        Raises:
            DataError: a sample does not hold what the manifest says.
            RedraftError: the disk is full or the file cannot be written; earlier shards are kept.
        """
        for sample in samples:
            check_sample(sample, self.manifest)
        retries = RETRIES
        while True:
            free = self._free_name(name)
            missing = [sample for sample in samples if sample.record_id not in self.done]
            if not missing:
                return
            try:
                self._add(publish(self.path, free, missing, self.sites, self.manifest, encoders))
            except FileNotFoundError as err:  # swept away under a writer that was thought dead: write it again
                retries -= 1
                if not retries:
                    raise cannot_write(self.path, err) from err
            except OSError as err:
                raise cannot_write(self.path, err) from err

    def sweep(self, names: Iterable[str]) -> None:
        """Remove the unfinished files of shards `names`, whose writer is surely dead."""
        for name in names:
            for path in list_files(self.path, f".shard-{name}.*.tmp"):
                remove(path)
            for path in list_files(self.path, f"shard-{name}.*.safetensors"):
                if not self._named(name, path.name):
                    remove(path)

    def tidy(self) -> None:
        """Remove what dead writers left of shards that are published by now, and whatever is too old.

        Beside living writers, too: one that is about to lose its race finds its file gone, and that it has lost.
        """
        remove_orphans(self.path)
        for path in list_files(self.path, ".shard-*.tmp"):
            match = TEMPORARY.fullmatch(path.name)
            try:
                published = match is not None and exists(self.path / f"shard-{match['name']}.json")
                if published or time.time() - modified(path) > STALE_TEMPORARY:
                    remove(path)
            except FileNotFoundError:
                continue
        if isinstance(self.path, Path):
            clear_leftovers(self.path)

    def _named(self, name: str, data_name: str) -> bool:
        """Whether the sidecar of shard `name`, or of one that stands in for it, names this data file."""
        stem = data_name.rsplit(".", 2)[0]  # without the random part and the suffix
        sidecar = self.path / f"{stem}.json"
        return stem != f"shard-{name}" or (exists(sidecar) and Shard.read(sidecar).data_name == data_name)

    def finish(self, expected: Collection[str]) -> bool:
        """Seal the store if it holds every `expected` record; who comes first does, the others write the same again."""
        shards = find_shards(self.path)
        if not {entry.id for shard in shards for entry in shard.records}.issuperset(expected):
            return False
        return write_seal(self.path, shards)
