"""Rounds give the very weights of a run that held all at once, within the budget, killed or not; extraction shared."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import rounds_child

from data_prep.store import Store
from eagle3.errors import RedraftError
from train.front import rounds
from train.front.pipeline import locked

BUDGET = 450_000
PRELOAD = ["rounds_child", "train.front.pipeline", "deepspeed", "transformers.models.llama.modeling_llama"]
Base = tuple[Path, Path]  # (folder, model)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_llama_path: Path) -> Base:
    folder = tmp_path_factory.mktemp("rounds")
    rounds_child.write_conversations(folder / "conversations.jsonl")
    return folder, tiny_llama_path


def go(base: Base, name: str, **more: Any) -> str:
    root = base[0] / name
    root.mkdir(exist_ok=True)
    return rounds_child.run(root, base[1], more)


def start(base: Base, name: str, *, die: tuple[str, int, bool] | None = None, **more: Any) -> BaseProcess:
    """The same in a process of its own, forked from a server that has done the imports and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    (base[0] / name).mkdir(exist_ok=True)
    child = context.Process(target=rounds_child.run, args=(base[0] / name, base[1], more, die))
    child.start()
    return child


def weights(base: Base, name: str) -> bytes:
    return (base[0] / name / "run/train/final.safetensors").read_bytes()


def states(store: Path) -> dict[str, str]:
    """Every record's own checksum; a record that stands twice fails."""
    entries = [entry for shard in Store.open(store, unfinished=True).shards for entry in shard.records]
    assert len({entry.id for entry in entries}) == len(entries)
    return {entry.id: entry.sha256 for entry in entries}


@pytest.fixture(scope="module")
def whole(base: Base) -> Base:
    """All at once: one epoch in `one`, two in `two`, of one store."""
    go(base, "one")
    shared = {"paths": {"store": str(base[0] / "one/store"), "prepared": str(base[0] / "one/prepared")}}
    go(base, "two", train={"epochs": 2}, **shared)
    return base


class Gauge:
    """The most that the files of a folder ever took, looked at as often as possible."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most, self._end = folder, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._end.wait(0.002):
            size = 0
            for parent, _, names in os.walk(self.folder):
                for name in names:
                    try:
                        size += os.stat(os.path.join(parent, name)).st_size
                    except FileNotFoundError:
                        continue
            self.most = max(self.most, size)

    def __enter__(self) -> Gauge:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def test_rounds_of_several_epochs_give_the_same_weights_within_the_budget(whole: Base) -> None:
    with Gauge(whole[0] / "r2/store") as gauge:
        told = go(whole, "r2", disk_budget=f"{BUDGET}B", train={"epochs": 2})
    assert weights(whole, "r2") == weights(whole, "two")
    rounds = int(re.search(r"(\d+) rounds: at most", told)[1])  # type: ignore[index]
    assert rounds >= 4
    assert "rounds are short beside a window of 32 batches" in told  # which here holds every record
    assert told.count("computed again: every tensor") == told.count(f" of {rounds}: steps ") == rounds  # each looked at
    assert BUDGET / 3 < gauge.most <= BUDGET
    held = states(whole[0] / "r2/store")
    full = states(whole[0] / "one/store")
    assert 0 < len(held) < len(full) and held.items() <= full.items()  # what is left is as it would have been
    metrics = [json.loads(line) for line in (whole[0] / "r2/run/train/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics if row["kind"] == "train"] == list(range(1, 10))
    told = go(whole, "r2", disk_budget=f"{BUDGET}B", train={"epochs": 2})
    assert "unchanged since it finished: skipped" in told and "round " not in told


MOMENTS = [
    ("train.front.rounds.remove", 1, True),  # while freeing for round 2: a sidecar is gone, its data is not
    ("data_prep.store.shared.publish", 1, False),  # in the extraction of round 2
    ("train.resume.write_checked", 1, False),  # in the training of round 2: a checkpoint's files are there, unmarked
]


@pytest.mark.parametrize("seed", range(int(os.environ.get("REDRAFT_KILLS", "1"))))
def test_killed_again_and_again_rounds_give_the_same_weights(whole: Base, seed: int) -> None:
    name, moments = f"k{seed}", MOMENTS
    if seed:
        chance = random.Random(seed)
        moments = [(chance.choice(MOMENTS)[0], chance.randint(1, 8), chance.random() < 0.5) for _ in range(4)]
    with Gauge(whole[0] / name / "store") as gauge:
        for moment in moments:
            child = start(whole, name, die=moment, disk_budget=f"{BUDGET}B")
            child.join(200)
            assert child.exitcode == -9 or (seed and child.exitcode == 0)
        go(whole, name, disk_budget=f"{BUDGET}B")
    assert weights(whole, name) == weights(whole, "one")
    assert gauge.most <= BUDGET


def test_what_rounds_cannot_do_is_refused_before_anything_is_extracted(whole: Base) -> None:
    small = {"disk_budget": "150KB"}
    with pytest.raises(RedraftError, match=r"cannot hold one training step.*reads 5 conversations"):
        go(whole, "small", **small)
    assert not (whole[0] / "small/store").exists()
    apart = {"disk_budget": f"{BUDGET}B", "stages": ["extract"]}
    shared = {"prepared": str(whole[0] / "one/prepared"), "store": str(whole[0] / "apart/store")}
    with pytest.raises(RedraftError, match=r"in turns \[stages\]"):
        go(whole, "apart", paths=shared, **apart)
    # a store that was filled for good is not freed; one that is whole is used as it is
    (whole[0] / "one/store/stage.json").rename(whole[0] / "aside.json")
    shared["store"] = str(whole[0] / "one/store")
    before = states(whole[0] / "one/store")
    with pytest.raises(RedraftError, match="not made in rounds"):
        go(whole, "apart", paths=shared, disk_budget=f"{BUDGET}B", stages=["extract", "train"])
    assert states(whole[0] / "one/store") == before
    (whole[0] / "aside.json").rename(whole[0] / "one/store/stage.json")
    told = go(whole, "apart", paths=shared, disk_budget=f"{BUDGET}B", stages=["extract", "train"])
    assert "round " not in told and weights(whole, "apart") == weights(whole, "one")


def test_a_store_of_another_runs_rounds_is_left_alone(base: Base, tmp_path: Path) -> None:
    class Run:
        store, run_dir = tmp_path / "store", tmp_path / "a"

    one: Any = Run()
    rounds.take_store(one)
    rounds.take_store(one)  # its own, run again
    one.run_dir = tmp_path / "b"
    with pytest.raises(RedraftError, match=r"another run.*has not finished"):
        rounds.take_store(one)
    marker = tmp_path / "store" / rounds.MARKER
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "finished": True}))
    rounds.take_store(one)


def test_extraction_started_twice_in_one_run_folder_shares_the_work(whole: Base) -> None:
    """As on two nodes: the same command, the same run folder; all else is refused meanwhile."""
    paths = {"prepared": str(whole[0] / "one/prepared")}
    children = [start(whole, "nodes", paths=paths, stages=["extract"]) for _ in range(2)]
    refused = 0
    while any(child.is_alive() for child in children):
        if (whole[0] / "nodes/run/.lock").exists() and not refused:
            try:
                with locked(whole[0] / "nodes/run"):
                    pass
            except RedraftError as err:
                assert "stages=[extract] alone" in str(err)
                refused += 1
        time.sleep(0.01)
    assert [child.exitcode for child in children] == [0, 0] and refused
    assert states(whole[0] / "nodes/store") == states(whole[0] / "one/store")


def test_two_workers_of_one_command_fill_the_same_store(whole: Base) -> None:
    paths = {"prepared": str(whole[0] / "one/prepared")}
    told = go(whole, "pair", paths=paths, stages=["extract"], capture={"processes": 2})
    assert "captured" in told and "26 records" in told
    assert states(whole[0] / "pair/store") == states(whole[0] / "one/store")
    assert not list((whole[0] / "pair/run/extract").glob("*.json"))
