"""Settings that save memory leave the weights alone, and a run with them goes on from its checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_toy import toy_job, worker_environment

from eagle3.atomic import read_json
from eagle3.errors import ConfigError
from train.launch import run_training

SAVING: dict[str, dict[str, Any]] = {
    "recompute": {"activation_checkpointing": "step"},
    "recompute, weights split": {"activation_checkpointing": "step", "zero_stage": 3},
    "offload": {"zero_stage": 1, "offload_optimizer": True},
    "stage chosen, small buckets": {"zero_stage": -1, "bucket_elements": 600},
}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return load_file(run_training(toy_job(tmp_path_factory.mktemp("plain"))).weights)


@pytest.mark.parametrize("name", SAVING)
def test_the_weights_are_those_of_the_plain_run(name: str, plain: dict[str, torch.Tensor], tmp_path: Path) -> None:
    job = toy_job(tmp_path, **SAVING[name])
    first = run_training(replace(job, stop_at=3))
    assert first.steps == 3 and first.weights == ""
    result = run_training(job)
    assert (result.steps, result.resumed_from) == (6, 3)
    got = load_file(result.weights)
    assert got.keys() == plain.keys()
    for key, tensor in plain.items():
        torch.testing.assert_close(got[key].float(), tensor.float(), rtol=1e-4, atol=1e-5, msg=key)


def test_a_checkpoint_keeps_the_stage_that_was_chosen(tmp_path: Path) -> None:
    run_training(replace(toy_job(tmp_path, zero_stage=2), stop_at=2))
    result = run_training(toy_job(tmp_path, zero_stage=-1))
    assert result.resumed_from == 2
    marker = read_json(sorted(tmp_path.glob("checkpoints/step-*"))[-1] / "complete.json")
    assert marker["identity"]["train.zero_stage"] == 2


def test_no_stage_fits_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not fit the memory at any ZeRO stage.*train\.zero_stage"):
        run_training(toy_job(tmp_path, zero_stage=-1, gpu_memory_gib=1e-5))


def test_several_nodes_without_a_launcher_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a launcher.*torchrun\.sh"):
        run_training(toy_job(tmp_path, nodes=2))


def test_a_launcher_of_another_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"2 x 2 = 4 announced, 2 started"):
        run_training(toy_job(tmp_path, nodes=2, processes=2))
