"""Killed, on a full disk, read-only, without its store, or twice at once: each stage ends right or says one line.

The same kills in hundreds: `python tests/crash/crash_campaign.py --kills 200` (docs/crashes.md). What is repeated here
for one more stage or one more process is left to `REDRAFT_CRASH_ALL=1 pytest tests/crash`, for it takes a minute more.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from crash_campaign import campaign
from crash_child import Moment
from crash_compare import compare
from crash_disk import largest_file, nearly_full, read_only, size_of, small_disk
from crash_stages import STAGES, Ended, Stage, Workshop

KILLS = int(os.environ.get("REDRAFT_CRASH_KILLS", "2"))  # a stage
ALL = bool(os.environ.get("REDRAFT_CRASH_ALL"))
ONE_PROCESS = [name for name in STAGES if ALL or name != "train-2"]
WITH_SPACE = [name for name in STAGES if ALL or name in ("extract", "train")]
SEED = int(os.environ.get("REDRAFT_CRASH_SEED", "0"))
FULL = ("No space left", "not enough disk space")
LEAST_LIMIT = 6000  # bytes: the largest file that every stage writes before its own work


def refused(ended: Ended) -> str:
    """The one line that a run said before it left with exit code 2."""
    lines = [line for line in ended.said.splitlines() if line.startswith("error: ")]
    assert ended.code == 2 and len(lines) == 1, ended.said
    assert "Traceback" not in ended.said and "Exception ignored" not in ended.said, ended.said
    return lines[0]


def half_written(root: Path) -> list[str]:
    """Files and folders on their way to a name that they have not taken."""
    return [str(path) for path in root.rglob(".*") if not path.name.endswith(".lock")]


@pytest.mark.parametrize("name", STAGES)
def test_a_killed_stage_ends_like_an_unbroken_run(shop: Workshop, name: str) -> None:
    kills = KILLS if name in ONE_PROCESS else 1
    cases = campaign(shop, [name], kills, SEED, None)
    assert sum(len(case.kills) for case in cases) == kills
    assert [case for case in cases if not case.good] == []


def test_the_comparison_sees_a_bit_a_missing_file_and_a_left_one(shop: Workshop, tmp_path: Path) -> None:
    whole = shop.whole("train").root
    shutil.copytree(whole, tmp_path / "other", symlinks=True)
    assert compare(whole, tmp_path / "other") == []
    weights = tmp_path / "other/run/train/final.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    metrics = tmp_path / "other/run/train/metrics.jsonl"
    metrics.write_text(metrics.read_text() + metrics.read_text().splitlines()[-1] + "\n")  # a row twice
    (tmp_path / "other/run/train/.result.json.half").touch()
    next((tmp_path / "other/store").glob("shard-*.json")).unlink()
    found = compare(whole, tmp_path / "other")
    assert len(found) == 4
    for words in ("final.safetensors differs", "metrics.jsonl differs", "half is left over", ".json is missing"):
        assert any(words in line for line in found)


@pytest.mark.parametrize("name", WITH_SPACE)
def test_a_full_disk_is_one_line_and_with_space_it_ends_right(shop: Workshop, name: str, tmp_path: Path) -> None:
    whole, stage = shop.whole(name), STAGES[name]
    with small_disk(tmp_path / "disk") as disk:
        root = shop.fresh(name, str(disk / "root"))
        with nearly_full(disk, (size_of(whole.root) - size_of(root)) // 2):
            line = refused(shop.run(root, stage))
        assert any(words in line for words in FULL)
        assert half_written(root) == []
        assert shop.run(root, stage).code == 0
        assert compare(whole.root, root) == []


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_a_file_that_may_not_grow_is_one_line(shop: Workshop, name: str) -> None:
    """A limit on the size of files stands in for the full disk where no disk can be made."""
    whole, stage, root = shop.whole(name), STAGES[name], shop.fresh(name)
    limit = max(LEAST_LIMIT, largest_file(whole.root, root) // 2)
    assert "File too large" in refused(shop.run(root, stage, file_limit=limit))
    assert half_written(root) == []


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("regenerate", "paths.answers={}/answers"),
        ("prepare", "paths.prepared={}/prepared"),
        ("extract", "paths.store={}/store"),
        ("train", "run_dir={}/run"),
    ],
)
def test_a_folder_that_cannot_be_written_is_one_line(shop: Workshop, name: str, folder: str, tmp_path: Path) -> None:
    root, setting = shop.fresh(name), folder.format(tmp_path / "disk")
    if os.geteuid():
        (tmp_path / "disk").mkdir(mode=0o555)
        assert "Permission denied" in refused(shop.run(root, STAGES[name], setting))
        return
    with small_disk(tmp_path / "disk") as disk, read_only(disk):
        assert "Read-only file system" in refused(shop.run(root, STAGES[name], setting))


def test_training_only_reads_the_store_and_what_was_prepared(shop: Workshop, tmp_path: Path) -> None:
    whole, root = shop.whole("train"), shop.fresh("train")
    with small_disk(tmp_path / "disk") as disk:
        for name in ("store", "prepared"):
            shutil.move(root / name, disk / name)
        with read_only(disk):
            there = (f"paths.store={disk / 'store'}", f"paths.prepared={disk / 'prepared'}")
            ended = shop.run(root, STAGES["train"], *there)
        assert ended.code == 0, ended.said
        for name in ("store", "prepared"):
            shutil.move(disk / name, root / name)
    assert compare(whole.root, root) == []


def test_a_store_that_vanished_before_training_is_one_line(shop: Workshop) -> None:
    root = shop.fresh("train")
    shutil.rmtree(root / "store")
    line = refused(shop.run(root, STAGES["train"]))
    assert "store/manifest.json" in line and "extract stage" in line


@pytest.mark.parametrize(("name", "process"), [("train", "main"), *([("train-2", "rank0")] if ALL else [])])
def test_a_store_that_vanishes_while_training_is_one_line(shop: Workshop, name: str, process: str) -> None:
    whole, root = shop.whole(name), shop.fresh(name)
    own = [(number, call) for one, number, call in whole.calls if one == process]
    first = next(number for number, call in own if call == "os.replace" and number > _vocabulary(own))  # of the metrics
    moment = Moment(process, first, "os.replace", "after")
    line = refused(shop.run(root, STAGES[name], moment=moment, gone=root / "store"))
    assert "shard" in line and "No such file" in line
    (root / "store.gone").rename(root / "store")
    assert shop.run(root, STAGES[name]).code == 0
    assert compare(whole.root, root) == []


def _vocabulary(calls: list[tuple[int, str]]) -> int:
    """The number of the call that gives the draft vocabulary its name; -1 in a training worker, which only reads it."""
    written = next((n for n, call in calls if call == "safetensors.torch.serialize_file"), None)
    saved = next((n for n, call in calls if call == "torch.save"), None)
    if written is None or (saved is not None and saved < written):
        return -1
    return next(number for number, call in calls if call == "os.replace" and number > written)


def test_two_runs_in_one_folder_are_refused_and_a_dead_ones_lock_is_free(shop: Workshop) -> None:
    whole, root, stage = shop.whole("train"), shop.fresh("train"), STAGES["train"]
    with shop.started(root, stage) as owner:
        deadline = time.monotonic() + 120
        while f"{owner.pid} on" not in (root / "run/.lock").read_text():  # an earlier stage's stands there first
            assert owner.exitcode is None and time.monotonic() < deadline
            time.sleep(0.002)
        os.kill(owner.pid, signal.SIGSTOP)
        line = refused(shop.run(root, stage))
        assert "the run folder is in use" in line and f"process {owner.pid} on" in line
        os.kill(owner.pid, signal.SIGKILL)
        owner.join()
        ended = shop.run(root, stage)
    assert ended.code == 0, ended.said
    assert compare(whole.root, root) == []


@pytest.mark.skipif(not ALL, reason="only with REDRAFT_CRASH_ALL; tests/integration has one like it")
def test_workers_of_a_dead_run_leave_and_the_next_may_start_at_once(shop: Workshop) -> None:
    whole, root, stage = shop.whole("train-2"), shop.fresh("train-2"), STAGES["train-2"]
    metrics = root / "run/train/metrics.jsonl"
    with shop.started(root, stage) as owner:
        deadline = time.monotonic() + 120
        while not metrics.exists() or not metrics.read_text():
            assert owner.exitcode is None and time.monotonic() < deadline
            time.sleep(0.002)
        os.kill(owner.pid, signal.SIGKILL)  # it alone
        owner.join()
        ended = shop.run(root, stage)
    assert ended.code == 0, ended.said
    assert compare(whole.root, root) == []


def test_two_runs_that_share_a_prepared_set_do_not_write_it_at_once(shop: Workshop) -> None:
    whole, root = shop.whole("prepare"), shop.fresh("prepare")
    stage = STAGES["prepare"]
    other = Stage("other", "regenerate", "prepare", ("run_dir=other",))
    with shop.started(root, stage) as owner:
        deadline = time.monotonic() + 120
        while not (root / ".prepared.tmp").exists():
            assert owner.exitcode is None and time.monotonic() < deadline
            time.sleep(0.0005)
        os.kill(owner.pid, signal.SIGSTOP)
        assert "another process is preparing this data" in refused(shop.run(root, other))
        os.kill(owner.pid, signal.SIGCONT)
        owner.join(120)
        assert owner.exitcode == 0
    shutil.rmtree(root / "other")
    assert compare(whole.root, root) == []


def test_metrics_have_one_row_a_step(shop: Workshop) -> None:
    rows = [json.loads(line) for line in (shop.whole("eval").root / "run/train/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if row["kind"] == "val"] == [2, 4, 5]
    assert [row["kind"] for row in rows].count("eval") == 1


def test_a_run_killed_after_its_last_checkpoint_does_not_write_it_again(shop: Workshop) -> None:
    """With one checkpoint kept, a kill while the same one is written anew would cost the whole training."""
    whole, root = shop.whole("train"), shop.fresh("train")
    shutil.rmtree(root / "run")
    shutil.copytree(whole.root / "run", root / "run")
    for name in ("final.safetensors", "result.json", "stage.json"):
        (root / "run/train" / name).unlink()
    newest = root / "run/train/checkpoints/step-00000005"
    before = {path.name: path.stat().st_ino for path in newest.iterdir()}
    assert shop.run(root, STAGES["train"]).code == 0
    assert {path.name: path.stat().st_ino for path in newest.iterdir()} == before
    assert compare(whole.root, root) == []
