"""Faults in the hidden-state store: refused by the train stage before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, load_from_disk
from planted_bench import Bench, Fault, edit_json, refusal, sites

from data_prep.capture.sample import CapturedSample
from data_prep.prepare import read_manifest, write_manifest
from data_prep.store import Store
from data_prep.store.seal import write_seal
from eagle3.atomic import write_json
from eagle3.shard_file import Shard, ShardFile, find_shards

STAGE = "train, before the first step"
Plant = Callable[[Bench, CapturedSample], CapturedSample]


def train(bench: Bench, store: Path | None = None, *more: str) -> str:
    """The train stage on a store, up to its first step: the line it is refused with, or nothing."""
    paths = [f"paths.store={store}"] if store else []
    return refusal(lambda: bench.front("train", *paths, *more, run_dir=bench.folder("run")), reaches=True)


def _train_sound(bench: Bench) -> str:
    return bench.once("train", lambda: train(bench, bench.copy_of(bench.store)))


def _wiring(bench: Bench, planted: bool) -> str:
    return train(bench, bench.store, f"wiring.aux={sites(0, 2, 4)}") if planted else _train_sound(bench)


def _manifest(key: str, value: Any, inner: str = "") -> Callable[[Bench, bool], str]:
    """A store whose manifest says something else."""

    def run(bench: Bench, planted: bool) -> str:
        if not planted:
            return _train_sound(bench)
        store = bench.copy_of(bench.store)
        edit_json(store / "manifest.json", lambda data: (data[inner] if inner else data).update({key: value}))
        return train(bench, store)

    return run


def _planted(plant: Plant) -> Callable[[Bench, bool], str]:
    """A store whose samples were changed before they were written: its checksums are right."""

    def run(bench: Bench, planted: bool) -> str:
        if planted:
            return train(bench, bench.planted_store(partial(plant, bench)))
        return bench.once("store", lambda: train(bench, bench.planted_store(lambda sample: sample)))

    return run


def _two_measured(store: Store) -> tuple[Shard, int, int]:
    """A shard and the places of two of its records that are among those computed again (three, evenly spread)."""
    measured = {store.record_ids[place * len(store) // 3] for place in range(3)}
    places = [(s, [i for i, entry in enumerate(s.records) if entry.id in measured]) for s in store.shards]
    return next((shard, found[0], found[1]) for shard, found in places if len(found) > 1)


def _swapped_states(bench: Bench, planted: bool) -> str:
    """Exchange the states of two records in the data file, as if they had been captured so: checksums agree."""
    if not planted:
        return _train_sound(bench)
    store = bench.copy_of(bench.store)
    shard, one, two = _two_measured(Store.open(store))
    file = ShardFile(shard)
    rows = min(shard.records[one].tokens, shard.records[two].tokens)
    for name in file.state_names:
        (begin, _), (other, _) = file.span(one, name), file.span(two, name)
        states: Any = np.memmap(shard.data, dtype=np.int16, mode="r+")
        first, second = (slice(at // 2, at // 2 + rows * file.width) for at in (begin, other))
        states[first], states[second] = states[second].copy(), states[first].copy()
        states.flush()
    entries = [replace(entry, **file.checksums(place)) for place, entry in enumerate(shard.records)]
    write_json(shard.path, replace(shard, records=tuple(entries)).to_dict())
    write_seal(store, find_shards(store))
    return train(bench, store)


def _flipped_bit(bench: Bench, planted: bool) -> str:
    """One bit of a record that is among those computed again before training."""
    if not planted:
        return _train_sound(bench)
    store = bench.copy_of(bench.store)
    shard, one, _ = _two_measured(Store.open(store))
    begin, _end = ShardFile(shard).span(one, "final")
    with open(str(shard.data), "r+b") as handle:
        handle.seek(begin)
        byte = handle.read(1)[0]
        handle.seek(begin)
        handle.write(bytes([byte ^ 1]))
    return train(bench, store)


def _other_text(bench: Bench, planted: bool) -> str:
    """Tokens prepared anew, with one record changed, beside the old store."""
    prepared = bench.copy_of(bench.sound_run / "prepared")
    if planted:
        rows: Any = load_from_disk(str(prepared / "train"))
        features, changed = rows.features, rows.to_list()
        changed[0]["input_ids"][5] = (changed[0]["input_ids"][5] + 1) % 300
        out = prepared / "changed"
        Dataset.from_list(changed, features=features).save_to_disk(str(out))
        (prepared / "train").rename(prepared / "old")
        out.rename(prepared / "train")
        write_manifest(prepared, read_manifest(prepared))
    return train(bench, None, f"paths.prepared={prepared}")


def _other_tokenizer(bench: Bench, planted: bool) -> str:
    """Tokens that another tokenizer made, before they are extracted."""
    prepared = bench.copy_of(bench.sound_run / "prepared")
    if planted:
        edit_json(prepared / "manifest.json", lambda data: data.update(tokenizer_hash="2" * 64))
    paths = (f"paths.prepared={prepared}", f"paths.store={bench.folder('store')}")
    return refusal(lambda: bench.front("extract", *paths, run_dir=bench.folder("run")))


def _unfinished(bench: Bench, planted: bool) -> str:
    if not planted:
        return _train_sound(bench)
    store = bench.copy_of(bench.store)
    (store / "complete.json").unlink()
    return train(bench, store)


def _truncated(bench: Bench, planted: bool) -> str:
    if not planted:
        return _train_sound(bench)
    store = bench.copy_of(bench.store)
    data = sorted(store.glob("*.safetensors"))[0]
    data.write_bytes(data.read_bytes()[:-100])
    return train(bench, store)


def _named(final: str | None = None, **named: str) -> Plant:
    return lambda bench, sample: bench.feed(sample, final, **named)


def _shifted(_bench: Bench, sample: CapturedSample) -> CapturedSample:
    return replace(sample, sites={name: state.roll(-1, 0) for name, state in sample.sites.items()})


def _halved(_bench: Bench, sample: CapturedSample) -> CapturedSample:
    return replace(sample, sites={**sample.sites, "layer_4": sample.sites["layer_4"] / 2})


NOT_ITS_NAME = "the store's tensors are not what their names say"
FAULTS = [
    Fault(
        "tokens of another tokenizer than the target's",
        "extract, before the first batch",
        _other_tokenizer,
        ("prepared with another tokenizer", "run the prepare stage again"),
    ),
    Fault("a store of another wiring", STAGE, _wiring, ("slot 0 holds layer 2; expected the embedding", "extract")),
    Fault(
        "a store of other target weights",
        STAGE,
        _manifest("weights_fingerprint", "0" * 64, "target"),
        ("another target", "weights_fingerprint"),
    ),
    Fault("a store of another tokenizer", STAGE, _manifest("tokenizer_hash", "1" * 64), ("another tokenizer",)),
    Fault(
        "layers captured one too late (off by one up)",
        STAGE,
        _planted(_named(layer_2="layer_3", layer_4="layer_5", layer_6="layer_7")),
        (NOT_ITS_NAME, "layer_2 holds layer_3, 1 layer later", "To mend"),
    ),
    Fault(
        "layers captured one too early (off by one down)",
        STAGE,
        _planted(_named(layer_2="layer_1", layer_4="layer_3", layer_6="layer_5")),
        (NOT_ITS_NAME, "layer_2 holds layer_1, 1 layer earlier"),
    ),
    Fault(
        "slots permuted: the names of two layers exchanged",
        STAGE,
        _planted(_named(layer_2="layer_6", layer_6="layer_2")),
        ("layer_2 holds layer_6", "layer_6 holds layer_2"),
    ),
    Fault(
        "the embedding captured for the first layer",
        STAGE,
        _planted(_named(layer_2="embedding", layer_4="layer_2", layer_6="layer_4")),
        ("layer_2 holds embedding",),
    ),
    Fault(
        "a normed teacher called final: it would be normed twice",
        STAGE,
        _planted(_named("final_normed")),
        ("the teacher holds final_normed", "final norm twice"),
    ),
    Fault(
        "the last layer's input as teacher (layer 59 of 61, by its like)",
        STAGE,
        _planted(_named("layer_7")),
        ("the teacher holds layer_7", "half-done states"),
    ),
    Fault(
        "a partial sum: the states of one of two ranks",
        STAGE,
        _planted(_halved),
        ("layer_4", "times 1/2"),
    ),
    Fault("rows shifted by one token", STAGE, _planted(_shifted), ("the rows are shifted by one token",)),
    Fault(
        "the states of two records exchanged inside a shard",
        STAGE,
        _swapped_states,
        ("a record's states are not those of its tokens", "another request's states"),
    ),
    Fault(
        "tokens prepared anew, the old store kept",
        STAGE,
        _other_text,
        ("another text under a record's name", "run the extract stage"),
    ),
    Fault("an extraction that was stopped half-way", STAGE, _unfinished, ("not finished", "run the extract stage")),
    Fault("a shard cut short", STAGE, _truncated, ("a shard is truncated", "data_prep.store mend")),
    Fault("one flipped bit in a shard", STAGE, _flipped_bit, ("checksums differ for record", "data_prep.store mend")),
]
