"""The options of the recipe under the real engine: stopped and gone on with, they give the very weights of one go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_toy import FITTED, toy_job, worker_environment

from eagle3.errors import ConfigError
from train.launch import run_training
from train.metrics import read_metrics

RECIPE: dict[str, Any] = {
    "feature_noise": 0.3,
    "schedule": "wsd",
    "decay_ratio": 0.5,
    "step_weights": [1.0, 0.5, 0.0],
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)


def test_gone_on_with_it_is_the_run_in_one_go(tmp_path: Path) -> None:
    whole = load_file(run_training(replace(toy_job(tmp_path / "whole", **RECIPE), model=FITTED)).weights)
    job = replace(toy_job(tmp_path / "parts", **RECIPE), model=FITTED)
    run_training(replace(job, stop_at=3))
    result = run_training(job)
    assert result.resumed_from == 3
    parts = load_file(result.weights)
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())
    rows = [row for row in read_metrics(tmp_path / "whole" / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["lr"] for row in rows] == pytest.approx([0.005, 0.01, 0.01, 0.01, 0.02 / 3, 0.01 / 3])
    assert rows[0]["loss"] == pytest.approx(rows[0]["losses"][0] + 0.5 * rows[0]["losses"][1])


def test_noise_moves_the_weights_and_guards_the_checkpoint(tmp_path: Path) -> None:
    short = {**RECIPE, "max_steps": 2}
    noisy = load_file(run_training(toy_job(tmp_path / "noisy", **short)).weights)
    quiet = load_file(run_training(toy_job(tmp_path / "quiet", **{**short, "feature_noise": 0.0})).weights)
    assert not torch.equal(noisy["fc.weight"], quiet["fc.weight"])
    with pytest.raises(ConfigError, match=r"checkpoint of another job.*train\.feature_noise"):
        run_training(toy_job(tmp_path / "noisy", **{**short, "feature_noise": 0.0}))
