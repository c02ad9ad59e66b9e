"""Training in one process under real DeepSpeed engines: gradients, stages, exact resume, refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from train_toy import TIMES, VD, build_parts, open_source, toy_job

from eagle3.checked_json import read_checked, write_checked
from eagle3.errors import ConfigError, RedraftError
from train.batches import StepPlan, pack, read_micro_batches
from train.engine import build_engine
from train.launch import run_training
from train.losses import step_weights, ttt_loss
from train.metrics import read_metrics
from train.model import Trainee, TrainParts
from train.world import ALONE, RENDEZVOUS, joined

STAGES = [(0, "float32"), (1, "bfloat16"), (2, "float32"), (3, "float32")]


def curve(folder: Path) -> list[dict[str, Any]]:
    """Metrics rows without the one field that is wall time."""
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(folder / "metrics.jsonl")]


def assert_same_run(one: Path, other: Path) -> None:
    assert curve(one) == curve(other)
    a, b = load_file(one / "final.safetensors"), load_file(other / "final.safetensors")
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def plain_gradients(cfg: Any) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients of step 0 by plain PyTorch: all conversations in one batch, no engine."""
    source, parts = open_source("train"), build_parts()
    batch = pack([source.get(i) for i in StepPlan(24, cfg, 1, 0).global_batch(0)])
    weights = step_weights(batch.supervised(cfg.ttt_steps).sum(0), cfg.step_decay)
    loss = ttt_loss(parts.draft, batch, parts.teacher, weights, cfg.head_chunk).loss
    loss.backward()
    named = parts.draft.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}, loss.item()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], float]:
    return plain_gradients(toy_job(tmp_path_factory.mktemp("plain")).train)


@pytest.fixture(scope="module", params=STAGES, ids=lambda p: f"zero{p[0]}-{p[1]}")
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """An uninterrupted run of each ZeRO stage, and its settings."""
    folder = tmp_path_factory.mktemp("whole")
    settings = {"zero_stage": request.param[0], "dtype": request.param[1]}
    run_training(toy_job(folder, **settings))
    return folder, settings


def test_accumulated_gradients_are_those_of_the_full_batch(tmp_path: Path, plain: Any) -> None:
    cfg, source = toy_job(tmp_path).train, open_source("train")
    with joined() as world:
        plan = StepPlan(24, cfg, 1, 0)
        assert plan.accumulation == 4
        parts = build_parts()
        trainee = Trainee(TrainParts(parts.draft, parts.teacher), world.device, torch.float32, cfg.head_chunk)
        engine = build_engine(trainee, cfg, world, plan.micro, plan.accumulation)
        batches = read_micro_batches(source, plan.micro_batches(0))
        assert len({int(b.loss_mask.sum()) for b in batches}) > 1  # a mean of means would show
        counts = torch.stack([b.supervised(cfg.ttt_steps).sum(0) for b in batches]).sum(0)
        weights = step_weights(counts, cfg.step_decay) * plan.accumulation
        for number, b in enumerate(batches, 1):
            loss, _ = engine(b.features, b.token_ids, b.teacher, b.loss_mask, b.doc_lengths, weights)
            engine.backward(loss)
            if number < len(batches):
                engine.step()
        found = {name: p.grad for name, p in trainee.draft.named_parameters()}
        engine.destroy()
    want, _ = plain
    assert found.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_every_stage_starts_from_the_plain_gradient(whole: Any, plain: Any) -> None:
    folder, settings = whole
    gradients, loss = plain
    slack = 3e-2 if settings["dtype"] == "bfloat16" else 1e-4
    first = curve(folder)[0]
    assert first["loss"] == pytest.approx(loss, rel=slack)
    norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    assert first["grad_norm"] == pytest.approx(float(norm), rel=slack)


def test_final_weights_are_whole_and_named_as_served(whole: Any) -> None:
    folder, settings = whole
    state = load_file(folder / "final.safetensors")
    draft = build_parts().draft
    expected = {name: tuple(t.shape) for name, t in draft.state_dict().items() if name != "embed_tokens.weight"}
    assert {name: tuple(t.shape) for name, t in state.items()} == expected
    assert torch.equal(state["d2t"], draft.d2t) and len(state["d2t"]) == VD
    assert state["fc.weight"].dtype == getattr(torch, settings["dtype"])
    assert not torch.equal(state["fc.weight"].float(), draft.fc.weight)  # it was trained
    assert draft.fc.weight.sub(state["fc.weight"].float()).abs().max() < 0.2  # from where it began


def test_run_broken_in_mid_step_goes_on_bit_for_bit(whole: Any, tmp_path: Path) -> None:
    folder, settings = whole
    with pytest.raises(RuntimeError, match="the disk is gone"):  # in step 4 or its read-ahead; checkpoint at 2
        run_training(toy_job(tmp_path, source={"fail_after": 30}, **settings))
    assert curve(tmp_path)[-1]["step"] == 3
    result = run_training(toy_job(tmp_path, **settings))
    assert (result.resumed_from, result.steps) == (2, 6)
    assert_same_run(folder, tmp_path)


def test_sigterm_saves_and_goes_on_bit_for_bit(whole: Any, tmp_path: Path) -> None:
    folder, settings = whole
    with pytest.raises(RedraftError, match=r"asked to stop.* is saved"):
        run_training(toy_job(tmp_path, source={"term_after": 18}, **settings))
    result = run_training(toy_job(tmp_path, **settings))
    assert 0 < result.resumed_from < 6
    assert_same_run(folder, tmp_path)


def test_finished_run_asked_again_changes_nothing(whole: Any, tmp_path: Path) -> None:
    folder, settings = whole
    shutil.copytree(folder, tmp_path / "again")
    result = run_training(toy_job(tmp_path / "again", **settings))
    assert (result.resumed_from, result.steps) == (6, 6)
    assert result.train["step"] == 6 and result.val["kind"] == "val"
    assert_same_run(folder, tmp_path / "again")


def test_half_written_and_damaged_checkpoints_are_passed_over(tmp_path: Path, capsys: Any) -> None:
    run_training(toy_job(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    checkpoints = tmp_path / "b" / "checkpoints"
    (checkpoints / "step-00000006" / "complete.json").unlink()
    result = run_training(toy_job(tmp_path / "b"))
    assert result.resumed_from == 4
    assert "it was not written to its end" in capsys.readouterr().out
    assert_same_run(tmp_path / "a", tmp_path / "b")
    file = checkpoints / "step-00000006" / "mp_rank_00_model_states.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert run_training(toy_job(tmp_path / "b")).resumed_from == 4
    assert "another checksum" in capsys.readouterr().out
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_other_job_and_other_process_count_are_refused(tmp_path: Path) -> None:
    run_training(toy_job(tmp_path, max_steps=2, save_every=1))
    with pytest.raises(ConfigError, match=r"another job.*train\.lr was 0\.01 and is 0\.5") as err:
        run_training(toy_job(tmp_path, max_steps=2, lr=0.5))
    assert "\n" not in str(err.value)
    other = toy_job(tmp_path, max_steps=2)
    other.wiring = {"aux": ["layer_1", "layer_3", "layer_2"]}
    with pytest.raises(ConfigError, match="wiring was"):
        run_training(other)
    marker = tmp_path / "checkpoints" / "step-00000002" / "complete.json"
    write_checked(marker, {**read_checked(marker, ""), "processes": 2})
    with pytest.raises(ConfigError, match=r"another number of processes.*2 then, 1 now.*train\.processes=2"):
        run_training(toy_job(tmp_path, max_steps=2, save_every=1))


def test_loss_that_is_no_number_stops_with_one_line_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    job = toy_job(tmp_path, save_every=1, max_steps=6)
    plan = StepPlan(24, job.train, 1, 0)
    job.source_args = {"poison": plan.global_batch(1)[3]}
    with pytest.raises(RedraftError, match=r"loss is not a finite number.*step 2") as err:
        run_training(job)
    assert "\n" not in str(err.value)
    kept = [p.name for p in (tmp_path / "checkpoints").iterdir()]
    assert kept == ["step-00000001"]
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in curve(tmp_path))


def test_learning_happens_and_validation_comes_when_due(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 30, "save_every": 100, "val_every": 10, "warmup_ratio": 0.0}
    run_training(toy_job(tmp_path / "a", **settings))
    losses = [row["loss"] for row in curve(tmp_path / "a") if row["kind"] == "train"]
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    assert [row["step"] for row in curve(tmp_path / "a") if row["kind"] == "val"] == [10, 20, 30]


def test_offline_tracking_asks_nothing_and_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    job = toy_job(tmp_path, max_steps=2, save_every=1)
    job.track.wandb = "auto"
    run_training(job)
    ids = (tmp_path / "wandb.json").read_text()
    assert list((tmp_path / "wandb").glob("offline-run-*"))
    run_training(job)
    assert (tmp_path / "wandb.json").read_text() == ids


def test_nothing_is_compiled_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    run_training(toy_job(tmp_path, max_steps=1))
    assert not (tmp_path / "extensions").exists()


@pytest.mark.parametrize("together", [False, True])
def test_a_group_of_this_machine_is_heard_by_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    if together:  # as one of the processes that training starts
        for name, value in {**ALONE, RENDEZVOUS: str(tmp_path / "group")}.items():
            monkeypatch.setenv(name, value)
    with joined() as world:
        world.barrier()
        sockets = psutil.Process().net_connections("inet")
        assert {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN} <= {"127.0.0.1", "::1"}
