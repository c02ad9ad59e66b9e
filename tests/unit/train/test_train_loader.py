"""The loader gives the plan's batches, bit for bit, whoever reads them; it keeps its bound, fails in words and ends."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loader_store import RECORDS, Tokens, make_store, open_loader, open_source, samples, table, wiring

from data_prep.store import Store
from eagle3 import state_read
from eagle3.errors import DataError, IntegrityError, RedraftError, WiringError
from eagle3.state_read import Spent, StateReader
from eagle3.ttt import PackedBatch
from train.batches import StepPlan, read_micro_batches
from train.config import TrainConfig
from train.decoders import Decoders, Region
from train.front.source import StoreSource
from train.job import RowShape, SourceFiles
from train.loader import LEAST, Loader, Ring, Split, batch_bytes, choose_workers
from train.waits import Waits

FIELDS = ("features", "token_ids", "teacher", "loss_mask")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {codec: make_store(tmp_path_factory.mktemp(codec), codec) for codec in ("raw", "lossless", "fp8", "int8")}


def assert_plain(loader: Loader, plan: object, source: StoreSource) -> int:
    """Every batch is what reading one record after another gives; returns the steps."""
    steps = 0
    for number, step in enumerate(loader.stream(0)):
        plain = read_micro_batches(source, plan.micro_batches(number))  # type: ignore[attr-defined]
        assert step.rows == sum(batch.rows for batch in plain)
        assert [o.loss_mask.tolist() for o in step.outlines()] == [b.loss_mask.tolist() for b in plain]
        for batch, wanted in zip(step, plain, strict=True):
            assert all(torch.equal(getattr(batch, name), getattr(wanted, name)) for name in FIELDS)
            assert all(getattr(batch, name).dtype == getattr(wanted, name).dtype for name in FIELDS)
            assert batch.doc_lengths == wanted.doc_lengths
        steps += 1
    return steps


@pytest.mark.parametrize("codec", ["raw", "lossless", "fp8", "int8"])
@pytest.mark.parametrize("settings", [{}, {"prefetch_steps": 1, "prefetch_mib": 1}, {"prefetch_steps": 50}])
def test_batches_are_those_of_the_plain_way(stores: dict[str, Path], codec: str, settings: dict[str, int]) -> None:
    loader, plan, source = open_loader(stores[codec], **settings)
    assert assert_plain(loader, plan, source) == plan.total_steps == 2 * RECORDS // 6
    loader.close()


def test_worker_processes_give_the_same(stores: dict[str, Path]) -> None:
    loader, plan, source = open_loader(stores["int8"], loader_workers=2)
    try:
        assert assert_plain(loader, plan, source) == plan.total_steps
        assert loader.decoders.spent.bytes > 0
    finally:
        loader.close()


def test_what_was_read_can_be_dropped_from_the_page_cache(stores: dict[str, Path]) -> None:
    source = open_source(stores["fp8"], embedding=False)
    region = Region(1 << 16)
    keep, drop = Decoders(0, region, forget=False), Decoders(0, region, forget=True)
    rows = [torch.empty(source.lengths[4], 3 * 32, dtype=torch.bfloat16) for _ in range(2)]
    for decoders, out in zip((keep, drop), rows, strict=True):
        source.fill(4, out[:, :64], out[:, 64:], decoders)
        decoders.close()
    assert torch.equal(*rows)
    region.close()


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=60), room=st.integers(0, 80), held=st.integers(1, 4))
def test_places_of_the_ring_never_overlap_and_three_always_leave_room(sizes: list[int], room: int, held: int) -> None:
    ring = Ring(1000, LEAST * max(sizes) + room)
    taken: deque[tuple[int, int]] = deque()
    for size in sizes:
        place = ring.take(size)
        assert place is not None or len(taken) > 1  # beside one that is in use there is room for any other
        while place is None or len(taken) >= held:
            if place is not None:
                break
            ring.give()
            taken.popleft()
            place = ring.take(size)
        assert place >= 1000 and place + size <= 1000 + ring.size
        assert all(place + size <= begin or end <= place for begin, end in taken)
        taken.append((place, place + size))
        assert ring.used == sum(end - begin for begin, end in taken)


def test_bytes_in_flight_stay_within_the_bound(stores: dict[str, Path]) -> None:
    loader, plan, source = open_loader(stores["raw"], prefetch_steps=50, prefetch_mib=1, global_batch_size=2)
    largest = max(batch_bytes(sum(source.lengths[i] for i in plan.micro_batches(s)[0]), source.row) for s in range(26))
    (ring,) = loader.rings
    assert ring.size == max(LEAST * largest, 1 << 20) or ring.size <= 51 * largest
    assert loader.region.size - ring.size < 4096
    fullest, most = 0, 0
    for step in loader.stream(0):
        for batch in step:
            fullest = max(fullest, ring.used)
            most = max(most, len(ring._taken))
            assert ring.used <= ring.size and batch.rows
    assert most > 3 and fullest > 2 * largest  # it does read ahead
    assert ring.used == 0
    loader.close()


def test_a_batch_stays_good_for_backward_while_others_are_read(stores: dict[str, Path]) -> None:
    loader, *_ = open_loader(stores["raw"], prefetch_steps=50)
    stream = loader.stream(0)
    weight = torch.ones(96, dtype=torch.bfloat16, requires_grad=True)
    for step in stream:
        for batch in step:
            product = (batch.features * weight).sum()
            for other in list(stream._alive)[1:]:  # written to as a thread does, which autograd counts
                if other.ready and other.features is not None:
                    other.features.copy_(other.features.clone())
            product.backward()
    loader.close()


class Upload:
    """A copy of a batch, as `train.uploads` would make on a GPU."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = replace(batch, **{name: getattr(batch, name).clone() for name in FIELDS})
        self.taken = self.waited = 0

    def take(self) -> PackedBatch:
        self.taken += 1
        return self.batch

    def wait(self) -> None:
        self.waited += 1


class Uploads:
    """Remembers every upload, and how many had begun when each was taken."""

    def __init__(self) -> None:
        self.all: list[Upload] = []

    def begin(self, batch: PackedBatch) -> Upload:
        self.all.append(Upload(batch))
        return self.all[-1]

    def close(self) -> None:
        self.closed = True


def test_batches_are_copied_to_a_gpu_once_and_one_ahead(stores: dict[str, Path]) -> None:
    loader, plan, source = open_loader(stores["lossless"])
    loader.uploads = uploads = Uploads()  # type: ignore[assignment]
    begun = 0
    for number, step in enumerate(loader.stream(0)):
        plain = read_micro_batches(source, plan.micro_batches(number))
        for fill in [fill for micro in list(step._stream._alive)[:2] for fill in micro.fills]:
            fill.result()
        for batch, wanted in zip(step, plain, strict=True):
            begun += uploads.all[-1].batch is not batch
            assert all(torch.equal(getattr(batch, name), getattr(wanted, name)) for name in FIELDS)
    micros = plan.total_steps * plan.accumulation
    assert len(uploads.all) == micros and all((one.taken, one.waited) == (1, 1) for one in uploads.all)
    assert begun >= plan.total_steps - 1  # the next one's copy had begun while this one was worked on
    loader.close()
    assert uploads.closed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_the_same_batches_from_locked_memory(stores: dict[str, Path]) -> None:
    source, cfg = open_source(stores["int8"]), TrainConfig(global_batch_size=4, micro_batch_size=2, loader_workers=1)
    plan = StepPlan(RECORDS, cfg, 1, 0)
    loader = Loader(cfg, torch.device("cuda"), [Split(source, plan.micro_batches, range(6))])
    try:
        assert loader.uploads is not None and loader.uploads.locked
        for number, step in enumerate(loader.stream(0)):
            for batch, wanted in zip(step, read_micro_batches(source, plan.micro_batches(number)), strict=True):
                assert batch.features.is_cuda
                assert all(torch.equal(getattr(batch, name).cpu(), getattr(wanted, name)) for name in FIELDS)
                del batch
    finally:
        loader.close()


def test_small_bound_still_reads_one_beside_the_one_in_use(stores: dict[str, Path]) -> None:
    loader, plan, source = open_loader(stores["raw"])
    loader.rings[0].size = LEAST * max(
        batch_bytes(sum(source.lengths[i] for i in group), source.row)
        for s in range(plan.total_steps)
        for group in plan.micro_batches(s)
    )
    stream = loader.stream(0)
    for step in stream:
        for _ in step:
            assert len(stream._alive) < 2 or stream._alive[1].features is not None
    loader.close()


def damaged(path: Path, codec: str) -> tuple[str, str]:
    """Cut the data file of record r09 short, spoil a frame, or flip one bit of it; its shard and the record."""
    store = Store.open(path, wiring=wiring())
    place = store.place(9)
    begin, end = place.states["layer_1"][0]
    if codec == "raw":
        os.truncate(place.path, begin + 10)
    elif codec == "lossless":
        with open(place.path, "r+b") as file:
            file.seek(begin)
            file.write(bytes(12))
    else:
        flip(place.path, end - 1)
    return place.path, "r09"


def flip(path: str, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("codec", ["raw", "lossless", "int8"])
def test_damage_is_told_in_the_same_words_by_thread_and_worker(tmp_path: Path, codec: str) -> None:
    make_store(tmp_path / "store", codec)
    loaders = [open_loader(tmp_path / "store", loader_workers=count, global_batch_size=1) for count in (0, 1)]
    path, record = damaged(tmp_path / "store", codec)
    told = []
    for loader, plan, _ in loaders:
        at = next(s for s in range(RECORDS) if plan.global_batch(s) == [9])
        loader.splits = [Split(loader.splits[0].source, plan.micro_batches, range(at, at + 1))]
        with pytest.raises(IntegrityError) as caught:
            for step in loader.stream(0):
                list(step)
        loader.close()
        told.append(str(caught.value))
    assert told[0] == told[1] and "\n" not in told[0]
    assert path in told[0] and f"record {record}" in told[0] and "extract stage" in told[0]


@pytest.mark.parametrize("codec", ["raw", "lossless", "fp8", "int8"])
def test_no_flipped_bit_of_a_record_reaches_a_batch(tmp_path: Path, codec: str) -> None:
    make_store(tmp_path / "store", codec)
    source, region = open_source(tmp_path / "store"), Region(100)
    rows = torch.empty(source.lengths[9], 4 * 32, dtype=torch.bfloat16)
    place = source.store.place(9)
    reader = Decoders(0, region, False)
    source.fill(9, rows[:, :96], rows[:, 96:], reader)
    for begin, end in [*(span for spans in place.states.values() for span in spans), *place.tail]:
        for at in (begin, (begin + end) // 2, end - 1):
            flip(place.path, at)
            with pytest.raises(IntegrityError, match="record r09"):
                source.fill(9, rows[:, :96], rows[:, 96:], reader)
            with pytest.raises(IntegrityError, match="record r09"):
                source.get(9)
            flip(place.path, at)
    flip(place.path, place.tail[1][0])
    with pytest.raises(IntegrityError, match="checksums differ for record r09"):
        source.tokens(9)


def test_worker_that_dies_is_told_in_one_line(stores: dict[str, Path]) -> None:
    loader, *_ = open_loader(stores["int8"], loader_workers=1)
    try:
        stream = iter(loader.stream(0))
        list(next(stream))
        os.kill(loader.decoders.processes[0], signal.SIGKILL)
        with pytest.raises(RedraftError, match=r"a loader worker ended early \[.*record r\d\d\]: SIGKILL.*To mend: "):
            for step in stream:
                list(step)
    finally:
        loader.close()


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


def test_killed_trainer_leaves_no_worker(stores: dict[str, Path]) -> None:
    here = str(Path(__file__).parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": here}
    command = [sys.executable, str(Path(here) / "loader_store.py"), str(stores["int8"])]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert trainer.stdout
    *workers, rows = (int(word) for word in trainer.stdout.readline().split())
    assert len(workers) == 2 and rows > 0
    for pid in workers:  # what a batch system sends to a whole group is for the trainer alone to answer
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    time.sleep(0.2)
    assert all(alive(pid) for pid in workers)
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in workers)


def test_closing_early_leaves_nothing(stores: dict[str, Path]) -> None:
    before, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    loader, *_ = open_loader(stores["fp8"], loader_workers=1, prefetch_steps=50)
    for step in loader.stream(0):
        batch = next(iter(step))
        break
    (worker,) = loader.decoders._workers
    loader.close()
    assert worker.process.poll() is not None
    assert batch.features.isfinite().all()  # a batch that is still held stays whole
    del batch, step, loader
    gc.collect()
    assert threading.active_count() == before
    assert len(os.listdir("/proc/self/fd")) <= files


def test_error_of_a_thread_is_raised_where_the_batch_is_asked_for(stores: dict[str, Path]) -> None:
    loader, plan, source = open_loader(stores["raw"], global_batch_size=1)
    source.positions[plan.global_batch(5)[0]] = -1  # as in rounds, where a store holds a part
    stream = iter(loader.stream(0))
    for _ in range(5):
        list(next(stream))
    with pytest.raises(DataError, match=r"hidden states are not there.*record 'r\d\d'"):
        next(stream).outlines()
    loader.close()


def test_other_text_under_the_same_name_is_refused(stores: dict[str, Path]) -> None:
    source = open_source(stores["raw"])
    made = samples()
    made[3].input_ids[1] += 1
    source.prepared = Tokens(made)
    for read in (source.get, source.tokens):
        with pytest.raises(IntegrityError, match=r"another text under this record's name.*'r03'"):
            read(3)
    assert len(source.tokens(4)[0]) == source.lengths[4]


def test_token_outside_the_embedding_is_refused_alike(stores: dict[str, Path]) -> None:
    source, region = open_source(stores["raw"]), Region(100)
    source.embedding = table()[:1]
    rows = torch.empty(source.lengths[2], 4 * 32, dtype=torch.bfloat16)
    told = []
    for read in (lambda: source.get(2), lambda: source.fill(2, rows[:, :96], rows[:, 96:], Decoders(0, region, False))):
        with pytest.raises(WiringError) as caught:
            read()
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_rows_of_another_width_or_number_are_refused(stores: dict[str, Path]) -> None:
    place = open_source(stores["raw"], embedding=False).store.place(3)
    with pytest.raises(IntegrityError, match=r"final of record r03: bfloat16 of width 32"):
        StateReader().read(place, [("final", torch.empty(place.tokens, 33, dtype=torch.bfloat16), 0)])
    with pytest.raises(IntegrityError, match=r"final of record r03"):
        StateReader().read(place, [("final", torch.empty(place.tokens, 32, dtype=torch.bfloat16), 1)])
    with pytest.raises(IntegrityError, match=r"no layer_9 of record r03"):
        StateReader().read(place, [("layer_9", torch.empty(place.tokens, 32, dtype=torch.bfloat16), 0)])


@given(length=st.integers(1, 600), begin=st.integers(0, 300), most=st.integers(1, 50))
def test_a_piece_is_filled_however_little_a_call_gives(
    tmp_path_factory: pytest.TempPathFactory, length: int, begin: int, most: int
) -> None:
    content = bytes(number % 251 for number in range(1000))
    path = tmp_path_factory.getbasetemp() / "numbers"
    path.write_bytes(content)
    file, real = os.open(path, os.O_RDONLY), os.preadv

    def little(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        return real(descriptor, [pieces[0][:most]], offset)

    piece = np.zeros(length, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", little)
        state_read._fill(file, piece, begin)
        with pytest.raises(OSError, match="ends before byte 1001"):
            state_read._fill(file, np.zeros(30, np.uint8), 980)
    os.close(file)
    assert piece.tobytes() == content[begin : begin + length]


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("block", [1, 200, 1 << 20])
def test_a_state_is_the_same_read_in_blocks_of_any_size(
    stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch, codec: str, block: int
) -> None:
    store = open_source(stores[codec], embedding=False).store
    monkeypatch.setattr(state_read, "BLOCK", block)
    place, whole = store.place(3), store[3].final
    for first in (0, 1):
        for rows in (1, place.tokens - first):
            out = torch.empty(rows, 32, dtype=torch.bfloat16)
            StateReader().read(place, [("final", out, first)])
            assert torch.equal(out, whole[first : first + rows])


class Files:
    """As much of a source as choosing workers looks at."""

    def __init__(self, **facts: bool) -> None:
        self.files = SourceFiles(**facts)  # type: ignore[arg-type]


def test_workers_are_chosen_by_codec_size_and_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    raw, encoded, remote = Files(), Files(encoded=True), Files(remote=True)
    auto = TrainConfig(processes=2)
    chosen = [choose_workers(auto, [one], 1 << 40) for one in (raw, encoded, remote)]  # type: ignore[list-item]
    assert chosen == [0, 1, 1]  # on a CPU training itself wants the processors
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_workers(auto, [raw, encoded], 1 << 40) == 4  # type: ignore[list-item]
    assert choose_workers(auto, [encoded], 1 << 20) == 0  # type: ignore[list-item]
    assert choose_workers(TrainConfig(processes=16), [encoded], 1 << 40) == 1  # type: ignore[list-item]
    assert choose_workers(TrainConfig(loader_workers=7), [raw], 1) == 7  # type: ignore[list-item]


def test_waiting_is_told_with_what_to_raise() -> None:
    waits, cfg = Waits(), TrainConfig()
    waits.add(9.0, 8.0)  # the start is no fault of the settings
    waits.add(1.0, 0.01)
    assert waits.share == 0.01 and waits.advice(Spent(9.0, 1.0, 1.0, 10**9), 1, cfg) == ""
    waits.add(1.0, 0.5)
    assert waits.share == pytest.approx(0.255)
    advice = {
        "prefetch_steps": waits.advice(Spent(1.0, 1.0, 1.0, 10**9), 1, cfg),
        r"loader_workers \(now 2\)$": waits.advice(Spent(2.0, 18.0, 9.0, 10**9), 2, cfg),
        "faster disk": waits.advice(Spent(18.0, 2.0, 9.0, 10**9), 2, cfg),
    }
    for setting, line in advice.items():
        assert re.search(setting, line) and line.startswith("25.5% of the time was spent waiting for data: ")


def test_rows_know_their_bytes() -> None:
    row = RowShape(3 * 7168, 7168, torch.bfloat16)
    assert (
        row.bytes == 57344 and batch_bytes(10, row) == 573440 and batch_bytes(1, RowShape(3, 1, torch.float32)) == 128
    )
