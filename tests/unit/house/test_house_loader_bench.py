"""The loader's benchmark drives the real loader on stores that are what they pretend to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.loader.__main__ import main
from benchmarks.loader.drive import PLAIN, Case, run, summary
from benchmarks.loader.need import needs, preset, rows_per_second
from benchmarks.loader.stores import SPARSE, Shape, make_store
from data_prep.store import Store

SHAPE = Shape(sites=3, hidden=128, tokens=9)


def case(store: Path, kind: str, workers: int) -> Case:
    return Case(str(store), kind, SHAPE, 2, workers, 4, 0.001, False, 2, 64)


def test_holes_take_no_disk_and_pass_the_checks(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", SPARSE, SHAPE, 300 * SHAPE.record_bytes, 1)
    opened = Store.open(store, wiring=SHAPE.wiring, unfinished=True)  # sizes and headers are checked
    assert len(opened) >= 300 and opened[200].final.shape == (9, 128)
    files = [path.stat() for path in store.glob("*.safetensors")]
    assert sum(file.st_size for file in files) > 300 * SHAPE.record_bytes
    assert sum(file.st_blocks * 512 for file in files) < sum(file.st_size for file in files) // 4


@pytest.mark.parametrize("codec", ["raw", "lossless", "fp8", "int8"])
def test_records_listed_again_hold_the_same_states(tmp_path: Path, codec: str) -> None:
    store = make_store(tmp_path / "s", codec, SHAPE, 12 * SHAPE.record_bytes, 3)
    opened = Store.open(store, wiring=SHAPE.wiring, unfinished=True)
    assert len(opened) == 12 and len(set(opened.record_ids)) == 12
    assert torch.equal(opened[1].final, opened[7].final) and not torch.equal(opened[1].final, opened[2].final)
    assert opened[1].final.float().std() > 0.5


@pytest.mark.parametrize("workers", [PLAIN, 0])
def test_a_case_counts_its_steps(tmp_path: Path, workers: int) -> None:
    store = make_store(tmp_path / "s", "int8", SHAPE, 20 * SHAPE.record_bytes, 3)
    told = run(case(store, "int8", workers))
    assert len(told["waits"]) == len(told["seconds"]) == 4 + 4
    assert 0 <= told["share"] <= 1 and told["median"] <= told["p99"] <= told["max"]
    if workers == 0:
        a_step = 2 * 8 * 4 * 128 * 2  # records x rows x states x H x 2
        assert 0 < told["spent"]["bytes"] <= 5 * a_step  # what was read before the counted steps does not count


def test_what_was_before_the_counted_steps_does_not_count(tmp_path: Path) -> None:
    one = case(tmp_path, "raw", PLAIN)
    told = summary({"waits": [9.0] * 4 + [0.0, 0.1, 0.0, 0.0], "seconds": [9.0] * 4 + [1.0] * 4}, one)
    assert told["share"] == pytest.approx(0.025) and told["max"] == 0.1 and told["median"] == 0.0
    assert told["bytes_per_s"] == pytest.approx(2 * 8 * 1024)


def test_a_nodes_needs_follow_from_the_plan() -> None:
    config = preset()
    by = {(one["codec"], one["source"]): one for one in needs(config, {"int8": 1e9})}
    rate = 8 * rows_per_second(config)
    assert by["raw", "plan"]["disk_gb_s"] == pytest.approx(rate * 57349 / 1e9)
    assert by["int8", "plan"]["disk_gb_s"] == pytest.approx(rate * 30469 / 1e9)
    assert by["int8", "plan"]["workers"] == pytest.approx(rate * 57344 / 1e9)
    assert by["raw", "plan"]["workers"] is None


def test_the_command_writes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--hidden", "128", "--tokens", "9", "--documents", "2", "--steps", "3", "--distinct", "2"]
    sizes += ["--times-memory", "1e-6", "--step-seconds", "0.001", "--sleep", "--prefetch-steps", "1"]
    assert main([*sizes, "--kinds", "holes", "--workers", "0", "--no-plain", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loader.json", "loader.txt"]
    result = json.loads((tmp_path / "loader.json").read_text())
    assert result["cases"][0]["ring_bytes"] > 0 and len(result["needs"]) == 8
