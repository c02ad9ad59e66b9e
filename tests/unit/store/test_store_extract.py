"""Extraction survives kill -9, goes on at the record, and gives the same bits as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import extracting_child
import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from data_prep.capture.hf import HFCapture
from data_prep.extract import extract
from data_prep.store import Store, StoreManifest
from data_prep.units import plan_batches
from eagle3.errors import DataError, RedraftError

RECORDS = 60
PRELOAD = [
    "data_prep.extract",
    "data_prep.capture.hf",
    "datasets",
    "accelerate",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
]


def rows(count: int = RECORDS) -> dict[str, list[Any]]:
    gen = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 40, (count,), generator=gen).tolist()
    ids = [torch.randint(0, 64, (n,), generator=gen).tolist() for n in lengths]
    return {
        "record_id": [f"conv/{i:03d}" for i in range(count)],
        "input_ids": ids,
        "loss_mask": [[0, 0] + [1] * (n - 2) for n in lengths],
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(model, prepared, a store extracted without any interruption)."""
    root = tmp_path_factory.mktemp("extract")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(root / "model")
    Dataset.from_dict(rows()).save_to_disk(str(root / "prepared"))
    done = extracting_child.run(root / "model", root / "prepared", root / "whole")
    assert (done.records, done.found_done, done.complete) == (RECORDS, 0, True)
    return root / "model", root / "prepared", root / "whole"


def start(world: tuple[Path, Path, Path], store: Path, pause: float) -> BaseProcess:
    """A process of its own, forked from a server that has done the slow imports and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    child = context.Process(target=extracting_child.run, args=(*world[:2], store, pause))
    child.start()
    return child


def wait_for_shards(child: BaseProcess, store: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while len(list(store.glob("shard-*.json"))) < count:
        assert child.is_alive(), f"the child ended early with exit code {child.exitcode}"
        assert time.monotonic() < deadline, "no shard appeared"
        time.sleep(0.002)


def content(store: Path) -> dict[str, tuple[Any, ...]]:
    opened = Store.open(store)
    opened.verify()
    out = {}
    for sample in (opened[i] for i in range(len(opened))):
        states = [*(sample.sites[name] for name in sorted(sample.sites)), sample.final]
        bits = tuple(bytes(state.view(torch.uint8).numpy().tobytes()) for state in states)
        out[sample.record_id] = (sample.input_ids.tolist(), sample.loss_mask.tolist(), *bits)
    return out


def test_killed_and_run_again_gives_the_same_bits(world: tuple[Path, Path, Path], tmp_path: Path) -> None:
    store = tmp_path / "s"
    for shards in (1, 4):  # struck twice, at different places
        child = start(world, store, pause=0.03)
        try:
            wait_for_shards(child, store, shards)
        finally:
            child.kill()  # signal 9
            child.join()
        assert child.exitcode == -9
        with pytest.raises(RedraftError, match="not finished"):
            Store.open(store)
    held = len(Store.open(store, unfinished=True))
    assert 0 < held < RECORDS
    last = extracting_child.run(*world[:2], store)
    assert (last.found_done, last.records, last.complete) == (held, RECORDS - held, True)
    assert content(store) == content(world[2])
    assert files(store) == files(world[2])  # no leftovers, the same shards


def files(store: Path) -> dict[str, bytes]:
    """Every data file's bytes by its shard's name; fails when there is one that no sidecar names."""
    shards = {shard.path.name: shard.data for shard in Store.open(store).shards}
    assert sorted(path.name for path in store.glob("*shard-*")) == sorted(
        [*shards, *(data.name for data in shards.values())]
    )
    return {name: data.read_bytes() for name, data in shards.items()}


def test_running_again_does_nothing(world: tuple[Path, Path, Path], tmp_path: Path) -> None:
    def never() -> HFCapture:
        raise AssertionError("the target was loaded although there was nothing to do")

    manifest = StoreManifest.read(world[2])
    seen: list[int] = []
    prepared = Dataset.load_from_disk(str(world[1]))
    again = extract(prepared, never, world[2], manifest, 64, 128, seen.append)
    assert (again.records, again.found_done, again.complete) == (0, RECORDS, True)
    assert sum(seen) == sum(len(ids) for ids in prepared["input_ids"])  # the bar ends full


def test_changed_data_under_the_same_ids_is_refused(world: tuple[Path, Path, Path]) -> None:
    manifest = StoreManifest.read(world[2])

    def attempt(data: dict[str, list[Any]]) -> None:
        extract(Dataset.from_dict(data), lambda: pytest.fail("captured"), world[2], manifest, 64, 128)

    edited = rows()
    edited["input_ids"][7][3] ^= 1
    with pytest.raises(DataError, match=r"other tokens.*record conv/007"):
        attempt(edited)
    masked = rows()
    masked["loss_mask"][9][2] = 0
    with pytest.raises(DataError, match=r"other tokens.*record conv/009"):
        attempt(masked)
    with pytest.raises(DataError, match="1 of them, first conv/059"):
        attempt({key: column[:-1] for key, column in rows().items()})
    double = rows(3)
    double["record_id"][2] = "conv/000"
    with pytest.raises(DataError, match=r"stands twice.*conv/000"):
        attempt(double)


def test_what_was_captured_before_a_failure_is_kept(world: tuple[Path, Path, Path], tmp_path: Path) -> None:
    class FailsLater(extracting_child.Slowed):
        calls = 0

        def run(self, batch: Any) -> Any:
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return super().run(batch)

    capture = FailsLater(HFCapture(world[0], extracting_child.WIRING, device="cpu"), 0.0)
    manifest = StoreManifest.read(world[2])
    with pytest.raises(KeyboardInterrupt):
        extract(Dataset.load_from_disk(str(world[1])), capture, tmp_path, manifest, 64, 60)
    assert len(Store.open(tmp_path, unfinished=True)) > 0
    assert extracting_child.run(*world[:2], tmp_path).complete
    assert content(tmp_path) == content(world[2])


def test_batches_hold_each_record_once_and_keep_to_the_limit() -> None:
    lengths = [3, 50, 7, 7, 64, 200, 1, 9]
    batches = plan_batches(lengths, 64)
    assert sorted(i for batch in batches for i in batch) == list(range(8))
    assert batches[0] == [5]  # longer than the limit: alone, and first
    assert all(len(b) * max(lengths[i] for i in b) <= 64 for b in batches[1:])
