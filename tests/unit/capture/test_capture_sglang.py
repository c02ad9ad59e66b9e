"""The SGLang backend's side of the pipe: whatever the worker does wrong becomes one line; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import fake_worker
import pytest
import torch

from data_prep.capture.sglang import SGLangCapture, check_embedding
from data_prep.capture.sglang_engine import EngineFacts, EnginePlan
from data_prep.config import SGLangCaptureConfig
from data_prep.extract import extract
from data_prep.store import Store, StoreManifest
from eagle3.conventions import convention
from eagle3.errors import DataError, RedraftError, WiringError
from eagle3.wiring import Site, Wiring

ROOT = Path(__file__).resolve().parents[3]
FAKE = Path(fake_worker.__file__)
BATCH = [
    ("a", [5, 9, 3, 17], [0, 1, 1, 1]),
    ("b", [7], [1]),
    ("c", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1] * 10),
    ("d", [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41], [1] * 12),
    ("e", [50, 51], [1, 0]),
]


def wiring(*layers: int, teacher: str = "final") -> Wiring:
    return Wiring(tuple(Site(k) for k in layers or (2, 3, 5)), teacher, "llama", fake_worker.LAYERS, fake_worker.H)


def plan(wired: Wiring, tp: int = 1) -> EnginePlan:
    rule = convention("sglang-0.5.23")
    return EnginePlan(EngineFacts("0.5.23", Path()), rule, rule.render(wired), "bfloat16", tp)


def start(tmp_path: Path, mode: str = "fine", wired: Wiring | None = None, tp: int = 1, **cfg: Any) -> SGLangCapture:
    wired = wired or wiring()
    settings = SGLangCaptureConfig(**{"timeout_s": 20.0, "start_timeout_s": 20.0, **cfg})
    return SGLangCapture(
        tmp_path,
        wired,
        plan(wired, tp),
        settings,
        vocab_size=64,
        log=tmp_path / "log" / "sglang.log",
        out_dtype=torch.float32,
        command=[sys.executable, str(FAKE), mode],
    )


def expected(layer: int, tokens: list[int]) -> torch.Tensor:
    return torch.from_numpy(fake_worker.state(layer, tokens))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int, within: float = 10.0) -> bool:
    end = time.monotonic() + within
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


@pytest.mark.parametrize("mode", ["fine", "reversed"])
def test_states_come_by_name_and_record_whatever_the_order_of_the_answer(tmp_path: Path, mode: str) -> None:
    with start(tmp_path, mode) as capture:
        samples = capture.run(BATCH)  # 29 tokens, 5 records: more than the fake's cache and request table hold
        again = capture.run(BATCH[::-1])[::-1]
    for (record_id, tokens, mask), one, other in zip(BATCH, samples, again, strict=True):
        assert (one.record_id, one.input_ids.tolist(), one.teacher) == (record_id, tokens, "final")
        assert one.loss_mask.tolist() == [bool(m) for m in mask]
        assert sorted(one.sites) == ["layer_2", "layer_3", "layer_5"]
        for k in (2, 3, 5):
            assert torch.equal(one.sites[f"layer_{k}"], expected(k, tokens))
            assert torch.equal(other.sites[f"layer_{k}"], one.sites[f"layer_{k}"])
        assert torch.equal(one.final, expected(fake_worker.LAYERS, tokens))


def test_the_normed_teacher_and_the_embedding_slot(tmp_path: Path) -> None:
    with start(tmp_path, wired=wiring(0, 2, teacher="final_normed")) as capture:
        assert capture.plan.ids == [-1, 1]
        one = capture.run(BATCH[:1])[0]
    assert sorted(one.sites) == ["layer_2"] and one.teacher == "final_normed"
    assert torch.equal(one.sites["layer_2"], expected(2, BATCH[0][1]))
    assert torch.equal(one.final, expected(fake_worker.LAYERS + 1, BATCH[0][1]))


def test_what_the_manifest_records(tmp_path: Path) -> None:
    with start(tmp_path, tp=2) as capture:
        assert len(capture.run(BATCH)) == len(BATCH)
    assert capture.info == {
        "backend": "sglang",
        "engine_version": "0.5.23",
        "convention": "sglang-0.5.23",
        "ids": [1, 2, 4],
        "tp": 2,
        "compute_dtype": "bfloat16",
    }


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [
        ("rows", RedraftError, "another number of states than tokens.*record a.*3 rows for 4 tokens"),
        ("missing", RedraftError, "left a request out.*record b"),
        ("foreign", RedraftError, "answered another request.*someone else.*not asked for"),
        ("twice", RedraftError, "answered another request.*record a.*twice"),
        ("other_tokens", RedraftError, "ran other tokens.*record b.*first at 0"),
        ("other_batch", RedraftError, "another batch"),
        ("cut", RedraftError, "states are not readable"),
        ("nan", RedraftError, "not finite.*record b"),
        ("off_by_one", WiringError, "slot 0 holds layer_1, expected layer_2; slot 1 holds layer_2"),
        ("no_hooks", WiringError, "cannot measure.*no hook fired at"),
        ("garbage", RedraftError, "unexpected answer while capturing 2 records of 5 tokens"),
        ("rank", RedraftError, "a rank .* died while capturing.*rank 1 died with exit code 1.*OutOfMemoryError"),
        ("memory", RedraftError, "out of memory while capturing 2 records.*20 GiB.*capture.batch_tokens"),
    ],
)
def test_a_wrong_answer_is_refused(tmp_path: Path, mode: str, kind: type[RedraftError], words: str) -> None:
    with start(tmp_path, mode) as capture, pytest.raises(kind, match=words) as error:
        capture.run(BATCH[:2])
    assert "\n" not in str(error.value)
    assert gone(capture.worker.pid)


def test_ranks_that_differ_are_partial_sums(tmp_path: Path) -> None:
    with start(tmp_path, "partial_sums", tp=2) as capture, pytest.raises(WiringError) as error:
        capture.run(BATCH[:2])
    line = str(error.value)
    assert (
        "partial sums" in line and "aux on rank 1" in line and "--enforce-disable-flashinfer-allreduce-fusion" in line
    )


def test_death_while_loading_shows_the_end_of_the_log(tmp_path: Path) -> None:
    with pytest.raises(RedraftError, match=r"died while loading the target.*exit code 3.*ValueError: no such arch"):
        start(tmp_path, "die_loading")
    with pytest.raises(RedraftError, match=r"SGLang failed while loading the target.*ValueError: unknown model"):
        start(tmp_path, "error_loading")


def test_silence_ends_the_worker(tmp_path: Path) -> None:
    with pytest.raises(RedraftError, match=r"silent for 1 s while loading the target.*start_timeout_s"):
        start(tmp_path, "hang_loading", start_timeout_s=1.0)
    with start(tmp_path, "hang", timeout_s=0.5) as capture:
        with pytest.raises(RedraftError, match="silent for 0 s while capturing"):
            capture.run(BATCH[:1])
        assert not alive(capture.worker.pid)


def test_another_build_than_planned_for_and_no_interpreter(tmp_path: Path) -> None:
    with pytest.raises(RedraftError, match=r"another SGLang than the ids were written for.*'0.5.9', expected '0.5.23'"):
        start(tmp_path, "other_version")
    wired = wiring()
    with pytest.raises(RedraftError, match=r"cannot start the SGLang worker \[capture.sglang.python\].*no/such/python"):
        SGLangCapture(
            tmp_path,
            wired,
            plan(wired),
            SGLangCaptureConfig(python="/no/such/python"),
            vocab_size=64,
            log=tmp_path / "log",
        )


def test_records_the_engine_cannot_read(tmp_path: Path) -> None:
    with start(tmp_path) as capture:
        for record, words in [
            (("long", list(range(21)), [1] * 21), "longer than SGLang can prefill at once.*record long.*21 tokens"),
            (("empty", [], []), "record empty.*no tokens"),
            (("mask", [1, 2], [1]), "record mask.*2 tokens but 1 mask"),
            (("foreign", [1, 64], [1, 1]), "record foreign.*1 to 64; the target has 64"),
        ]:
            with pytest.raises(DataError, match=words):
                capture.run([record])
        assert len(capture.run(BATCH[:1])) == 1  # still there


def test_an_embedding_that_is_changed_before_layer_0_is_refused() -> None:
    table = torch.randn(64, 8)
    tokens = torch.tensor([5, 9, 3])
    check_embedding(lambda ids: table[ids], tokens, table[tokens[:2]].clone())
    with pytest.raises(WiringError, match="changes its embedding"):
        check_embedding(lambda ids: table[ids], tokens, 2 * table[tokens])


def test_the_worker_and_its_ranks_end_with_the_capture(tmp_path: Path) -> None:
    with start(tmp_path, "grandchild"):
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(alive(pid) for pid in pids)
    assert all(gone(pid) for pid in pids)


def test_the_worker_dies_with_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from data_prep.capture.sglang_process import WorkerProcess\n"
        f"w = WorkerProcess([sys.executable, {str(FAKE)!r}, 'fine'], {{}}, Path({str(tmp_path / 'log')!r}))\n"
        "print(w.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert alive(worker)
        parent.kill()
    assert gone(worker)


def prepared(count: int = 14) -> datasets.Dataset:
    ids = [[(7 * i + j) % 60 for j in range(3 + i % 5)] for i in range(count)]
    rows = {"record_id": [f"r{i}" for i in range(count)], "input_ids": ids, "loss_mask": [[1] * len(x) for x in ids]}
    return datasets.Dataset.from_dict(rows)


def fill(capture: SGLangCapture, store: Path, **more: Any) -> Any:
    info = {**capture.info, **more}
    manifest = StoreManifest(capture.wiring, {"name": "fake"}, "tok", "tpl", dtype="float32", capture=info)
    return extract(prepared(), capture, store, manifest, batch_tokens=16, shard_tokens=12)


def content(store: Path) -> dict[str, tuple[torch.Tensor, ...]]:
    opened = Store.open(store)
    return {s.record_id: (s.final, *s.sites.values()) for s in (opened[i] for i in range(len(opened)))}


def test_a_worker_killed_in_the_middle_costs_no_record(tmp_path: Path) -> None:
    with start(tmp_path) as capture:
        assert fill(capture, tmp_path / "whole").complete
    with (
        start(tmp_path, "die_second") as capture,
        pytest.raises(RedraftError, match=f"killed by signal {int(signal.SIGKILL)}"),
    ):
        fill(capture, tmp_path / "broken")
    with start(tmp_path) as capture:
        done = fill(capture, tmp_path / "broken")
    assert done.complete and 0 < done.found_done < 14 and done.found_done + done.records == 14
    whole, mended = content(tmp_path / "whole"), content(tmp_path / "broken")
    assert whole.keys() == mended.keys() and len(whole) == 14
    assert all(torch.equal(a, b) for key in whole for a, b in zip(whole[key], mended[key], strict=True))


def test_a_store_is_not_continued_with_another_build_or_backend(tmp_path: Path) -> None:
    with start(tmp_path) as capture:
        fill(capture, tmp_path / "store")
        for other in ({"backend": "hf"}, {"engine_version": "0.5.9"}, {"ids": [2, 3, 5]}):
            with pytest.raises(RedraftError, match=f"capture.{next(iter(other))} is"):
                fill(capture, tmp_path / "store", **other)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for mode in ("fine", "memory"):
        with start(tmp_path, mode) as capture:
            if mode == "fine":
                capture.run(BATCH[:1])
    with pytest.raises(RedraftError):
        start(tmp_path, "die_loading")
    assert len(os.listdir("/proc/self/fd")) == before
