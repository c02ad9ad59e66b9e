"""Damage of every kind is found, early and by name, and is mended by running extraction again."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from data_prep.capture.sample import CapturedSample
from data_prep.store import Store, StoreManifest, StoreWriter
from data_prep.store.__main__ import main
from eagle3.errors import IntegrityError, RedraftError
from eagle3.shard_file import Shard, ShardFile

Maker = Callable[..., CapturedSample]


@pytest.fixture
def store(tmp_path: Path, manifest: StoreManifest, make_sample: Maker) -> Path:
    with StoreWriter(tmp_path / "s", manifest, 9) as writer:
        for i in range(6):
            writer.append(make_sample(f"r{i}", 5))
        writer.finalize()
    return tmp_path / "s"


def test_a_truncated_shard_is_found_at_open(store: Path, manifest: StoreManifest) -> None:
    data = store / "shard-0-00001.safetensors"
    size = data.stat().st_size
    with open(data, "r+b") as handle:
        handle.truncate(size - 1)
    said = rf"{size - 1} bytes where {size} were written.*2 records: r2, r3"
    words = rf"truncated.*shard-0-00001.*{said}.*To mend: run python -m data_prep.store mend"
    with pytest.raises(IntegrityError, match=words):
        Store.open(store)
    with pytest.raises(IntegrityError, match=words):
        StoreWriter(store, manifest, 9)


def test_a_shard_that_grew_or_lost_its_header_is_found_at_open(store: Path) -> None:
    data = store / "shard-0-00001.safetensors"
    whole = data.read_bytes()
    data.write_bytes(whole + b"x")
    with pytest.raises(IntegrityError, match="another size"):
        Store.open(store)
    data.write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
    with pytest.raises(IntegrityError, match="header is damaged"):
        Store.open(store)


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_missing_shard_is_found_at_open(store: Path, suffix: str) -> None:
    (store / f"shard-0-00001.{suffix}").unlink()
    with pytest.raises(IntegrityError, match=r"missing.*shard-0-00001"):
        Store.open(store)


def test_an_edited_sidecar_is_found_at_open(store: Path) -> None:
    sidecar = store / "shard-0-00001.json"
    sidecar.write_text(sidecar.read_text().replace('"r2"', '"rX"'))
    with pytest.raises(IntegrityError, match=r"does not fit its checksum; it holds 2 records: rX, r3"):
        Store.open(store)
    told = json.loads(sidecar.read_text())
    del told["checksum"]  # as older versions wrote it: then the seal knows
    told["records"][0]["id"] = "r2"
    sidecar.write_text(json.dumps(told))
    with pytest.raises(IntegrityError, match=r"sidecar was changed.*2 records: r2, r3"):
        Store.open(store)


def test_every_flipped_bit_is_laid_at_its_record(store: Path) -> None:
    data = store / "shard-0-00001.safetensors"
    whole = data.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    Store.open(store).verify()
    end = 3 * 160 + 40 + 10  # three states of 10 x 8 bf16, 10 int32 ids, 10 mask bytes; r2 holds the first 5 rows
    assert len(whole) == header + end
    hits = {0: "r2", 79: "r2", 80: "r3", 160: "r2", 479: "r3", 480: "r2", 519: "r3", 520: "r2", end - 1: "r3"}
    for offset, record in hits.items():
        at = header + offset
        data.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        opened = Store.open(store)  # open reads no states
        with pytest.raises(IntegrityError, match=rf"damaged.*shard-0-00001.*1 of 2 records: {record}\."):
            opened.verify()
        with pytest.raises(IntegrityError, match=rf"damaged.*shard-0-00001.*checksums differ for record {record}"):
            _ = opened[int(record[1:])]
        other = opened[5 - int(record[1:])]  # the other one of the shard is whole
        assert other.record_id == f"r{5 - int(record[1:])}"


def test_deleting_a_damaged_shard_costs_only_its_records(
    store: Path, manifest: StoreManifest, make_sample: Maker
) -> None:
    for suffix in ("json", "safetensors"):
        (store / f"shard-0-00001.{suffix}").unlink()
    with StoreWriter(store, manifest, 9) as writer:
        assert writer.done_ids() == {"r0", "r1", "r4", "r5"}
        for name in ("r2", "r3"):
            writer.append(make_sample(name, 5))
        assert writer.finalize(expected=[f"r{i}" for i in range(6)])
    Store.open(store).verify()


def test_leftovers_of_a_dead_writer_are_removed_and_not_read(
    store: Path, manifest: StoreManifest, make_sample: Maker
) -> None:
    (store / ".shard-0-00003.safetensors.999.tmp").write_bytes(b"half")
    (store / "shard-0-00003.safetensors").write_bytes(b"no sidecar was written")
    (store / "shard-0-1-00003.safetensors").write_bytes(b"another worker's, perhaps alive")
    assert len(Store.open(store)) == 6
    with StoreWriter(store, manifest, 9) as writer:
        assert not list(store.glob(".*.tmp")) and not (store / "shard-0-00003.safetensors").exists()
        assert (store / "shard-0-1-00003.safetensors").exists()
        writer.append(make_sample("r6", 5))
        writer.finalize()
    assert len(Store.open(store)) == 7


def test_a_full_disk_gives_one_line_and_keeps_finished_shards(tmp_path: Path) -> None:
    """A limit on file size stands in for the full disk; it is set in a process of its own."""
    code = """
import resource, sys, torch
from pathlib import Path
from data_prep.capture.sample import CapturedSample
from data_prep.store import StoreManifest, StoreWriter
from eagle3.errors import RedraftError
from eagle3.wiring import Site, Wiring
manifest = StoreManifest(Wiring((Site(1),), "final", "llama", 6, 8), {}, "t")
def sample(name, n):
    state = torch.ones(n, 8).bfloat16()
    return CapturedSample(name, torch.ones(n).long(), torch.ones(n).bool(), {"layer_1": state}, state, "final")
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
with StoreWriter(Path(sys.argv[1]), manifest, 10) as writer:
    writer.append(sample("small", 10))
    writer.append(sample("large", 5000))
    try:
        writer.append(sample("after", 10))
        writer.flush()
    except RedraftError as err:
        print(err)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 and "cannot write the store" in done.stdout and "File too large" in done.stdout
    store = Store.open(tmp_path, unfinished=True)
    assert store.record_ids == ["small"]
    store.verify()
    assert not list(tmp_path.glob(".*.tmp"))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 20000  # this process is not limited


def test_a_folder_that_cannot_be_written_gives_one_line(tmp_path: Path, manifest: StoreManifest) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RedraftError, match="cannot write the store"):
        StoreWriter(tmp_path / "file", manifest, 9)


def test_the_mend_removes_what_is_damaged_and_nothing_else(
    store: Path, manifest: StoreManifest, make_sample: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(store)]) == 0
    whole = {path.name: path.read_bytes() for path in store.iterdir() if path.is_file()}
    data = store / "shard-0-00001.safetensors"
    data.write_bytes(whole[data.name][:-1] + bytes([whole[data.name][-1] ^ 1]))
    assert main(["check", str(store)]) == 1
    assert "1 of 2 records: r3" in capsys.readouterr().out and data.exists()
    assert main(["mend", str(store)]) == 0
    assert {path.name for path in store.glob("*.*")} == set(whole) - {data.name, "shard-0-00001.json", "complete.json"}
    with StoreWriter(store, manifest, 9) as writer:
        for name in ("r2", "r3"):
            writer.append(make_sample(name, 5))
        assert writer.finalize(expected=[f"r{i}" for i in range(6)])
    assert main(["check", str(store)]) == 0
    assert (store / "shard-0-00003.safetensors").read_bytes() == whole[data.name]


def test_a_shard_of_another_store_is_refused(
    tmp_path: Path, store: Path, manifest: StoreManifest, make_sample: Maker
) -> None:
    other = replace(manifest, target={**manifest.target, "weights_fingerprint": "bb"})
    with StoreWriter(tmp_path / "other", other, 9) as writer:
        for i in range(6):
            writer.append(make_sample(f"r{i}", 5, seed=1))
        writer.finalize()
    for suffix in ("json", "safetensors"):
        (store / f"shard-0-00001.{suffix}").write_bytes((tmp_path / f"other/shard-0-00001.{suffix}").read_bytes())
    (store / "complete.json").unlink()  # a store that is filled in rounds has none
    with pytest.raises(IntegrityError, match=r"a shard of another store.*shard-0-00001.*r2, r3"):
        Store.open(store, unfinished=True)
    with pytest.raises(IntegrityError, match="a shard of another store"):
        StoreWriter(store, manifest, 9)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", ""])
def test_a_sidecar_that_leads_out_of_its_folder_is_refused(store: Path, name: str) -> None:
    sidecar = store / "shard-0-00001.json"
    told = json.loads(sidecar.read_text())
    del told["checksum"]
    sidecar.write_text(json.dumps({**told, "data_name": name}))
    with pytest.raises(IntegrityError, match="is no name of a file beside it"):
        Shard.read(sidecar)


def test_sizes_that_cannot_be_are_refused_before_memory_is_taken(store: Path) -> None:
    sidecar = store / "shard-0-00001.json"
    told = json.loads(sidecar.read_text())
    del told["checksum"]
    for changed in ({"header_bytes": 1 << 60}, {"bytes": -1}, {"bytes": "9"}):
        sidecar.write_text(json.dumps({**told, **changed}))
        with pytest.raises(IntegrityError, match="not a shard's sidecar"):
            Shard.read(sidecar)
    told["records"][0]["tokens"] = 1 << 50
    sidecar.write_text(json.dumps(told))
    with pytest.raises(IntegrityError, match=r"cannot be read.*outside the file.*record r2"):
        ShardFile(Shard.read(sidecar)).record(0, ["final"])
