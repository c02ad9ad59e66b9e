"""The tokens and masks of a converted store, in the folder layout that training reads beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

from datasets import Dataset, disable_progress_bars

from data_prep.prepare import (
    FEATURES,
    NAMED_SKIPS,
    SPLITS,
    content_hash,
    count_rows,
    in_validation,
    replace_folder,
    write_manifest,
)
from data_prep.store import Store
from data_prep.store.shard import tokens_sha256
from eagle3.errors import ConfigError, DataError


def write_prepared(store: Store, out: Path, source: str, val_fraction: float = 0.05, seed: int = 0) -> None:
    """Write `out` as the prepare stage would have, from the ids and masks that the store holds.

    Args:
        store: a finished store.
        out: folder to write; an older one there is replaced.
        source: what the records are from, for the manifest.
        val_fraction: share held out, by a hash of the record's id and `seed`.
        seed: of the split.

    Raises:
        ConfigError: a share outside [0, 1).
        DataError: too few records for both splits.
    """
    if not 0 <= val_fraction < 1:
        mend = "give a share in [0, 1)"
        raise ConfigError("bad value", where="--val-fraction", why=f"found {val_fraction}", mend=mend)
    places, skipped = _split(store, val_fraction, seed)
    _fill_empty(places, val_fraction)
    out = Path(out)
    work = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        sets = {split: _rows(store, places[split], source) for split in SPLITS}
        disable_progress_bars()
        for split in SPLITS:
            sets[split].save_to_disk(str(work / split), num_shards=None if len(sets[split]) else 1)
        manifest = {
            "tokenizer_hash": store.manifest.tokenizer_hash,
            "template_hash": store.manifest.template_hash,
            "counts": {**{s: count_rows(sets[s]) for s in SPLITS}, "read": len(store), "skipped": len(skipped)},
            "skipped": skipped[:NAMED_SKIPS],
            "settings": {"legacy": source, "val_fraction": val_fraction},
            "seed": seed,
            "content": {split: content_hash(sets[split]) for split in SPLITS},
        }
        write_manifest(work, manifest)
        replace_folder(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _split(store: Store, val_fraction: float, seed: int) -> tuple[dict[str, list[int]], list[dict[str, str]]]:
    """Indices of each split, and who is left out: nothing to learn, or the tokens and mask of an earlier record."""
    places: dict[str, list[int]] = {split: [] for split in SPLITS}
    skipped: list[dict[str, str]] = []
    seen: dict[str, str] = {}
    for index, (record_id, supervised) in enumerate(zip(store.record_ids, store.supervised, strict=True)):
        key = tokens_sha256(store.tokens(index), store.masks(index))
        twin = seen.setdefault(key, record_id)
        if twin != record_id or not supervised:
            why = f"same tokens as {twin}" if twin != record_id else "nothing to learn: no token is masked in"
            skipped.append({"record": record_id, "why": why})
            continue
        places["val" if in_validation(record_id, seed, val_fraction) else "train"].append(index)
    return places, skipped


def _fill_empty(places: dict[str, list[int]], val_fraction: float) -> None:
    """Move one record where chance left a wanted split empty."""
    for empty, other in (("val", "train"), ("train", "val")):
        if places[empty] or (empty == "val" and val_fraction == 0):
            continue
        if len(places[other]) < 2:
            why = f"{len(places[other])} records"
            raise DataError("too few records for training and validation", why=why, mend="set --val-fraction 0")
        places[empty].append(places[other].pop())


def _rows(store: Store, indices: list[int], source: str) -> Dataset:
    record_ids = store.record_ids
    return Dataset.from_dict(
        {
            "record_id": [record_ids[i] for i in indices],
            "input_ids": [store.tokens(i).tolist() for i in indices],
            "loss_mask": [store.masks(i).int().tolist() for i in indices],
            "source": [source] * len(indices),
        },
        features=FEATURES,
    )
