"""Damage of every kind is found, early and by name, and is mended by running extraction again."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.capture.sample import CapturedSample
from data_prep.store import Store, StoreManifest, StoreWriter
from eagle3.errors import IntegrityError, RedraftError

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
    words = rf"truncated.*shard-0-00001.*{size - 1} bytes where {size} were written.*2 records: r2, r3.*To mend: delete"
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
    with pytest.raises(IntegrityError, match="sidecar was changed"):
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
