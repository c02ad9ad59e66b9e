"""Read a store at random, after refusing one that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from data_prep.capture.sample import CapturedSample
from data_prep.store.manifest import StoreManifest, refuse_difference
from data_prep.store.seal import check_seal, is_sealed
from eagle3.errors import IntegrityError, RedraftError, WiringError
from eagle3.place import Place, store_place
from eagle3.shard_file import Entry, RecordPlace, Shard, ShardFile, check_shards, find_shards, mend_of
from eagle3.wiring import Wiring


class Store:
    """An opened store: a sequence of `CapturedSample`, ordered by record id whoever wrote which shard.

    Args:
        path: the store's folder, on any file system.
        manifest: its identity.
        shards: its finished shards.
        sites: names of the sites to read.
    """

    def __init__(self, path: Place, manifest: StoreManifest, shards: list[Shard], sites: list[str]) -> None:
        self.path, self.manifest, self.shards, self.sites = path, manifest, shards, sites
        found: dict[str, tuple[Shard, int, Entry]] = {}
        for shard in shards:
            for index, entry in enumerate(shard.records):
                found.setdefault(entry.id, (shard, index, entry))  # the same record from two writers counts once
        self._places = [found[record_id] for record_id in sorted(found)]
        self._files: dict[str, ShardFile] = {}

    @classmethod
    def open(
        cls,
        path: str | Place,
        *,
        wiring: Wiring | None = None,
        target: Any = None,
        tokenizer_hash: str | None = None,
        template_hash: str | None = None,
        accept_other_wiring: bool = False,
        unfinished: bool = False,
    ) -> Store:
        """Open the store in folder `path`; each identity given must be the store's, None asks nothing.

        Args:
            path: the store's folder: a path, or a URL that `eagle3.place.store_place` reads.
            wiring: what the reader feeds its draft.
            target: the target's identity: a dict, or an object whose `to_dict` gives one.
            tokenizer_hash: the reader's tokenizer.
            template_hash: the reader's chat template.
            accept_other_wiring: read by name from a store made for another wiring on the same target, when it
                holds every site needed and the same teacher.
            unfinished: open a store that extraction has not finished.

        Raises:
            WiringError: another wiring; every slot that differs is named.
            RedraftError: another target, tokenizer or template, or the store is not finished.
            IntegrityError: a shard is missing, truncated or not a shard; its records are named.
        """
        path = store_place(path)
        manifest = StoreManifest.read(path)
        where = str(path)
        if wiring is not None:
            _check_wiring(wiring, manifest, accept_other_wiring, where)
        if target is not None:
            want = target if isinstance(target, Mapping) else target.to_dict()
            mend = "extract again with this target, or name the target that the store was made with"
            refuse_difference("the store was made with another target", want, manifest.target, where, mend)
        for name, value in (("tokenizer_hash", tokenizer_hash), ("template_hash", template_hash)):
            if value is not None and value != getattr(manifest, name):
                raise RedraftError(
                    f"the store was made with another {name.partition('_')[0].replace('template', 'chat template')}",
                    where=where,
                    why=f"its hash is {getattr(manifest, name)[:12]}, expected {value[:12]}",
                    mend="prepare and extract again with this target's folder",
                )
        shards = find_shards(path)
        if is_sealed(path):
            check_seal(path, shards)
        elif not unfinished:
            raise RedraftError(
                "the store is not finished",
                where=where,
                why=f"it holds {sum(len(s.records) for s in shards)} records so far",
                mend="run the extract stage again: it goes on where it stopped",
            )
        check_own(shards, manifest)
        check_shards(shards)
        return cls(path, manifest, shards, [site.name for site in (wiring or manifest.wiring).stored_sites])

    def __len__(self) -> int:
        return len(self._places)

    @property
    def record_ids(self) -> list[str]:
        """Record ids in index order, which is their sorted order."""
        return [entry.id for _, _, entry in self._places]

    @property
    def lengths(self) -> list[int]:
        """Tokens T of each record."""
        return [entry.tokens for _, _, entry in self._places]

    @property
    def supervised(self) -> list[int]:
        """Learnable tokens of each record (mask on, position 2 or later)."""
        return [entry.supervised for _, _, entry in self._places]

    def tokens(self, index: int) -> torch.Tensor:
        """`input_ids` [T] int64 of a record, without reading its states."""
        return self.tokens_and_mask(index)[0]

    def masks(self, index: int) -> torch.Tensor:
        """`loss_mask` [T] bool of a record, without reading its states."""
        return self.tokens_and_mask(index)[1]

    def tokens_and_mask(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, read at once."""
        file, place = self._open(index)
        return file.tokens(place)

    def place(self, index: int) -> RecordPlace:
        """Where a record lies, for `eagle3.state_read`."""
        file, place = self._open(index)
        return file.place(place)

    def __getitem__(self, index: int) -> CapturedSample:
        """Read one record, whatever the codec; its tensors are copies, independent of the file.

        Raises:
            IndexError: no such index.
            IntegrityError: the shard changed since it was opened, or the record is damaged.
        """
        file, place = self._open(index)
        input_ids, loss_mask, states = file.record(place, [*self.sites, "final"])
        return CapturedSample(
            record_id=self._places[index][2].id,
            input_ids=input_ids,
            loss_mask=loss_mask,
            final=states.pop("final"),
            sites=states,
            teacher=self.manifest.wiring.teacher,
        )

    def _open(self, index: int) -> tuple[ShardFile, int]:
        """The data file that holds a record, and the record's place in it."""
        shard, place, _ = self._places[index]
        if shard.data_name not in self._files:
            self._files[shard.data_name] = ShardFile(shard)
        return self._files[shard.data_name], place

    def verify(self, advance: Callable[[int], None] | None = None) -> None:
        """Read everything and compare with the checksums; `advance` is called with the tokens of each shard.

        Raises:
            IntegrityError: naming the first damaged shard and its damaged records.
        """
        for shard in self.shards:
            shard.verify()
            if advance:
                advance(shard.tokens)


def check_own(shards: Sequence[Shard], manifest: StoreManifest) -> None:
    """Refuse a shard that was written for a store of another manifest.

    Raises:
        IntegrityError: naming it and its records.
    """
    for shard in shards:
        why = ""
        if shard.codec != manifest.codec:
            why = f"its states are kept as {shard.codec}, the store's as {manifest.codec}"
        elif shard.store not in ("", manifest.key):
            why = "it was written for a store of another manifest"
        if why:
            mend = mend_of(shard.path.parent)
            raise IntegrityError(
                "a shard of another store", where=str(shard.path), why=f"{why}; {shard.holds}", mend=mend
            )


def _check_wiring(wanted: Wiring, manifest: StoreManifest, accept_other: bool, where: str) -> None:
    """Same wiring, or (when accepted) one whose sites the store holds, with the same teacher and target shape."""
    found = manifest.wiring
    missing = [site.name for site in wanted.stored_sites if site not in found.stored_sites]
    same_but_aux = not wanted.differences(Wiring(wanted.aux, *_shape(found)))
    readable = not missing and same_but_aux
    if accept_other and readable:
        return
    if accept_other and missing:
        raise WiringError(
            "the store lacks a site that the wiring needs",
            where=where,
            why=f"no {', '.join(missing)}; it holds {', '.join(s.name for s in found.stored_sites)}",
            mend="extract again with this wiring",
            page="formats",
        )
    by_name = ", or set store.accept_other_wiring=true: the store holds every site needed" if readable else ""
    wanted.check_same(found, where=where, mend=f"extract again with this wiring{by_name}")


def _shape(wiring: Wiring) -> tuple[str, str, int, int]:
    return wiring.teacher, wiring.model_type, wiring.num_layers, wiring.hidden_size
