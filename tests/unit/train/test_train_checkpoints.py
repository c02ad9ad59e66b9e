"""Which checkpoint counts, which job may use it, and that no file's code is run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.atomic import sha256_file, write_json
from eagle3.errors import ConfigError, IntegrityError
from train.resume import Checkpoint, _drop_old, check_same_job, find_checkpoint, newest_whole
from train.world import import_deepspeed


def make(root: Path, step: int, *, marked: bool = True, **marker: Any) -> Path:
    folder = root / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "state.pt").write_bytes(bytes(range(200)))
    files = {"state.pt": {"size": 200, "sha256": sha256_file(folder / "state.pt")}}
    if marked:
        write_json(folder / "complete.json", {"step": step, "identity": {}, "processes": 1, "files": files, **marker})
    return folder


def test_newest_whole_checkpoint_wins_by_number(tmp_path: Path) -> None:
    assert newest_whole(tmp_path / "none") == (None, [])
    for step in (9, 10, 100000000):
        make(tmp_path, step)
    found, notes = newest_whole(tmp_path)
    assert found is not None and found.step == 100000000 and notes == []


@pytest.mark.parametrize("damage", ["no marker", "torn marker", "short", "flipped", "missing"])
def test_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, damage: str) -> None:
    make(tmp_path, 1)
    folder = make(tmp_path, 2, marked=damage != "no marker")
    state = folder / "state.pt"
    if damage == "torn marker":
        (folder / "complete.json").write_text('{"step": 2, "fil')
    if damage == "short":
        state.write_bytes(state.read_bytes()[:-1])
    if damage == "flipped":
        state.write_bytes(b"\xff" + state.read_bytes()[1:])
    if damage == "missing":
        state.unlink()
    found, notes = newest_whole(tmp_path)
    assert found is not None and found.step == 1
    assert len(notes) == 1 and "step-00000002" in notes[0]


def test_other_job_is_refused_with_each_difference(tmp_path: Path) -> None:
    folder = make(tmp_path, 3)
    checkpoint = Checkpoint(folder, {"step": 3, "identity": {"a": 1, "b": 2}, "processes": 2, "files": {}})
    check_same_job(checkpoint, {"b": 2, "a": 1}, 2)
    with pytest.raises(ConfigError, match="a was 1 and is 5; c was None and is 9"):
        check_same_job(checkpoint, {"a": 5, "b": 2, "c": 9}, 2)
    with pytest.raises(ConfigError, match=r"train\.processes=2"):
        check_same_job(checkpoint, {"a": 1, "b": 2}, 1)


class Evil:
    """Would create a file when unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.path,)


def test_checkpoint_file_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    import_deepspeed()
    from train.safe_checkpoint import SafeCheckpointEngine

    torch.save({"module": Evil(str(tmp_path / "owned"))}, tmp_path / "state.pt")
    with pytest.raises(IntegrityError, match=r"cannot be read safely.*state\.pt") as err:
        SafeCheckpointEngine().load(str(tmp_path / "state.pt"))
    assert not (tmp_path / "owned").exists() and "\n" not in str(err.value)
    torch.save({"step": 3}, tmp_path / "good.pt")
    assert SafeCheckpointEngine().load(str(tmp_path / "good.pt")) == {"step": 3}


def test_only_the_newest_are_kept_and_no_damaged_one_crowds_them_out(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    make(tmp_path, 9)  # passed over as damaged: training went on from step 2 and has now saved step 3
    make(tmp_path, 20, marked=False)
    _drop_old(tmp_path, tmp_path / "step-00000003", keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_what_a_killed_run_left_unfinished_goes_when_training_goes_on(tmp_path: Path) -> None:
    class Alone:
        first, size = True, 1

        def broadcast(self, value: Any) -> Any:
            return value

    world: Any = Alone()
    make(tmp_path, 1)
    make(tmp_path, 2, marked=False)  # half-deleted
    make(tmp_path, 3)
    make(tmp_path, 4, marked=False)  # half-written
    found, notes = find_checkpoint(tmp_path, {}, world)
    assert found is not None and found.step == 3 and len(notes) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]
