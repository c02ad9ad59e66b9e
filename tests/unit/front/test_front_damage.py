"""A finished stage whose output was damaged is not skipped: running it again is what its line says mends it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset

from data_prep import prepare
from data_prep.regenerate.part import record_line
from eagle3.atomic import write_json
from eagle3.checked_json import write_checked
from eagle3.checkpoint import sealed_config
from train.front import samples, stages
from train.front.records import StageRecord
from train.job import TrainResult


def flip(path: Path) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


def trained(folder: Path, record: StageRecord) -> tuple[Path, bool]:
    weights = folder / "final.safetensors"
    if not weights.exists():
        weights.write_bytes(bytes(range(100)))
        sha = hashlib.sha256(weights.read_bytes()).hexdigest()
        result = TrainResult(1, 0, str(weights), "", {}, {}, 0.0, sha)
        write_checked(folder / "result.json", vars(result))
    return weights, stages.trained_is_whole(folder, record)


def served(folder: Path, record: StageRecord) -> tuple[Path, bool]:
    weights = folder / "model.safetensors"
    if not weights.exists():
        weights.write_bytes(bytes(range(100)))
        config = {"hidden_size": 1, "redraft": {"format": 1}}
        write_json(folder / "config.json", sealed_config(config, hashlib.sha256(weights.read_bytes()).hexdigest()))
    return weights, stages.served_is_whole(SimpleNamespace(served=folder), record)  # type: ignore[arg-type]


def prepared(folder: Path, record: StageRecord) -> tuple[Path, bool]:
    if not (folder / "manifest.json").exists():
        for split in prepare.SPLITS:
            rows = {"record_id": ["a"], "input_ids": [[1, 2]], "loss_mask": [[0, 1]], "source": ["x"]}
            Dataset.from_dict(rows, features=prepare.FEATURES).save_to_disk(str(folder / split))
        prepare.write_manifest(folder, {"seed": 0})
    prepare._compared.clear()
    data = next((folder / "val").glob("*.arrow"))
    return data, stages.prepared_is_whole(SimpleNamespace(prepared=folder), record)  # type: ignore[arg-type]


def answered(folder: Path, record: StageRecord) -> tuple[Path, bool]:
    answers = folder / "answers.jsonl"
    if not answers.exists():
        answers.write_bytes(b"".join(record_line({"id": str(n), "text": "t" * 20}) for n in range(2)))
        write_checked(folder / "report.json", {"answers": 2})
    return answers, samples.answers_are_whole(folder, record)


@pytest.mark.parametrize("look", [trained, served, prepared, answered])
def test_damage_to_a_finished_stage_makes_it_run_again(
    tmp_path: Path, look: Callable[[Path, StageRecord], tuple[Path, bool]]
) -> None:
    record = StageRecord(tmp_path / "stage.json", {"a": 1})
    record.finish()
    path, whole = look(tmp_path, record)
    assert whole
    flip(path)
    assert look(tmp_path, record)[1] is False
    record.begin()  # what is not finished runs anyway, and is not looked at
    assert look(tmp_path, record)[1] is True
