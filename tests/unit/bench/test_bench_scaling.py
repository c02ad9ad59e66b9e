"""The scaling arithmetic against sums done by hand, and the simulated loads against the plan they come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.gpu.synthetic import KIMI
from benchmarks.imbalance import imbalance, long_tailed
from benchmarks.scaling import Links, StepTime, moved_bytes, step_time
from train.batches import StepPlan
from train.config import TrainConfig
from train.front.estimate import flops_per_token
from train.hardware import HardwareConfig


def test_a_ring_sends_each_byte_twice_less_what_it_keeps() -> None:
    assert moved_bytes(1000, 1, 8, 4) == (2 * 7 / 8 * 2000, 2 * 7 / 8 * 2000)
    assert moved_bytes(1000, 0, 1, 4) == (0, 0)
    assert moved_bytes(1000, 3, 8, 4) == (3 * 7 / 8 * 2000, 9 * 7 / 8 * 2000)
    assert moved_bytes(1000, 2, 8, 4, element=4)[0] == 2 * moved_bytes(1000, 2, 8, 4)[0]


def test_the_slowest_link_on_the_way_decides() -> None:
    links = Links(nvlink=350.0, cards=2, card=40.0)
    assert links.ring(8, 8) == 350.0 and links.ring(16, 8) == 80.0
    assert Links(nvlink=100.0).ring(16, 8) == 100.0


def test_a_steps_parts_add_up_and_efficiency_is_what_the_mean_process_computes() -> None:
    one = StepTime(gpus=8, samples=64, compute=1.0, uneven=1.5, network=0.3, optimizer=0.2, tokens=4000.0)
    assert (
        one.seconds == pytest.approx(2.0) and one.efficiency == pytest.approx(0.5) and one.rate == pytest.approx(2000)
    )


def test_step_time_is_the_plans_rule_over_the_assumed_rate() -> None:
    machine, shape = HardwareConfig(gpu_tflops=100.0, train_mfu=0.5), KIMI.shape()
    alone = step_time(shape, 4, machine, Links(), [100, 300], gpus=1, samples=8)
    assert alone.compute == pytest.approx(flops_per_token(shape, 4)[0] * 8 * 200 / 50e12)
    assert alone.uneven == 1.0 and alone.network == 0.0
    shared = step_time(shape, 4, machine, Links(), [200] * 4, gpus=2, samples=8)
    assert shared.compute == pytest.approx(alone.compute / 2) and shared.uneven == 1.0
    assert shared.optimizer == pytest.approx(alone.optimizer / 2) and shared.network > 0


def test_imbalance_is_that_of_the_plan_itself() -> None:
    lengths = [5, 9, 30, 1, 12, 7, 3, 22]
    cfg = TrainConfig(global_batch_size=4, micro_batch_size=2, max_steps=1, seed=3)
    for drawn in (True, False):
        plans = [StepPlan(8, cfg, 2, rank, None if drawn else lengths) for rank in (0, 1)]
        loads = [sum(lengths[i] for m in plan.micro_batches(0) for i in m) for plan in plans]
        found = imbalance(lengths, 2, 4, steps=1, seed=3, drawn=drawn).mean
        assert found == pytest.approx(max(loads) / (sum(loads) / 2))
    assert imbalance([7] * 50, 5, 10).mean == imbalance([7] * 50, 5, 10, drawn=True).mean == 1.0


def test_dealing_by_length_is_never_worse_on_long_tails() -> None:
    lengths = long_tailed(5000, 700, 0.8, 2048)
    assert max(lengths) == 2048 and min(lengths) >= 16
    drawn, dealt = (imbalance(lengths, 8, 64, steps=50, drawn=d) for d in (True, False))
    assert 1.0 <= dealt.mean < 1.05 < drawn.mean <= drawn.high


def test_the_command_prints_every_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--nodes", "1", "2", "--samples", "2", "--batch", "16", "--out", str(tmp_path)]
    assert scaling.main(argv) == 0
    said = capsys.readouterr().out
    for word in ("efficiency", "ZeRO 3", "int8", "as drawn", "extraction"):
        assert word in said
    told = json.loads((tmp_path / "scaling.json").read_text())
    assert [pair[0]["gpus"] for pair in told["grows"]] == [1, 8, 16]
    assert [pair[0]["samples"] for pair in told["stays"]] == [16, 16, 16]
    assert scaling.main(["--nodes", "0", "--out", str(tmp_path)]) == 2
    assert "--nodes" in capsys.readouterr().err
