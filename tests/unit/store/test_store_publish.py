"""Shards of one name from many writers: one wins, whole; the rest leave nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data_prep.capture.sample import CapturedSample
from data_prep.store import StoreManifest
from data_prep.store import shard as shard_module
from data_prep.store.shard import Shard, publish, remove_orphans, write_shard
from eagle3.errors import IntegrityError
from eagle3.shard_file import ShardFile

Maker = Callable[..., CapturedSample]
SITES = ["layer_3", "layer_1"]


def data_files(store: Path) -> list[str]:
    return sorted(path.name for path in store.glob("*.safetensors"))


def test_the_first_writer_wins_and_the_second_leaves_nothing(
    tmp_path: Path, manifest: StoreManifest, make_sample: Maker
) -> None:
    first = publish(tmp_path, "b-00007", [make_sample("r0")], SITES, manifest)
    second = publish(tmp_path, "b-00007", [make_sample("r0", seed=9)], SITES, manifest)
    assert second == first == Shard.read(tmp_path / "shard-b-00007.json")
    assert data_files(tmp_path) == [first.data_name]
    first.verify()
    other = publish(tmp_path, "b-00008", [make_sample("r1")], SITES, manifest)
    assert data_files(tmp_path) == sorted([first.data_name, other.data_name])
    assert not list(tmp_path.glob(".*"))


def test_of_many_threads_at_once_exactly_one_wins(tmp_path: Path, manifest: StoreManifest, make_sample: Maker) -> None:
    gate, won = threading.Barrier(8), []

    def race(seed: int) -> None:
        sample = make_sample("r0", seed=seed)
        gate.wait()
        won.append(publish(tmp_path, "x", [sample], SITES, manifest))

    threads = [threading.Thread(target=race, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 8 and len({shard.data_name for shard in won}) == 1
    assert data_files(tmp_path) == [won[0].data_name]
    won[0].verify()


def test_without_hard_links_the_sidecar_is_still_exclusive(
    tmp_path: Path, manifest: StoreManifest, make_sample: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refused)
    first = publish(tmp_path, "x", [make_sample("r0")], SITES, manifest)
    assert publish(tmp_path, "x", [make_sample("r0", seed=1)], SITES, manifest) == first
    assert data_files(tmp_path) == [first.data_name] and not list(tmp_path.glob(".*"))


def test_a_link_whose_answer_was_lost_counts_as_won(
    tmp_path: Path, manifest: StoreManifest, make_sample: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS repeats a request whose answer was lost; the repeated link finds the name taken, by itself."""
    link = os.link

    def twice(*args: Path) -> None:
        link(*args)
        link(*args)

    monkeypatch.setattr(os, "link", twice)
    shard = publish(tmp_path, "x", [make_sample("r0")], SITES, manifest)
    assert data_files(tmp_path) == [shard.data_name]
    shard.verify()


def test_a_crash_before_the_sidecar_leaves_an_orphan_that_goes_once_it_is_surely_dead(
    tmp_path: Path, manifest: StoreManifest, make_sample: Maker
) -> None:
    code = """
import os, sys
from pathlib import Path
import torch
from data_prep.capture.sample import CapturedSample
from data_prep.store import StoreManifest, shard
from eagle3.wiring import Site, Wiring
shard.create = lambda *_: os._exit(9)
state = torch.ones(3, 8).bfloat16()
sample = CapturedSample("r0", torch.ones(3).long(), torch.ones(3).bool(), {"layer_1": state}, state, "final")
manifest = StoreManifest(Wiring((Site(1),), "final", "llama", 6, 8), {}, "t")
shard.publish(Path(sys.argv[1]), "x", [sample], ["layer_1"], manifest)
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120).returncode == 9
    (orphan,) = data_files(tmp_path)
    assert remove_orphans(tmp_path) == []  # its writer might be alive
    old = os.stat(tmp_path / orphan).st_mtime - 90_000
    shard = publish(tmp_path, "x", [make_sample("r0")], SITES, manifest)
    assert remove_orphans(tmp_path) == [orphan]  # its name is taken
    assert data_files(tmp_path) == [shard.data_name]
    shard.verify()
    lonely = tmp_path / "shard-y.0123456789abcdef.safetensors"
    lonely.write_bytes(b"no sidecar was written")
    os.utime(lonely, (old, old))
    assert remove_orphans(tmp_path) == [lonely.name]


def test_a_failed_write_leaves_nothing(
    tmp_path: Path, manifest: StoreManifest, make_sample: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_module, "create", full)
    with pytest.raises(OSError, match="No space"):
        publish(tmp_path, "x", [make_sample("r0")], SITES, manifest)
    assert not list(tmp_path.iterdir())


def test_a_shard_of_version_1_is_read(tmp_path: Path, make_sample: Maker) -> None:
    sidecar = tmp_path / "shard-0-00000.json"
    sample = make_sample("r0")
    write_shard(sidecar, [sample], SITES, "bfloat16")
    raw = json.loads(sidecar.read_text())
    for key in ("data_name", "codec", "dtype", "width", "store", "checksum"):
        del raw[key]
    for entry in raw["records"]:
        del entry["sizes"], entry["xxh3"]
    sidecar.write_text(json.dumps({**raw, "version": 1}))
    shard = Shard.read(sidecar)
    shard.verify()
    assert shard.data == tmp_path / "shard-0-00000.safetensors"
    ids, mask, states = ShardFile(shard).record(0, ["final"])
    assert torch.equal(states["final"], sample.final) and torch.equal(ids, sample.input_ids)
    assert torch.equal(mask, sample.loss_mask)
    data = shard.data.read_bytes()
    shard.data.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(IntegrityError, match="checksums differ for record r0"):  # by SHA-256
        ShardFile(shard).record(0, ["final"])
    sidecar.write_text(json.dumps({**raw, "version": 3}))
    with pytest.raises(IntegrityError, match="version 3"):
        Shard.read(sidecar)
