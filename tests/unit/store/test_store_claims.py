"""Claims: one living holder a unit, takeover of the dead, and several workers killed at many moments."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from dataclasses import asdict, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import extracting_child
import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from data_prep import claims as claims_module
from data_prep.capture.hf import HFCapture
from data_prep.claims import Claims, Owner
from data_prep.extract import Part, Sharing, extract
from data_prep.store import Store, StoreManifest, StoreWriter
from data_prep.store.shared import SharedStore
from data_prep.units import plan_units, plan_wanted, plan_windows
from eagle3.errors import DataError

RECORDS = 40
World = tuple[Path, Path, Path]
FAST = Sharing(timeout_s=1.0, poll_s=0.02)


def test_one_of_many_takes_a_unit_and_the_next_after_its_release(tmp_path: Path) -> None:
    holders = [Claims(tmp_path, 60) for _ in range(8)]
    taken: list[int] = []
    barrier = threading.Barrier(len(holders))

    def attempt(number: int) -> None:
        barrier.wait()
        if holders[number].take("u0"):
            taken.append(number)

    threads = [threading.Thread(target=attempt, args=(n,)) for n in range(len(holders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    first, second = holders[taken[0]], holders[taken[0] - 1]
    seen = second.others()
    assert [(held.unit, held.owner, held.alive) for held in seen] == [("u0", first.owner, True)]
    assert f"u0 by process {os.getpid()} on" in seen[0].words
    first.release("u0")
    assert second.take("u0")
    for one in holders:
        one.close()
    assert list(tmp_path.iterdir()) == []


def plant(folder: Path, owner: Owner | None, age: float, unit: str = "u0") -> Path:
    """A claim as a process elsewhere would have left it."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{unit}.0"
    path.write_text("" if owner is None else json.dumps(asdict(owner)))
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def elsewhere() -> Owner:
    return replace(Owner.here(), host="node7", kernel="another boot", token="t")


def test_a_claim_is_stale_by_its_age_or_at_once_when_its_process_is_gone_here(tmp_path: Path) -> None:
    taken_over: list[str] = []
    with Claims(tmp_path / "c", 60, taken_over.append) as mine:
        plant(tmp_path / "c", elsewhere(), 50)
        assert not mine.take("u0")  # heard of in time
        plant(tmp_path / "c", elsewhere(), 70)
        assert mine.take("u0") and taken_over == []  # silent for too long, though nobody can tell that it is dead
        assert sorted(path.name for path in (tmp_path / "c").glob("u*")) == ["u0.0", "u0.1"]
        mine.release("u0")
        assert list((tmp_path / "c").glob("u*")) == []
        plant(tmp_path / "c", None, 10)
        assert not mine.take("u0")  # being written this moment, perhaps
        here = Owner.here()
        plant(tmp_path / "c", replace(here, token="t"), 0)
        assert not mine.take("u0")
        plant(tmp_path / "c", replace(here, started=here.started - 1, token="t"), 0)
        assert mine.take("u0") and taken_over == ["u0"]  # that process id is another process by now


def test_of_those_who_find_a_stale_claim_one_takes_it_over(tmp_path: Path) -> None:
    for attempt in range(10):
        plant(tmp_path, elsewhere(), 1000, f"u{attempt}")
        holders = [Claims(tmp_path, 60) for _ in range(4)]
        barrier, won = threading.Barrier(4), []

        def go(one: Claims, unit: str, barrier: Any = barrier, won: Any = won) -> None:
            barrier.wait()
            won.append(one.take(unit))

        threads = [threading.Thread(target=go, args=(one, f"u{attempt}")) for one in holders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(won) == [False, False, False, True]
        for one in holders:
            one.close()


def test_a_holder_shows_signs_of_life_and_a_wrong_clock_does_not_hide_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Claims(tmp_path, 0.6) as holder, Claims(tmp_path, 0.6) as other:
        monkeypatch.setattr(holder, "owner", elsewhere())
        assert holder.take("u0")
        monkeypatch.setattr(claims_module.time, "time", lambda: 0.0)  # this node's clock is decades behind
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            assert not other.take("u0")
            time.sleep(0.1)


# ------------------------------------------------------------------------------------------- workers that are killed


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """(model, prepared, a store that one worker extracted undisturbed)."""
    root = tmp_path_factory.mktemp("claims")
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **shape)).save_pretrained(root / "model")
    gen = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 40, (RECORDS,), generator=gen).tolist()
    rows = {
        "record_id": [f"conv/{i:03d}" for i in range(RECORDS)],
        "input_ids": [torch.randint(0, 64, (n,), generator=gen).tolist() for n in lengths],
        "loss_mask": [[0, 0] + [1] * (n - 2) for n in lengths],
    }
    Dataset.from_dict(rows).save_to_disk(str(root / "prepared"))
    assert extracting_child.run(root / "model", root / "prepared", root / "whole").complete
    return root / "model", root / "prepared", root / "whole"


def start(world: World, store: Path, pause: float, sharing: Sharing = FAST) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["extracting_child", "accelerate", "transformers.models.llama.modeling_llama"])
    child = context.Process(target=extracting_child.run, args=(*world[:2], store, pause, sharing))
    child.start()
    return child


def bytes_of(store: Path) -> dict[str, bytes]:
    """Data by shard name; fails where a file is left over, or a record stands twice."""
    shards = Store.open(store).shards
    assert sorted(path.name for path in store.glob("*shard-*")) == sorted(
        name for shard in shards for name in (shard.path.name, shard.data.name)
    )
    ids = [entry.id for shard in shards for entry in shard.records]
    assert len(ids) == len(set(ids)) == RECORDS
    return {shard.path.name: shard.data.read_bytes() for shard in shards}


@pytest.mark.parametrize("seed", range(int(os.environ.get("REDRAFT_KILLS", "1"))))
def test_workers_killed_at_any_moment_lose_and_double_nothing(world: World, tmp_path: Path, seed: int) -> None:
    """Two of three die at random moments, the third ends the work; then one that was stopped wakes up, and loses."""
    chance, store = random.Random(seed), tmp_path / "s"
    children = [start(world, store, 0.02) for _ in range(3)]
    try:
        while not list(store.glob("shard-*.json")):
            assert all(child.is_alive() for child in children)
            time.sleep(0.005)
        for child in children[:2]:
            time.sleep(chance.uniform(0, 0.08))
            child.kill()
        children[2].join(120)
        assert children[2].exitcode == 0
    finally:
        for child in children:
            child.kill()
            child.join()
    assert bytes_of(store) == bytes_of(world[2])
    assert not (store / "claims").exists()


def test_all_killed_and_one_run_again(world: World, tmp_path: Path) -> None:
    store = tmp_path / "s"
    children = [start(world, store, 0.02) for _ in range(2)]
    while len(list(store.glob("shard-*.json"))) < 2:
        time.sleep(0.005)
    for child in children:
        child.kill()
        child.join()
    patient = Sharing(timeout_s=10_000, poll_s=0.02)  # their claims do not grow old: it is seen that they are dead
    assert extracting_child.run(*world[:2], store, 0.0, patient).complete
    assert bytes_of(store) == bytes_of(world[2])


def test_a_worker_that_slept_through_its_claim_loses_and_does_no_harm(world: World, tmp_path: Path) -> None:
    store = tmp_path / "s"
    slow = start(world, store, 0.05)
    try:
        while not list(store.glob("claims/*/u*")):
            time.sleep(0.005)
        os.kill(slow.pid or 0, signal.SIGSTOP)
        assert extracting_child.run(*world[:2], store, 0.0, FAST).complete
        whole = bytes_of(store)
        os.kill(slow.pid or 0, signal.SIGCONT)
        slow.join(60)
        assert slow.exitcode == 0
    finally:
        slow.kill()
        slow.join()
    assert bytes_of(store) == whole == bytes_of(world[2])


def test_leaving_tells_who_still_works(world: World, tmp_path: Path) -> None:
    store = tmp_path / "s"
    child = start(world, store, 0.4, Sharing(timeout_s=60))
    try:
        while not list(store.glob("claims/*/u*")):
            time.sleep(0.005)
        done = extracting_child.run(*world[:2], store, 0.0, Sharing(timeout_s=60, wait=False))
        assert not done.complete and done.records > 0
        assert [held.owner.pid for held in done.others if held.owner] == [child.pid] * len(done.others)
        assert f"process {child.pid} on" in done.others[0].words
    finally:
        child.kill()
        child.join()


def test_claims_lie_elsewhere_when_asked(world: World, tmp_path: Path) -> None:
    class Looks(extracting_child.Slowed):
        seen: ClassVar[set[str]] = set()

        def run(self, batch: Any) -> Any:
            self.seen |= {path.name for path in (tmp_path / "c").glob("*/u*")}
            return super().run(batch)

    manifest = StoreManifest.read(world[2])
    capture = Looks(HFCapture(world[0], extracting_child.WIRING, device="cpu"), 0.0)
    rows = Dataset.load_from_disk(str(world[1]))
    extract(rows, capture, tmp_path / "s", manifest, 64, 128, sharing=Sharing(claims=tmp_path / "c"))
    assert "u00000.0" in Looks.seen and not (tmp_path / "s/claims").exists()


# ------------------------------------------------------------------------------------ stores begun otherwise, and parts


def samples_of(store: Path) -> dict[str, Any]:
    opened = Store.open(store, unfinished=True)
    return {sample.record_id: sample for sample in (opened[i] for i in range(len(opened)))}


def test_a_store_begun_by_named_workers_goes_on(world: World, tmp_path: Path) -> None:
    manifest, whole = StoreManifest.read(world[2]), samples_of(world[2])
    with StoreWriter(tmp_path, manifest, 100, worker="0") as writer:
        for name in sorted(whole)[::3]:
            writer.append(whole[name])
        writer.flush()
    begun = len(writer.done())
    done = extracting_child.run(*world[:2], tmp_path)
    assert (done.found_done, done.records, done.complete) == (begun, RECORDS - begun, True)
    again = samples_of(tmp_path)
    for name, sample in whole.items():
        assert torch.equal(again[name].final, sample.final)
    # an old shard that is lost later is made good beside the unit's own, which does not hold its records
    lost = next(iter(sorted(tmp_path.glob("shard-0-*.json"))))
    for path in (lost, lost.with_suffix(".safetensors")):
        path.unlink()
    done = extracting_child.run(*world[:2], tmp_path)
    assert done.complete and done.records > 0
    assert sorted(samples_of(tmp_path)) == sorted(whole)


def test_a_part_is_captured_in_the_same_company_and_shards_hold_one_class(world: World, tmp_path: Path) -> None:
    manifest, rows = StoreManifest.read(world[2]), Dataset.load_from_disk(str(world[1]))
    capture = HFCapture(world[0], extracting_child.WIRING, device="cpu")
    wanted = {i: i % 2 for i in range(3, RECORDS, 5)}
    done = extract(rows, capture, tmp_path, manifest, 64, 128, part=Part("r1", wanted))
    assert (done.records, done.complete) == (len(wanted), True)
    whole, part = samples_of(world[2]), samples_of(tmp_path)
    assert sorted(part) == sorted(rows[i]["record_id"] for i in wanted)
    for name, sample in part.items():
        assert torch.equal(sample.final, whole[name].final)
        assert all(torch.equal(state, whole[name].sites[site]) for site, state in sample.sites.items())
    kinds = {i: kind for i, kind in wanted.items()}
    place = {rows[i]["record_id"]: i for i in wanted}
    for shard in Store.open(tmp_path, unfinished=True).shards:
        assert len({kinds[place[entry.id]] for entry in shard.records}) == 1
    assert extract(rows, capture, tmp_path, manifest, 64, 128, part=Part("r1", wanted)).records == 0


def test_units_hold_each_record_once_and_follow_the_order() -> None:
    lengths = [5 + (7 * i) % 23 for i in range(50)]
    order = list(reversed(range(50)))
    windows = plan_windows(lengths, order, 40, 90)
    flat = [i for window in windows for batch in window for i in batch]
    assert sorted(flat) == list(range(50))
    place = 0
    for window in windows:  # each window is a stretch of the order, and no smaller than asked, but the last
        held = [i for batch in window for i in batch]
        assert sorted(held) == sorted(order[place : place + len(held)])
        place += len(held)
        assert sum(lengths[i] for i in held) >= 90 or window is windows[-1]
    units = plan_units(windows, lengths, 60)
    assert [i for unit in units for i in unit.records] == flat
    assert all(60 <= sum(lengths[i] for i in unit.records) < 60 + 40 for unit in units[:-1])
    wanted = {i: 0 for i in range(0, 50, 4)}
    some = plan_wanted(windows, lengths, wanted, 30, "x")
    assert sorted(i for unit in some for i in unit.records) == sorted(wanted)
    assert {batch for unit in some for batch in unit.batches} <= {tuple(b) for window in windows for b in window}


def test_a_sample_that_does_not_fit_is_refused(world: World, tmp_path: Path) -> None:
    store = SharedStore(tmp_path, StoreManifest.read(world[2]))
    sample = next(iter(samples_of(world[2]).values()))
    sample.sites.popitem()
    with pytest.raises(DataError, match="does not fit the store"):
        store.publish("u0", [sample])
