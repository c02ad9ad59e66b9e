"""Training over two processes: the same curve as one, failures told in one line, exact resume after kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_toy import FITTED, TIMES, toy_job, worker_environment

from eagle3.errors import RedraftError
from train.job import TrainJob
from train.launch import run_training
from train.metrics import read_metrics


def job(folder: Path, **settings: Any) -> TrainJob:
    """The toy job with a fitted start: the fit, too, must be the same for any number of processes."""
    return replace(toy_job(folder, **settings), model=FITTED)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of two processes, ZeRO stage 2."""
    folder = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in worker_environment().items():
            patch.setenv(name, value)
        run_training(job(folder, zero_stage=2, processes=2))
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job in one process."""
    folder = tmp_path_factory.mktemp("one")
    run_training(job(folder))
    return folder


def assert_same_curve(one: Path, two: Path) -> None:
    assert [(r["kind"], r["step"]) for r in rows(one)] == [(r["kind"], r["step"]) for r in rows(two)]
    for a, b in zip(rows(one), rows(two), strict=True):
        assert (a["supervised"], a["acc"]) == (b["supervised"], b["acc"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a.get("grad_norm", 0.0) == pytest.approx(b.get("grad_norm", 0.0), rel=1e-3)
    first, second = load_file(one / "final.safetensors"), load_file(two / "final.safetensors")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, second[name], rtol=1e-2, atol=1e-3, msg=name)
        else:
            assert torch.equal(tensor, second[name])


def test_two_processes_draw_the_curve_of_one(one: Path, two: Path) -> None:
    assert_same_curve(one, two)


def test_two_partitioned_processes_draw_the_curve_of_one(one: Path, tmp_path: Path) -> None:
    run_training(job(tmp_path, zero_stage=3, processes=2))
    assert_same_curve(one, tmp_path)


def _children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                    found.append(int(entry.name))
            except (OSError, IndexError):
                continue
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _wait_for(what: Any, seconds: float = 400) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_killed_training_takes_its_workers_along_and_goes_on_bit_for_bit(two: Path, tmp_path: Path) -> None:
    job(tmp_path, zero_stage=2, processes=2, save_every=2, source={"wait": 0.15}).save(tmp_path / "asked.json")
    code = (
        "from pathlib import Path; from train.job import TrainJob; from train.launch import run_training\n"
        f"run_training(TrainJob.load(Path({str(tmp_path / 'asked.json')!r})))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    try:
        _wait_for(lambda: parent.poll() is not None or len(rows(tmp_path)) >= 3)  # step 2 is saved, step 3 is done
        workers = _children(parent.pid)
        assert len(workers) == 2
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    _wait_for(lambda: not any(map(_alive, workers)), 60)
    assert not (tmp_path / "final.safetensors").exists()
    result = run_training(job(tmp_path, zero_stage=2, processes=2))
    assert result.resumed_from in (2, 4)
    assert rows(tmp_path) == rows(two)
    a, b = load_file(tmp_path / "final.safetensors"), load_file(two / "final.safetensors")
    assert [name for name in b if not torch.equal(a[name], b[name])] == []


def test_a_failing_process_ends_all_with_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "worker-error-0.json").write_text(json.dumps({"what": "stale", "kind": "DataError"}))
    with pytest.raises(RedraftError, match="loss is not a finite number") as err:
        run_training(toy_job(tmp_path, source={"poison": 3}, processes=2))
    assert "\n" not in str(err.value)
