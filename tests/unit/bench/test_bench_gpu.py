"""The GPU script without a GPU: its time box, its verdicts, its engine, and the whole of it at tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpu import __main__ as script
from benchmarks.gpu import numerics, plan, training
from benchmarks.gpu.engines import MasterAdamW
from benchmarks.gpu.synthetic import KIMI, SMALL
from benchmarks.gpu.timebox import DONE, FAILED, NO_MEMORY, NO_TIME, WRONG, Clock, Outcome, Task, run_tasks
from eagle3.errors import RedraftError
from train.config import TrainConfig

CPU = torch.device("cpu")
TINY = replace(
    SMALL,
    hidden=64,
    vocab=96,
    draft_vocabs=(32, 96),
    length=24,
    packed=(2, 12),
    steps=(2, 3),
    documents=2,
    square=32,
    repeats=1,
    target_intermediate=64,
)


class Hand:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def task(name: str, least: float, run: Any) -> Task:
    return Task("section", name, least, run)


def test_what_no_longer_fits_the_time_is_left_out_and_shorter_tasks_still_run() -> None:
    hand, kept = Hand(), []
    clock = Clock(10, now=hand)

    def long(_clock: Clock) -> dict[str, Any]:
        hand.time += 7
        return {"value": 1}

    tasks = [task("first", 5, long), task("second", 5, long), task("third", 2, lambda _clock: {"value": 3})]
    outcomes = run_tasks(tasks, clock, lambda so_far: kept.append([one.name for one in so_far]))
    assert [one.state for one in outcomes] == [DONE, NO_TIME, DONE]
    assert "5 s" in outcomes[1].note and outcomes[2].figures == {"value": 3}
    assert kept == [["first"], ["first", "second"], ["first", "second", "third"]]
    assert not clock.over and clock.left == 3


def test_a_task_that_fails_says_why_and_the_next_one_runs() -> None:
    def full(_clock: Clock) -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB\nand a page more")

    def expected(_clock: Clock) -> dict[str, Any]:
        raise RedraftError("no such thing", mend="look elsewhere")

    def surprise(_clock: Clock) -> dict[str, Any]:
        raise RuntimeError("a kernel's own words")

    runs = {"full": full, "expected": expected, "surprise": surprise, "wrong": lambda _clock: {"wrong": "off by 3"}}
    outcomes = run_tasks([task(name, 1, run) for name, run in runs.items()], Clock(1e9), lambda _so_far: None)
    assert [one.state for one in outcomes] == [NO_MEMORY, FAILED, FAILED, WRONG]
    assert outcomes[0].note == "CUDA out of memory. Tried to allocate 3 GiB"
    assert outcomes[1].note == "no such thing. To mend: look elsewhere"
    assert outcomes[2].note == "RuntimeError: a kernel's own words" and outcomes[3].note == "off by 3"


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main([]) == script.NO_GPU
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "no GPU" in said[0] and "ready" in said[0]


def test_the_script_starts_where_little_is_installed() -> None:
    """A borrowed GPU machine may have torch and not much else; what only some sections need is imported there."""
    heavy = {"hydra", "omegaconf", "deepspeed", "datasets", "transformers", "wandb", "matplotlib"}
    code = (
        f"import sys, benchmarks.gpu.__main__; print(sorted({heavy} & {{name.split('.')[0] for name in sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("argv", [["--device", "cpu"], ["--device", "cpu", "--small", "--minutes", "0"]])
def test_arguments_that_cannot_be_are_refused_by_name(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(argv) == 2
    assert argv[-1 if len(argv) == 2 else -2] in capsys.readouterr().err


def test_the_script_runs_whole_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "SMALL", TINY)
    cases = plan.step_cases(TINY)
    few = [cases[0], cases[2], next(case for case in cases if case.kind == "mla"), cases[-1]]
    monkeypatch.setattr(plan, "step_cases", lambda _sizes: few)
    monkeypatch.setattr(plan, "STATE_CODECS", ("raw", "int8"))
    assert script.main(["--device", "cpu", "--small", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.txt"]  # no store is left
    result = json.loads((tmp_path / "gpu.json").read_text())
    outcomes = [Outcome(**one) for one in result["outcomes"]]
    assert {one.state for one in outcomes} == {DONE}
    steps = [one.figures for one in outcomes if one.section == "training step"]
    best = outcomes[0].figures["best"]
    for found in steps:
        assert found["mfu"] == pytest.approx(found["tflops"] / best)
        assert found["tflops"] * 1e12 * found["seconds"]["median"] == pytest.approx(found["needed_flops"]["total"])
        assert found["loss"] > 0 and found["memory"]["predicted"] > 0
    raw = next(one.figures for one in outcomes if one.name == "raw")
    assert raw["bytes"] >= raw["tokens"] * 4 * 64 * 2
    text = (tmp_path / "gpu.txt").read_text()
    assert "DeepSpeed" in text and all(case.name in text for case in few)


def test_numerics_tell_a_wrong_formula_from_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numerics.check(TINY, [9, 1, 14], "llama", 3, torch.float32, CPU)
    assert right["wrong"] == "" and 0 < right["asking"] < right["rows"] == 24
    honest = numerics.ttt_loss

    def sharper(draft: Any, batch: Any, teacher: Any, *rest: Any, **options: Any) -> Any:
        return honest(draft, batch, replace(teacher, head=1.1 * teacher.head), *rest, **options)

    monkeypatch.setattr(numerics, "ttt_loss", sharper)
    assert "off by" in numerics.check(TINY, [9, 1, 14], "llama", 3, torch.bfloat16, CPU)["wrong"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verdicts_allow_rounding_and_no_more(dtype: str) -> None:
    def errors(loss: float, gradient: float) -> dict[str, Any]:
        return {"loss": loss, "gradient": gradient, "worst": "fc.weight"}

    kind = getattr(torch, dtype)
    loss, gradient = numerics.LIMIT[dtype]
    plain = errors(loss, 3 * gradient)
    fine = {"fast": errors(loss, 5 * gradient), "recomputed": errors(loss, gradient), "plain": plain}
    assert numerics.judge(fine, kind) == ""
    assert "fc.weight" in numerics.judge({**fine, "fast": errors(loss, 7 * gradient)}, kind)
    assert "recomputed loss" in numerics.judge({**fine, "recomputed": errors(float("nan"), gradient)}, kind)


def test_master_weights_keep_what_bfloat16_cannot_hold() -> None:
    """Many steps too small for the weights' own dtype add up, as with AdamW in float32 all along."""
    cfg = TrainConfig(lr=1e-4, grad_clip=0.5)
    torch.manual_seed(0)
    narrow = nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        narrow.weight.copy_(narrow.weight.bfloat16())
    wide = nn.Linear(4, 3, bias=False)
    wide.load_state_dict(narrow.state_dict())
    narrow = narrow.bfloat16()
    engine = MasterAdamW(narrow, cfg, CPU)
    exact = torch.optim.AdamW(wide.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(20):
        engine.backward(narrow.weight.float().sum() * 5)
        engine.step()
        assert narrow.weight.grad is None
        (wide.weight.sum() * 5).backward()
        torch.nn.utils.clip_grad_norm_(wide.parameters(), 0.5)
        exact.step()
        exact.zero_grad()
    torch.testing.assert_close(engine.masters[0], wide.weight.detach(), rtol=1e-5, atol=1e-7)
    assert torch.equal(narrow.weight.detach(), wide.weight.detach().bfloat16())


def test_every_case_of_the_issue_is_planned_once_and_the_presets_come_first() -> None:
    cases = plan.step_cases(KIMI)
    assert len({case.name for case in cases}) == len(cases)
    grid = {
        (c.intermediate, c.draft_vocab, c.steps, c.recompute) for c in cases if c.kind == "llama" and c.length == 4096
    }
    assert {
        (i, v, k, r) for i in (12288, 18432) for v in (32000, 163840) for k in (4, 7) for r in (False, True)
    } <= grid
    assert cases[0] == training.StepCase("llama", 12288, 32000, 4, 1, 4096)
    tasks = plan.Plan(KIMI, CPU, None, Path("unused")).tasks()
    assert [one.section for one in tasks[:9]] == [
        "matrix rate",
        *["numerics"] * 3,
        *["training step"] * 3,
        "extraction",
        "copy",
    ]
