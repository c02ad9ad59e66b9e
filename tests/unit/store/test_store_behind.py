"""Writing behind: bounded memory, the first failure raised, what was captured published whatever the order."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import extracting_child
import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from data_prep import extract as extract_module
from data_prep.behind import Behind
from data_prep.capture.hf import HFCapture
from data_prep.capture.sample import CapturedSample
from data_prep.extract import Writing, extract
from data_prep.store import Store, StoreManifest
from data_prep.store import shard as shard_module
from data_prep.store.encoders import Encoders
from eagle3.errors import RedraftError

RECORDS = 30


# ------------------------------------------------------------------------------------------------------ the pieces


def test_what_waits_never_exceeds_the_limit() -> None:
    gate, started = threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        assert gate.wait(30)

    with Behind(2, limit=100) as behind:
        behind.reserve(60)
        behind.start(slow, 60)
        behind.reserve(40)  # fits
        assert started.wait(30) and behind.held == 100
        blocked = threading.Thread(target=behind.reserve, args=(30,))
        blocked.start()
        blocked.join(0.2)
        assert blocked.is_alive() and behind.held == 100  # until something is worked off
        gate.set()
        blocked.join(30)
        assert not blocked.is_alive() and behind.held == 70
        behind.start(lambda: None, 70)
        behind.settle()
        assert (behind.held, behind.peak) == (0, 100)


def test_more_than_the_limit_is_given_when_nothing_is_left_to_wait_for() -> None:
    with Behind(1, limit=10) as behind:
        behind.reserve(25)
        assert behind.held == 25


def test_pieces_are_done_several_at_a_time() -> None:
    together = threading.Barrier(3, timeout=30)
    with Behind(3, limit=10) as behind:
        for _ in range(3):
            behind.start(together.wait, 0)  # returns only if all three run at once
        behind.settle()


def test_a_failure_is_raised_where_work_goes_on_and_the_rest_is_not_tried() -> None:
    done: list[int] = []
    gate = threading.Event()

    def fails() -> None:
        assert gate.wait(30)
        raise RedraftError("the disk is full")

    with pytest.raises(RedraftError, match="the disk is full"), Behind(1, limit=10) as behind:
        for work in (fails, lambda: done.append(1)):
            behind.reserve(5)
            behind.start(work, 5)
        gate.set()
        behind.reserve(1)  # waits, and finds it
    assert done == []


def test_encoders_keep_the_order_and_compute_with_one_thread_each() -> None:
    before = torch.get_num_threads()
    with Encoders(3) as encoders:
        got = list(encoders.map(lambda n: (n, torch.get_num_threads()), range(50)))
        assert torch.get_num_threads() == before
    assert got == [(n, 1) for n in range(50)]
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [before]


def test_encoders_run_ahead_by_no_more_than_two_a_thread() -> None:
    begun: list[int] = []
    with Encoders(2) as encoders:
        results = encoders.map(lambda n: begun.append(n) or n, range(100))  # type: ignore[func-returns-value]
        assert [next(results) for _ in range(10)] == list(range(10))
        assert len(begun) <= 10 + 2 * 2


# --------------------------------------------------------------------------------------------------------- extraction


@pytest.fixture(scope="module")
def world() -> tuple[HFCapture, Dataset]:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **shape)).eval()
    gen = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 40, (RECORDS,), generator=gen).tolist()
    rows = {
        "record_id": [f"conv/{i:03d}" for i in range(RECORDS)],
        "input_ids": [torch.randint(0, 64, (n,), generator=gen).tolist() for n in lengths],
        "loss_mask": [[0, 0] + [1] * (n - 2) for n in lengths],
    }
    return HFCapture.from_model(model, extracting_child.WIRING), Dataset.from_dict(rows)


def manifest(codec: str = "raw") -> StoreManifest:
    return StoreManifest(extracting_child.WIRING, {"name": "tiny"}, "tok", "tpl", codec=codec)


def fill(world: tuple[HFCapture, Dataset], store: Path, codec: str = "raw", **kwargs: Any) -> Any:
    return extract(world[1], world[0], store, manifest(codec), 64, 96, **kwargs)


def data_of(store: Path) -> dict[str, bytes]:
    opened = Store.open(store)
    opened.verify()
    return {shard.path.name: shard.data.read_bytes() for shard in opened.shards}


@pytest.mark.parametrize("codec", ["raw", "lossless", "int8"])
def test_several_writers_make_the_very_files_of_one(
    world: tuple[HFCapture, Dataset], tmp_path: Path, codec: str
) -> None:
    assert fill(world, tmp_path / "one", codec, writing=Writing(1, 1)).complete
    assert fill(world, tmp_path / "four", codec, writing=Writing(4, 1)).complete
    one, four = data_of(tmp_path / "one"), data_of(tmp_path / "four")
    assert one == four and len(one) > 4


def test_captured_states_wait_within_the_limit(
    world: tuple[HFCapture, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk far slower than the target: two shards' worth are held, although the limit names less."""
    tokens = dict(zip(world[1]["record_id"], map(len, world[1]["input_ids"]), strict=True))
    guard, held, most = threading.Lock(), set[str](), [0]
    behinds: list[Behind] = []

    class Watched(Behind):
        def __init__(self, threads: int, limit: int) -> None:
            super().__init__(threads, limit)
            behinds.append(self)

    class Counting:
        def run(self, batch: Any) -> list[CapturedSample]:
            with guard:
                held.update(name for name, _, _ in batch)
                most[0] = max(most[0], sum(tokens[name] for name in held))
            return world[0].run(batch)

    publish = shard_module.publish

    def slow(store: Any, name: str, samples: Any, *rest: Any) -> Any:
        threading.Event().wait(0.02)
        shard = publish(store, name, samples, *rest)
        with guard:
            held.difference_update(sample.record_id for sample in samples)
        return shard

    monkeypatch.setattr(extract_module, "Behind", Watched)
    monkeypatch.setattr("data_prep.store.shared.publish", slow)
    assert extract(world[1], Counting(), tmp_path, manifest(), 64, 96, writing=Writing(2, 0)).complete
    token = 3 * 16 * 2 + 9  # two stored sites and the teacher, an id, a mask
    largest = max(shard.tokens for shard in Store.open(tmp_path).shards)
    (behind,) = behinds
    assert behind.limit == 2 * largest * token
    assert largest < most[0] <= 2 * largest and behind.peak <= behind.limit


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing_half_written(
    world: tuple[HFCapture, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = threading.Event()
    create, put = shard_module.create, shard_module._DataFile.put
    published: list[str] = []

    def count(path: Any, text: str) -> bool:
        published.append(path.name)
        if len(published) == 2:
            full.set()
        return create(path, text)

    def refuse(self: Any, *args: Any) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device", "the disk")
        put(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(shard_module, "create", count)
        patch.setattr(shard_module._DataFile, "put", refuse)
        with pytest.raises(RedraftError, match=r"cannot write the store.*No space left") as error:
            fill(world, tmp_path / "s", writing=Writing(3, 1))
    assert "\n" not in str(error.value)
    store = tmp_path / "s"
    assert {path.name for path in store.glob("shard-*.json")} >= set(published[:1])
    assert not list(store.glob(".shard-*"))
    named = {path.name.split(".")[0] for path in store.glob("shard-*.json")}
    assert {path.name.split(".")[0] for path in store.glob("shard-*.safetensors")} == named
    assert fill(world, store).complete
    fill(world, tmp_path / "whole")
    assert data_of(store) == data_of(tmp_path / "whole")


class Pipelined:
    """A backend with batches under way, which notes what happens when."""

    def __init__(self, capture: HFCapture, fail_at: int = -1) -> None:
        self.capture, self.fail_at = capture, fail_at
        self.log: list[str] = []
        self.begun = 0

    def run(self, batch: Any) -> list[CapturedSample]:
        raise AssertionError("it can begin a batch")

    def begin(self, batch: Any) -> Any:
        if self.begun == self.fail_at:
            raise RedraftError("the target broke")
        number, self.begun = self.begun, self.begun + 1
        self.log.append(f"begin {number}")
        samples = self.capture.run(batch)

        def finish() -> list[CapturedSample]:
            self.log.append(f"finish {number}")
            return samples

        return finish


def test_a_batch_is_begun_before_the_one_before_is_finished(world: tuple[HFCapture, Dataset], tmp_path: Path) -> None:
    backend = Pipelined(world[0])
    assert extract(world[1], backend, tmp_path / "s", manifest(), 64, 96).complete
    assert fill(world, tmp_path / "plain").complete
    assert data_of(tmp_path / "s") == data_of(tmp_path / "plain")
    count = backend.begun
    expected = ["begin 0"]
    for number in range(1, count):
        expected += [f"begin {number}", f"finish {number - 1}"]
    assert backend.log == [*expected, f"finish {count - 1}"]  # across units, too


def test_what_is_under_way_when_a_batch_cannot_be_begun_is_kept(
    world: tuple[HFCapture, Dataset], tmp_path: Path
) -> None:
    backend = Pipelined(world[0], fail_at=3)
    with pytest.raises(RedraftError, match="the target broke"):
        extract(world[1], backend, tmp_path, manifest(), 64, 1)  # a shard a batch
    assert backend.log[-1] == "finish 2"
    assert len(Store.open(tmp_path, unfinished=True).shards) == 3
    assert fill(world, tmp_path).complete
