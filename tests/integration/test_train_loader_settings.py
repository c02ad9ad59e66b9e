"""Training gives the same weights and curve whatever the loader's settings, and says how long it waited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loader_job import job, make_store
from safetensors.torch import load_file
from train_toy import TIMES, worker_environment

from eagle3.errors import IntegrityError
from train.launch import run_training
from train.metrics import read_metrics

SETTINGS: list[dict[str, Any]] = [
    {"loader_workers": 0, "prefetch_steps": 1, "prefetch_mib": 1},
    {"loader_workers": 1, "prefetch_steps": 2},
    {"loader_workers": 2, "prefetch_steps": 30, "val_every": 2},
]


def curve(folder: Path) -> list[dict[str, Any]]:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    assert all(0 <= row["data_wait"] <= row["seconds"] for row in rows)
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def assert_same(one: Path, other: Path) -> None:
    assert curve(one) == curve(other) and len(curve(one)) == 6
    a, b = (load_file(folder / "final.safetensors") for folder in (one, other))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_weights_and_curve_do_not_depend_on_the_loader(tmp_path: Path, codec: str) -> None:
    store, results = make_store(tmp_path / "store", codec), []
    for number, settings in enumerate(SETTINGS):
        results.append(run_training(job(tmp_path / str(number), store, **settings)))
        assert_same(tmp_path / "0", tmp_path / str(number))
    assert all(result.val == results[0].val for result in results)


def test_a_run_goes_on_with_other_settings_bit_for_bit(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", "lossless")
    run_training(job(tmp_path / "whole", store, **SETTINGS[0]))
    first = job(tmp_path / "parts", store, **SETTINGS[0])
    first.stop_at = 3
    run_training(first)
    assert run_training(job(tmp_path / "parts", store, **SETTINGS[2])).resumed_from == 3
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_two_processes_with_workers_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)
    store = make_store(tmp_path / "store", "fp8")
    run_training(job(tmp_path / "one", store))
    run_training(job(tmp_path / "two", store, processes=2, loader_workers=1))
    for one, two in zip(curve(tmp_path / "one"), curve(tmp_path / "two"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5) and two["tokens"] == one["tokens"]


def test_damage_found_by_a_worker_reaches_the_user_whole(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", "lossless")
    path = sorted(store.glob("*.safetensors"))[0]
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[header + 8 * 60 : header + 8 * 120] = bytes(480)
    path.write_bytes(content)
    told = rf"damaged \[{path}\]: (layer_\d|final) of record r0\d: .*To mend: run python -m data_prep\.store mend"
    with pytest.raises(IntegrityError, match=told) as caught:
        run_training(job(tmp_path / "run", store, loader_workers=1))
    assert "\n" not in str(caught.value)
