"""A store on a file system that is no local folder: the same bytes, read by ranges, sealed without locks."""

from __future__ import annotations

import functools
import http.server
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from upath import UPath

from data_prep.capture.sample import CapturedSample
from data_prep.store import Store, StoreManifest, StoreWriter, seal
from data_prep.store.seal import is_sealed, write_seal
from data_prep.store.shard import publish, remove_orphans
from data_prep.store.shared import SharedStore
from eagle3.errors import IntegrityError, RedraftError
from eagle3.place import create, store_place
from eagle3.shard_file import find_shards
from eagle3.state_codec import CODECS
from eval.probe.stored import StoreReader

Maker = Callable[..., CapturedSample]
SITES = ["layer_3", "layer_1"]


@pytest.fixture
def remote() -> Iterator[UPath]:
    place = UPath(f"memory://store-{uuid.uuid4().hex}/a/b")
    yield place
    if place.fs.exists(place.path):
        place.fs.rm(place.path, recursive=True)


def fill(store: Any, manifest: StoreManifest, make_sample: Maker, count: int = 6) -> list[CapturedSample]:
    samples = [make_sample(f"r{i}", 4 + i) for i in range(count)]
    shared = SharedStore(store, manifest)
    for at in range(0, count, 2):
        shared.publish(f"u{at:05d}", samples[at : at + 2])
    assert shared.finish([sample.record_id for sample in samples])
    return samples


@pytest.mark.parametrize("codec", list(CODECS))
def test_a_store_in_memory_is_read_as_a_local_one(
    tmp_path: Path, remote: UPath, manifest: StoreManifest, make_sample: Maker, codec: str
) -> None:
    manifest = replace(manifest, codec=codec)
    fill(tmp_path / "local", manifest, make_sample)
    fill(remote, manifest, make_sample)
    here = Store.open(f"file://{tmp_path}/local", wiring=manifest.wiring)
    there = Store.open(str(remote), wiring=manifest.wiring)
    assert isinstance(here.path, Path) and isinstance(there.path, UPath)
    assert there.record_ids == here.record_ids and len(there) == 6
    for i in (5, 0, 3, 2):
        a, b = here[i], there[i]
        assert torch.equal(a.final, b.final) and torch.equal(a.input_ids, b.input_ids)
        assert all(torch.equal(a.sites[name], b.sites[name]) for name in a.sites)
        assert torch.equal(there.masks(i), a.loss_mask) and torch.equal(there.tokens(i), a.input_ids)
    there.verify()
    records = list(StoreReader(str(remote)).spread(2, 3))
    assert [len(one.input_ids) for one in records] == [3, 3] and sorted(records[0].states) == [
        "final",
        "layer_1",
        "layer_3",
    ]


def test_only_the_bytes_of_a_record_are_read(
    remote: UPath, manifest: StoreManifest, make_sample: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(remote, manifest, make_sample)
    store = Store.open(remote)
    store[2]  # the header is read once
    read: list[int] = []
    whole = type(remote.fs).cat_file

    def counted(*args: Any, **kwargs: Any) -> bytes:
        data: bytes = whole(*args, **kwargs)
        read.append(len(data))
        return data

    monkeypatch.setattr(type(remote.fs), "cat_file", counted)
    store[2]
    assert sorted(read) == sorted([6 * 16] * 3 + [6 * 4, 6])  # three states of 8 numbers, ids, mask: six tokens


def test_damage_is_found_by_name(remote: UPath, manifest: StoreManifest, make_sample: Maker) -> None:
    fill(remote, manifest, make_sample)
    shard = find_shards(remote)[1]
    whole = shard.data.read_bytes()
    shard.data.write_bytes(whole[:-1])
    with pytest.raises(IntegrityError, match=r"truncated.*2 records: r2, r3"):
        Store.open(remote)
    at = shard.header_bytes + 3
    shard.data.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(IntegrityError, match=r"1 of 2 records: r2\."):
        Store.open(remote).verify()
    shard.data.unlink()
    with pytest.raises(IntegrityError, match="data file is missing"):
        Store.open(remote)


def test_the_first_of_two_writers_wins(remote: UPath, manifest: StoreManifest, make_sample: Maker) -> None:
    assert create(remote / "a.json", "1") and not create(remote / "a.json", "2")
    assert (remote / "a.json").read_text() == "1"
    first = publish(remote, "x", [make_sample("r0")], SITES, manifest)
    assert publish(remote, "x", [make_sample("r0", seed=5)], SITES, manifest) == first
    assert [path.name for path in remote.glob("*.safetensors")] == [first.data_name]
    (remote / "shard-x.0123456789abcdef.safetensors").write_bytes(b"of a writer that lost and died")
    assert remove_orphans(remote) == ["shard-x.0123456789abcdef.safetensors"]
    first.verify()


def test_no_seal_outlives_a_shard_that_it_does_not_know(
    remote: UPath, manifest: StoreManifest, make_sample: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every order of one writer's sealing and another's publishing, without a lock."""
    manifest.write(remote)
    publish(remote, "a", [make_sample("r0")], SITES, manifest)
    known = find_shards(remote)
    publish(remote, "b", [make_sample("r1")], SITES, manifest)  # after the sealer listed the shards
    assert not write_seal(remote, known) and not is_sealed(remote)
    assert write_seal(remote, find_shards(remote)) and is_sealed(remote)
    publish(remote, "c", [make_sample("r2")], SITES, manifest)  # after the seal
    assert not is_sealed(remote)
    known, write = find_shards(remote), seal.write_checked

    def slow(*args: Any) -> None:
        write(*args)
        publish(remote, "d", [make_sample("r3")], SITES, manifest)  # between the seal and the look back

    monkeypatch.setattr(seal, "write_checked", slow)
    assert not write_seal(remote, known) and not is_sealed(remote)
    monkeypatch.undo()
    assert write_seal(remote, find_shards(remote))
    publish(remote, "d", [make_sample("r3", seed=1)], SITES, manifest)  # loses, and adds nothing
    assert is_sealed(remote)
    assert len(Store.open(remote)) == 4


def test_a_store_is_read_over_http(tmp_path: Path, manifest: StoreManifest, make_sample: Maker) -> None:
    """A read-only copy behind a web server that knows byte ranges."""
    pytest.importorskip("aiohttp")
    samples = fill(tmp_path, replace(manifest, codec="int8"), make_sample)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Ranged, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        store = Store.open(f"http://127.0.0.1:{server.server_address[1]}/")
        assert store.record_ids == [sample.record_id for sample in samples]
        assert torch.equal(store[3].final, Store.open(tmp_path)[3].final)
        store.verify()
    finally:
        server.shutdown()
        server.server_close()


class Ranged(http.server.SimpleHTTPRequestHandler):
    """Python's file server, with byte ranges."""

    def do_GET(self) -> None:
        """A range of a file, or what the file server does."""
        path, wanted = Path(self.translate_path(self.path)), self.headers.get("Range")
        if not wanted or not path.is_file():
            return super().do_GET()
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        data = path.read_bytes()
        piece = data[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(piece) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        self.wfile.write(piece)
        return None

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.mark.parametrize("text", ["s3://key:secret@bucket/store", "sftp://me:secret@host:22/store"])
def test_a_password_in_a_path_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(RedraftError, match=r"must not carry a password.*environment") as caught:
        store_place(text)
    assert "secret" not in str(caught.value) and "key" not in str(caught.value)


def test_paths_and_unknown_file_systems(tmp_path: Path) -> None:
    assert store_place("runs/x/store") == Path("runs/x/store") and store_place(tmp_path) is tmp_path
    assert store_place(f"file://{tmp_path}") == tmp_path
    with pytest.raises(RedraftError, match=r"no file system for this path \[nowhere://x\]"):
        store_place("nowhere://x")


def test_the_writer_with_locks_says_that_it_is_local(remote: UPath, manifest: StoreManifest) -> None:
    with pytest.raises(RedraftError, match=r"only into a local folder.*file system"):
        StoreWriter(remote, manifest, 9)
    assert not (remote / "manifest.json").exists()


def test_a_manifest_names_no_credentials(remote: UPath, manifest: StoreManifest, make_sample: Maker) -> None:
    fill(remote, manifest, make_sample)
    text = " ".join(path.read_text() for path in remote.glob("*.json"))
    assert "memory:" not in text and json.loads((remote / "manifest.json").read_text())["codec"] == "raw"
