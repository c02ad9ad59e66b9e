"""What goes into a store comes out, whoever wrote it, and the files are plain safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data_prep.capture.sample import CapturedSample
from data_prep.store import Store, StoreManifest, StoreWriter
from eagle3.errors import DataError, RedraftError
from eagle3.wiring import Site, Wiring

Maker = Callable[..., CapturedSample]


def same(a: CapturedSample, b: CapturedSample) -> bool:
    return (
        (a.record_id, a.teacher, sorted(a.sites)) == (b.record_id, b.teacher, sorted(b.sites))
        and torch.equal(a.input_ids, b.input_ids)
        and torch.equal(a.loss_mask, b.loss_mask)
        and torch.equal(a.final, b.final)
        and all(torch.equal(a.sites[name], b.sites[name]) for name in a.sites)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_random_access_gives_back_what_was_written(
    tmp_path: Path, manifest: StoreManifest, make_sample: Maker, dtype: str
) -> None:
    to = getattr(torch, dtype)
    manifest = StoreManifest(manifest.wiring, manifest.target, "t", "c", dtype)
    samples = []
    with StoreWriter(tmp_path, manifest, shard_tokens=12) as writer:
        for i, tokens in enumerate((5, 1, 9, 20, 3, 4, 4)):
            s = make_sample(f"rec-{i}", tokens)
            sites = {name: state.to(to) for name, state in s.sites.items()}
            samples.append(CapturedSample(s.record_id, s.input_ids, s.loss_mask, sites, s.final.to(to), "final"))
            writer.append(samples[-1])
        assert writer.finalize()
    store = Store.open(tmp_path)
    assert len(store) == 7 and len(store.shards) > 2
    for i in (6, 0, 3, 2, 5, 1, 4):
        assert same(store[i], samples[i])
        assert torch.equal(store.masks(i), samples[i].loss_mask) and torch.equal(store.tokens(i), samples[i].input_ids)
    assert store.lengths == [s.tokens for s in samples]
    assert store.supervised == [int(s.loss_mask[2:].sum()) for s in samples]
    assert list(store[0].sites) == ["layer_3", "layer_1"]  # the embedding is not stored
    store.verify()


def test_shards_are_plain_safetensors(tmp_path: Path, manifest: StoreManifest, make_sample: Maker) -> None:
    samples = [make_sample(f"r{i}", 3 + i) for i in range(3)]
    with StoreWriter(tmp_path, manifest, shard_tokens=100) as writer:
        for sample in samples:
            writer.append(sample)
        writer.finalize()
    tensors = load_file(tmp_path / "shard-0-00000.safetensors")
    assert sorted(tensors) == ["final", "input_ids", "layer_1", "layer_3", "loss_mask"]
    assert torch.equal(tensors["layer_1"], torch.cat([s.sites["layer_1"] for s in samples]))
    assert torch.equal(tensors["input_ids"], torch.cat([s.input_ids for s in samples]).int())


def test_strided_states_are_written_as_they_read(tmp_path: Path, manifest: StoreManifest, make_sample: Maker) -> None:
    s = make_sample("a", 6)
    wide = torch.randn(6, 16).bfloat16()
    odd = CapturedSample("a", s.input_ids, s.loss_mask, {**s.sites, "layer_1": wide[:, ::2]}, s.final, "final")
    with StoreWriter(tmp_path, manifest, shard_tokens=1) as writer:
        writer.append(odd)
        writer.finalize()
    assert torch.equal(Store.open(tmp_path)[0].sites["layer_1"], wide[:, ::2])


def test_order_does_not_depend_on_who_wrote_what(tmp_path: Path, manifest: StoreManifest, make_sample: Maker) -> None:
    samples = {f"r{i}": make_sample(f"r{i}", 4 + i) for i in range(6)}
    with StoreWriter(tmp_path, manifest, 9, worker="a") as a, StoreWriter(tmp_path, manifest, 99, worker="b") as b:
        for i, writer in enumerate((b, a, a, b, a, b)):  # interleaved, both alive
            writer.append(samples[f"r{i}"])
        assert not a.finalize(expected=samples)  # b has not flushed yet
        assert not (tmp_path / "complete.json").exists()
        assert b.finalize(expected=samples)
    store = Store.open(tmp_path)
    assert store.record_ids == sorted(samples)
    assert all(same(store[i], samples[f"r{i}"]) for i in range(6))
    assert json.loads((tmp_path / "complete.json").read_text())["records"] == 6


def test_the_same_record_from_two_workers_counts_once(
    tmp_path: Path, manifest: StoreManifest, make_sample: Maker
) -> None:
    with StoreWriter(tmp_path, manifest, 9, worker="a") as a, StoreWriter(tmp_path, manifest, 9, worker="b") as b:
        for writer in (a, b):
            writer.append(make_sample("r0"))
            writer.finalize()
    store = Store.open(tmp_path)
    assert store.record_ids == ["r0"] and len(store.shards) == 2
    assert json.loads((tmp_path / "complete.json").read_text())["tokens"] == 5


def test_one_living_writer_a_name(tmp_path: Path, manifest: StoreManifest, make_sample: Maker) -> None:
    with StoreWriter(tmp_path, manifest, 9) as writer:
        with pytest.raises(RedraftError, match="same worker name"):
            StoreWriter(tmp_path, manifest, 9)
        writer.append(make_sample("r0"))
        writer.flush()
    with StoreWriter(tmp_path, manifest, 9) as again:
        assert again.done_ids() == {"r0"}
        with pytest.raises(DataError, match="in the store already"):
            again.append(make_sample("r0"))
        again.append(make_sample("r1"))
        again.finalize()
    assert Store.open(tmp_path).record_ids == ["r0", "r1"]


def test_samples_that_do_not_fit_are_refused(tmp_path: Path, manifest: StoreManifest, make_sample: Maker) -> None:
    good = make_sample("r")
    half = {name: state.half() for name, state in good.sites.items()}
    bad = {
        "it holds layer_3, final": CapturedSample(
            "r", good.input_ids, good.loss_mask, {"layer_3": good.final}, good.final, "final"
        ),
        "its teacher": CapturedSample("r", good.input_ids, good.loss_mask, good.sites, good.final, "final_normed"),
        "float16": CapturedSample("r", good.input_ids, good.loss_mask, half, good.final, "final"),
        r"final is \(4, 8\)": CapturedSample("r", good.input_ids, good.loss_mask, good.sites, good.final[1:], "final"),
        "mask of shape": CapturedSample("r", good.input_ids, good.loss_mask[1:], good.sites, good.final, "final"),
    }
    with StoreWriter(tmp_path, manifest, 9) as writer:
        for words, sample in bad.items():
            with pytest.raises(DataError, match=words):
                writer.append(sample)


def test_a_store_is_not_continued_with_another_identity(tmp_path: Path, manifest: StoreManifest) -> None:
    StoreWriter(tmp_path, manifest, 9).close()
    other_target = StoreManifest(manifest.wiring, {**manifest.target, "weights_fingerprint": "bb"}, "tok" * 8)
    with pytest.raises(RedraftError, match=r"target\.weights_fingerprint is 'aa', expected 'bb'.*tpltpl"):
        StoreWriter(tmp_path, other_target, 9)
    shifted = Wiring((Site(4), Site(2), Site(0)), "final", "llama", 6, 8)
    with pytest.raises(RedraftError, match="slot 0 holds layer 3; expected layer 4"):
        StoreWriter(tmp_path, StoreManifest(shifted, manifest.target, "tok" * 8, "tpl" * 8), 9)
    StoreWriter(tmp_path, manifest, 9).close()  # a refusal leaves no lock behind
