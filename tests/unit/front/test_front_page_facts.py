"""What the front door hands to the page: the training's own files, the machine, the commands to go on with."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3.errors import IntegrityError
from train.front.page_facts import PageFacts, command_line, machine, serve_command

PROBES = [
    "python -m eval.probe draft --draft runs/x/served --target targets/t",
    "python -m sglang.launch_server --enable-return-aux-hidden-states",
    "python -m eval.probe live --url http://127.0.0.1:30000",
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run that has trained for eight steps."""
    monkeypatch.chdir(tmp_path)
    folder, prepared = tmp_path / "runs" / "x", tmp_path / "prepared"
    (folder / "train").mkdir(parents=True)
    prepared.mkdir()
    rows = [
        {"kind": "train", "step": k, "losses": [9.0 - k], "acc": [k / 10], "supervised": 4, "loss": 9.0 - k}
        for k in range(1, 9)
    ]
    rows.append({"kind": "val", "step": 8, "losses": [2.0], "acc": [0.7], "supervised": 4})
    (folder / "train" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = {"records": 5, "tokens": 40, "coverage": 0.9}
    report = {"vocab_size": 8, "target_vocab_size": 16, "min_coverage": 0.95, "all": whole, "domain": {"chat": whole}}
    (folder / "train" / "coverage.json").write_text(json.dumps(report))
    counts = {"train": {"records": 5, "tokens": 80, "supervised_tokens": 40}, "read": 6, "skipped": 1}
    (prepared / "manifest.json").write_text(json.dumps({"counts": counts}))
    facts = {
        "started": "2026-01-02T03:04:05+0000",
        "git": {"commit": "0123456789abcdef", "modified": True},
        "versions": {"redraft": "0.1.0"},
        "hardware": {"cpu": "a CPU", "cores": 2, "memory_bytes": 8_000_000_000, "gpus": []},
    }
    (folder / "run.json").write_text(json.dumps(facts))
    config = SimpleNamespace(
        export=SimpleNamespace(convention="sglang-0.5.23"), eval=SimpleNamespace(num_steps=3), name="x"
    )
    return SimpleNamespace(
        run_dir=folder, prepared=prepared, served=folder / "served", target_path=tmp_path / "t", config=config
    )


def test_the_page_is_told_of_the_training(run: Any) -> None:
    training = PageFacts.of(run, PROBES).training
    assert training is not None
    assert training.train.steps == [4, 8] and training.train.loss == [[6.5, 2.5]]
    assert training.validation.accuracy == [[0.7]]
    assert training.data == {"train": {"records": 5, "tokens": 80, "supervised_tokens": 40}}
    assert [(one["kind"], one["label"]) for one in training.coverage["groups"]] == [("all", ""), ("domain", "chat")]


def test_a_draft_that_was_trained_elsewhere_has_no_curves(run: Any) -> None:
    (run.run_dir / "train" / "metrics.jsonl").unlink()
    assert PageFacts.of(run, PROBES).training is None


def test_a_draft_without_coverage_or_prepared_data_keeps_its_curves(run: Any) -> None:
    (run.run_dir / "train" / "coverage.json").unlink()
    (run.prepared / "manifest.json").unlink()
    training = PageFacts.of(run, PROBES).training
    assert training is not None and training.train.steps and not training.data and not training.coverage


def test_a_damaged_file_is_refused_before_anything_is_measured(run: Any) -> None:
    (run.run_dir / "train" / "coverage.json").write_text("{")
    with pytest.raises(IntegrityError, match=r"coverage\.json"):
        PageFacts.of(run, PROBES)


def test_the_machine_is_named(run: Any) -> None:
    assert machine(run.run_dir / "run.json") == {
        "measured": "2026-01-02 03:04",
        "redraft": "0.1.0 commit 0123456789ab, with changes",
        "machine": "a CPU, 2 cores, 8 GB of memory",
    }
    assert machine(run.run_dir / "none.json") == {}


def test_every_command_is_whole_and_starts_from_here(run: Any) -> None:
    recipes = PageFacts.of(run, PROBES).recipes
    assert set(PROBES) <= set(recipes.values())
    words = {name: shlex.split(command) for name, command in recipes.items()}
    assert words["Set it beside another draft"][:4] == ["python", "-m", "eval.compare", "runs/x"]
    measure = words["Measure it in that server"]
    assert measure[measure.index("--config-path") + 1] == str(run.run_dir)  # Hydra reads it from its own folder
    assert measure[-3:] == ["stages=[eval]", "eval.engine=sglang", "eval.server.url=http://127.0.0.1:30000"]


def test_the_draft_is_served_by_the_engine_its_ids_are_for(run: Any) -> None:
    flags = shlex.split(serve_command(run))
    assert flags[flags.index("--speculative-draft-model-path") + 1] == "runs/x/served"
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == "4"
    run.config.export.convention = "vllm"
    start, said = shlex.split(serve_command(run))[:3], shlex.split(serve_command(run))[-1]
    assert start == ["vllm", "serve", "t"]
    assert json.loads(said) == {"method": "eagle3", "model": "runs/x/served", "num_speculative_tokens": 3}


def test_a_command_line_can_be_typed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = str(tmp_path / "train" / "run.py")
    assert command_line([program, "stages=[eval]", "a b"]) == "python train/run.py 'stages=[eval]' 'a b'"
