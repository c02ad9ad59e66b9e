"""The model card in the served folder, and what the tracker is given: made of what the stages have left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from test_eval_stage import FakeEngine, Run, engine, run  # noqa: F401, fixtures
from wandb_file import runs

from eagle3.atomic import write_json
from eagle3.checkpoint import load_served
from eagle3.errors import ConfigError
from train.config import TrackConfig
from train.front import accept
from train.front.config import CardConfig
from train.front.model_card import write_card
from train.front.publish import publish
from train.track import Tracker

ROW = {"kind": "train", "step": 1, "loss": 2.5, "acc": [0.5, 0.25]}


def trained(run: Run) -> Path:  # noqa: F811
    """What the stages before the export leave of a training."""
    run.config.paths.prepared, run.config.paths.store = str(run.run_dir / "prepared"), str(run.run_dir / "store")
    folder = run.run_dir / "train"
    folder.mkdir(exist_ok=True)
    write_json(folder / "result.json", {"steps": 1234, "val": {"acc": [0.8, 0.5, 0.4]}})
    counts = {
        "train": {"records": 1999, "tokens": 80000, "supervised_tokens": 60000},
        "val": {"records": 21, "tokens": 900, "supervised_tokens": 700},
        "skipped": 0,
    }
    run.prepared.mkdir(exist_ok=True)
    write_json(run.prepared / "manifest.json", {"counts": counts})
    run.config.data.sources = [str(run.run_dir / "secret place" / "answers.jsonl"), "org/open-set"]
    return folder


def card(run: Run) -> tuple[dict[str, Any], str]:  # noqa: F811
    """Metadata and text."""
    whole = ModelCard.load(run.served / "README.md")
    return whole.data.to_dict(), " ".join(whole.text.split())


def test_the_card_tells_the_draft_and_after_the_measure_its_accept_length(run: Run, engine: FakeEngine) -> None:  # noqa: F811
    trained(run)
    write_card(run)
    data, text = card(run)
    assert data["base_model"] == "tiny" and "license" not in data and "eagle3" in data["tags"]
    assert "| predicted on held-out data | 2.20 | | 3 |" in text and "not measured yet" in text
    assert "0. what enters layer 1 1. what enters layer 3 2. what enters layer 5" in text
    for name, ids in json.loads((run.served / "config.json").read_text())["redraft"]["ids"].items():
        assert f"| {name} | {ids} |" in text
    assert "1,999 conversations of 80,000 tokens, of which 60,000 were learnt from; 21 more" in text
    assert "Sources: answers.jsonl, org/open-set." in text and "1,234 optimizer steps" in text
    assert "--speculative-num-steps 2" in text and '"num_speculative_tokens": 2' in text
    assert str(run.run_dir) not in text and "secret place" not in text
    first = accept.eval_inputs(run, [])
    accept.eval_stage(run)
    text = card(run)[1]
    result = json.loads((accept.eval_folder(run) / "results.json").read_text())
    for served in result["served"]:
        overall = served["overall"]
        interval = f"{overall['tau_low']:.2f} to {overall['tau_high']:.2f}"
        assert f"{served['batch']} at a time: 8 prompts, greedy | {overall['tau']:.2f} | {interval} | 3 |" in text
    assert "8 of 8 texts are token for token those of plain decoding" in text and "not measured yet" not in text
    assert accept.eval_inputs(run, []) == first  # the figures do not hang on the card
    starts = len(engine.log)
    accept.eval_stage(run)
    assert len(engine.log) == starts
    load_served(run.served, run.weights.embedding())


def test_what_is_missing_stands_in_the_card(run: Run, engine: FakeEngine) -> None:  # noqa: F811
    engine.failing = {"layer_1": {"3": "timeout after 5 s"}}
    accept.eval_stage(run)
    text = card(run)[1]
    assert "7/8 prompts" in text and "the figures are incomplete: 2 continuations failed." in text


def test_licence_and_base_model_are_the_users(run: Run) -> None:  # noqa: F811
    run.config.card = CardConfig(base_model="org/tiny-chat", license="apache-2.0")
    run.config.card.validate()
    write_card(run)
    text = (run.served / "README.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert (front["base_model"], front["license"]) == ("org/tiny-chat", "apache-2.0")
    stamp = (run.served / "README.md").stat().st_mtime_ns
    write_card(run)
    assert (run.served / "README.md").stat().st_mtime_ns == stamp  # unchanged, so left as it is


@pytest.mark.parametrize("wrong", [{"license": "Apache 2"}, {"license": "mit\nx: y"}, {"base_model": "a b"}])
def test_a_card_setting_that_the_hub_would_refuse(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"card.{next(iter(wrong))}"):
        CardConfig(**wrong).validate()


def test_one_run_of_the_tracker_holds_training_crash_and_measure(
    run: Run,  # noqa: F811
    engine: FakeEngine,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staging"))
    folder, engine.name = trained(run), "sglang"
    run.config.track = TrackConfig(group="tiny drafts", tags=["kimi", "k=2"], entity="team", artifact_mib=0)
    tracker = Tracker(folder, run.config.track, "x", {"lr": 0.5, "name": "first"}, resume_step=0)
    tracker.write(ROW)
    tracker.close(exit_code=1)  # as after a failure; a killed process says as little
    accept.eval_stage(run)
    publish(run)
    first, last = runs(folder)
    for one in (first, last):
        told = one["run"]
        assert (told.project, told.entity, told.run_group, told.job_type) == ("redraft", "team", "tiny drafts", "draft")
        assert list(told.tags) == ["kimi", "k=2"] and told.run_id == first["run"].run_id
    assert {u.key: json.loads(u.value_json) for u in first["run"].config.update}["lr"] == 0.5
    assert first["rows"][0]["train/loss"] == 2.5 and first["rows"][0]["train/acc_1"] == 0.25
    result = json.loads((accept.eval_folder(run) / "results.json").read_text())
    tau = result["served"][0]["overall"]["tau"]
    assert last["rows"][0]["eval/matched/batch_1/all/tau"] == tau and last["rows"][0]["step"] == 1234
    assert last["summary"]["predicted_tau"] == pytest.approx(2.2)
    assert last["summary"]["tau"] == last["summary"]["tau_sglang"] == tau
    (artifact,) = last["artifacts"].values()
    assert (artifact.name, artifact.type) == ("x-served", "model")
    held = {one.path: one for one in artifact.manifest.contents}
    assert set(held) == {"config.json", "README.md", "model.safetensors"}
    assert held["model.safetensors"].ref.startswith("file://")  # too large to be uploaded: by its place and size
    assert held["model.safetensors"].size == (run.served / "model.safetensors").stat().st_size
    publish(run)
    assert len(runs(folder)) == 2  # told already
    run.config.card.license = "mit"
    run.config.track.artifact_mib = 16
    write_card(run)
    (run.store).mkdir()
    (run.store / "manifest.json").write_text("{}")
    publish(run)
    artifacts = runs(folder)[2]["artifacts"]
    assert set(artifacts) == {"x-served", "x-store"}
    assert all(one.local_path for name in artifacts for one in artifacts[name].manifest.contents)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"project": "a/b"}, "track.project"),
        ({"entity": "a b"}, "track.entity"),
        ({"tags": [""]}, "track.tags"),
        ({"tags": ["x" * 65]}, "track.tags"),
        ({"group": "g" * 129}, "track.group"),
        ({"artifact_mib": -1}, "track.artifact_mib"),
    ],
)
def test_a_tracking_setting_that_the_tracker_would_refuse(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        TrackConfig(**wrong).validate()
