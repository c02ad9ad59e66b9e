"""Metrics file, figures, job and result files, tracker settings, generators' state."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3.errors import ConfigError, IntegrityError
from train.config import TrackConfig, TrainConfig
from train.figures import figures, predicted_tau
from train.job import FREE_SETTINGS, LATER_SETTINGS, TrainJob, resolve
from train.metrics import MetricsLog, read_metrics
from train.rng import load_rng, save_rng
from train.track import flat, has_api_key, wandb_mode


def test_resumed_log_drops_later_rows_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in range(1, 6):
        log.write({"kind": "train", "step": step})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]  # there before any close
    log.close()
    with open(path, "a") as file:
        file.write('{"kind": "train", "st')
    log = MetricsLog(path, 3)
    log.write({"kind": "train", "step": 4})
    log.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]
    MetricsLog(path, 0).close()
    assert read_metrics(path) == []


def test_figures_that_are_measured_again_take_the_place_of_the_older_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    rows = [{"kind": "val", "step": 5}, {"kind": "eval", "step": 5, "engine": "local", "tau": 1.0}]
    rows.append({"kind": "eval", "step": 5, "engine": "sglang"})
    for row in rows:
        log.write(row)
    log.forget(kind="eval", engine="local")
    log.write({**rows[1], "tau": 2.0})
    log.close()
    assert read_metrics(path) == [rows[0], rows[2], {**rows[1], "tau": 2.0}]


def test_damage_inside_the_log_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(IntegrityError, match="line 2"):
        read_metrics(path)


def test_figures_by_hand() -> None:
    stats = torch.tensor([[6.0, 4.0], [3.0, 2.0], [2.0, 1.0], [4.0, 2.0]], dtype=torch.float64)
    row = figures(stats, [1.0, 0.5])
    assert row["losses"] == [2.0, 2.0] and row["loss"] == 3.0
    assert row["acc"] == [0.5, 0.5] and row["predicted_tau"] == 1 + 0.5 + 0.25
    assert row["supervised"] == 3
    assert predicted_tau([1.0, 1.0, 1.0]) == 4.0 and predicted_tau([0.0, 1.0]) == 1.0
    assert figures(torch.zeros(4, 2, dtype=torch.float64), [1.0, 0.5])["loss"] == 0.0


def job(folder: Path, **settings: int) -> TrainJob:
    train, wiring = TrainConfig(**settings), {"aux": ["layer_2"]}
    return TrainJob(str(folder), train, TrackConfig(), wiring, "a:b", {"x": 1}, "c:d", {}, {"store": "s"})


def test_job_survives_its_file(tmp_path: Path) -> None:
    job(tmp_path, ttt_steps=5).save(tmp_path / "job.json")
    assert TrainJob.load(tmp_path / "job.json") == job(tmp_path, ttt_steps=5)


def test_identity_holds_what_decides_the_weights_and_nothing_else(tmp_path: Path) -> None:
    one = job(tmp_path).full_identity()
    assert one["wiring"] == {"aux": ["layer_2"]} and one["store"] == "s"
    assert job(tmp_path, save_every=7, keep_checkpoints=9, processes=4).full_identity() == one
    for name in ("ttt_steps", "global_batch_size", "seed", "max_steps", "zero_stage"):
        assert job(tmp_path, **{name: 3}).full_identity() != one, name
    assert all(hasattr(TrainConfig(), name) for name in (*FREE_SETTINGS, *LATER_SETTINGS))


def test_later_settings_leave_older_checkpoints_their_identity(tmp_path: Path) -> None:
    one = job(tmp_path)
    assert not {f"train.{name}" for name in LATER_SETTINGS} & set(one.full_identity())
    one.train.objective.kind = "acceptance"
    assert one.full_identity()["train.objective"]["kind"] == "acceptance"
    one.save(tmp_path / "job.json")
    assert TrainJob.load(tmp_path / "job.json") == one


def test_a_block_that_is_chosen_leaves_older_checkpoints_their_identity(tmp_path: Path) -> None:
    assert TrainConfig().head_chunk == 0
    assert job(tmp_path).full_identity()["train.head_chunk"] == 1024  # what it was when it was not chosen
    assert job(tmp_path, head_chunk=256).full_identity()["train.head_chunk"] == 256


def test_unknown_factory_is_named() -> None:
    assert resolve("train.figures:predicted_tau") is predicted_tau
    for path in ("train.figures:nothing", "no.such.module:f", "nocolon"):
        with pytest.raises(ConfigError, match=path):
            resolve(path)


def test_tracker_mode_never_leads_to_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_mode("auto") == "offline" and wandb_mode("disabled") == "disabled"
    with pytest.raises(ConfigError, match=r"track\.wandb"):
        wandb_mode("online")
    (tmp_path / "netrc").write_text("machine wandb.example login user password x\n")
    (tmp_path / "netrc").chmod(0o600)
    assert has_api_key() and wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode("auto") == "offline"


def test_rows_flatten_to_tracker_names() -> None:
    row = {"kind": "val", "step": 3, "loss": 1.5, "acc": [0.5, 0.25], "grad_norm": None}
    assert flat(row) == {"val/loss": 1.5, "val/acc_0": 0.5, "val/acc_1": 0.25}


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    random.gauss(0, 1), np.random.standard_normal(), torch.rand(3)  # leave half-used pairs behind
    save_rng(tmp_path / "rng.safetensors")
    want = [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.rand(), torch.rand(2).tolist()]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    load_rng(tmp_path / "rng.safetensors")
    found = [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.rand(), torch.rand(2).tolist()]
    assert found == want


def test_settings_are_checked_by_name() -> None:
    with pytest.raises(ConfigError, match=r"train\.processes"):
        TrainConfig(processes=-1).validate()
    TrainConfig(processes=0).validate()
