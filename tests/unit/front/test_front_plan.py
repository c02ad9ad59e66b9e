"""The plan's numbers are those of its formulas and of what was published, and it touches nothing on disk."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from eagle3.atomic import write_json
from eagle3.errors import RedraftError
from train.front.config import PROJECT_ROOT, RedraftConfig, register, typed
from train.front.console import console
from train.front.estimate import flops_per_token, measured_rates, published_hours, samples_and_tokens, stage_costs
from train.front.plan import draft_of, make_plan, plan
from train.front.refusals import longest_that_fits, planned_settings
from train.memory import train_memory


def kimi(*overrides: str) -> RedraftConfig:
    register()
    with initialize_config_dir(config_dir=str(PROJECT_ROOT / "conf"), version_base="1.3"):
        return typed(compose("config", overrides=["conf=kimi_k25", *overrides]))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shown(config: RedraftConfig, width: int = 80) -> str:
    before, console.width = console.width, width
    try:
        with console.capture() as taken:
            plan(config)
    finally:
        console.width = before
    return taken.get()


def cost(config: RedraftConfig, stage: str):
    rates = measured_rates(config)
    return next(c for c in stage_costs(config, draft_of(config), rates) if c.stage == stage)


def test_states_cost_what_was_published(elsewhere: Path) -> None:
    made = cost(kimi(), "extract")
    assert made.low == made.high == 204_800_000 * (57_344 + 5)
    assert made.high / 1e12 == pytest.approx(11.7, abs=0.05)
    assert "4 x 7,168 x 2" in made.size and "100,000 samples x 2,048" in made.size
    fp8, lossless = cost(kimi("store.codec=fp8"), "extract"), cost(kimi("store.codec=lossless"), "extract")
    assert fp8.high < 0.52 * made.high and fp8.low == fp8.high
    assert fp8.high < lossless.low < lossless.high < made.high


def test_hours_follow_from_the_formula(elsewhere: Path) -> None:
    config = kimi()
    made = cost(config, "extract")
    by_hand = 2 * 32e9 * 204.8e6 / (8 * 989e12 * 0.15) / 3600
    assert made.hours == pytest.approx(by_hand) and f"{by_hand:.2f} h" in made.time
    slow = cost(kimi("hardware.disk_write_gbps=0.1"), "extract")
    assert slow.hours == pytest.approx(slow.high / 0.1e9 / 3600)
    assert cost(kimi("hardware.nodes=4"), "extract").hours == pytest.approx(by_hand / 4)
    each, said = flops_per_token(draft_of(config), 4)
    words = 3 * 7168 * 8192  # half of q, k and v, once for all steps
    layer = words + 8192 * 7168 + 3 * 7168 * 12288 + 4 * 7168
    assert each == pytest.approx(6 * (3 * 7168**2 + words + 4 * (layer + 32000 * 7168)) + 2 * 163840 * 7168, rel=1e-6)
    assert f"= {each / 1e9:.1f} GFLOP" in said


def test_hours_are_within_the_published_runs_order(elsewhere: Path) -> None:
    config = kimi()
    known, said = published_hours(samples_and_tokens(config)[1])
    assert known == pytest.approx(51.2) and "1,500 H200-hours" in said
    ours = 8 * sum(cost(config, stage).hours for stage in ("extract", "train"))
    assert known / 3 < ours < 3 * known


def test_measured_rates_replace_assumptions(elsewhere: Path) -> None:
    config = kimi()
    assert measured_rates(config).source == ""
    write_json(elsewhere / config.paths.store / "stage.json", {"captured": 1000, "seconds": 10.0})
    rows = [{"kind": "train", "step": n, "tokens": 300, "seconds": s} for n, s in ((1, 3.0), (2, 1.0), (3, 1.0))]
    log = elsewhere / config.run_dir / "train" / "metrics.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rates = measured_rates(config)
    assert (rates.extract, rates.train, rates.source) == (100.0, 300.0, config.run_dir)
    assert cost(config, "extract").hours == pytest.approx(204.8e6 / 100 / 3600)
    assert cost(config, "train").hours == pytest.approx(204.8e6 * 0.99 / 300 / 3600)
    with pytest.raises(RedraftError, match="no rates were measured there"):
        measured_rates(kimi("hardware.measured=nowhere"))


def test_the_stage_is_chosen_by_the_hardware(elsewhere: Path) -> None:
    roomy = make_plan(kimi())
    assert roomy.fit.plan is not None and roomy.fit.plan.settings.stage == 1
    assert roomy.fit.plan.settings.world == 8 and roomy.fit.plan.settings.rows == 8 * 2048
    small = make_plan(kimi("train.micro_batch_size=1")).fit.plan
    assert small is not None and small.settings.stage == 1 and small.settings.accumulation == 8
    less = f"hardware.gpu_memory_gib={small.peak / 0.9 / 2**30 - 0.05}"
    tight = make_plan(kimi("train.micro_batch_size=1", less))
    assert tight.fit.plan is not None and tight.fit.plan.settings.stage > 1
    set_too_low = make_plan(kimi("train.micro_batch_size=1", less, "train.zero_stage=1"))
    assert any(line.startswith("train: ZeRO stage 1 needs") for line in set_too_low.refusals)
    none = make_plan(kimi("hardware.gpu_memory_gib=10"))
    assert none.fit.plan is None and any("at any ZeRO stage" in line for line in none.refusals)


def test_the_longest_sample_that_fits_is_the_longest(elsewhere: Path) -> None:
    config = kimi()
    shape, settings = draft_of(config), replace(planned_settings(config, draft_of(config)), stage=1)
    limit = 30 * 2**30
    longest = longest_that_fits(shape, settings, limit)
    assert train_memory(shape, replace(settings, rows=longest)).peak <= limit
    assert train_memory(shape, replace(settings, rows=longest + 1)).peak > limit


def test_refusals_name_the_disk_and_the_longest_sample(elsewhere: Path) -> None:
    lines = make_plan(kimi("data.max_length=65536", "train.micro_batch_size=1")).refusals
    disk = next(line for line in lines if line.startswith("extract: ") and "free" in line)
    assert "set disk_budget" in disk
    assert any("65,536 tokens = 3.76 GB of states; capture.batch_tokens=16,384 is less" in line for line in lines)


def test_rounds_are_shown_and_shrink_what_the_disk_must_hold(elsewhere: Path) -> None:
    made = make_plan(kimi("data.max_samples=2000", "disk_budget=100GB"))
    assert made.rounds is not None and len(made.rounds.rounds) > 2
    assert made.rounds.peak_bytes <= 100e9
    assert "Rounds within 100.00 GB" in shown(kimi("data.max_samples=2000", "disk_budget=100GB"))
    broken = make_plan(kimi("data.max_samples=2000", "disk_budget=1GB"))
    assert broken.rounds is None and broken.refusals


def test_the_plan_fits_80_columns_and_touches_nothing(elsewhere: Path) -> None:
    text = shown(kimi())
    tables = [line for line in text.splitlines() if not line.startswith(("  missing here: ", "  would be refused: "))]
    assert max(len(line.rstrip()) for line in tables) <= 80  # sentences stay whole in a file
    for word in ("11.75 TB", "[2, 30, 58]", "[3, 31, 59]", "ZeRO stage 1 (chosen)", "published:", "missing here"):
        assert word in text
    assert re.search(r"peak [\d.]+ GB = [\d.]+ GiB of 125\.1 allowed", text)
    assert list(elsewhere.iterdir()) == []


def test_the_plan_as_json_only_where_asked(elsewhere: Path) -> None:
    shown(kimi("plan_json=plan.json"))
    told = json.loads((elsewhere / "plan.json").read_text())
    assert [path.name for path in elsewhere.iterdir()] == ["plan.json"]
    assert told["memory"]["zero_stage"] == 1
    assert told["memory"]["peak"] == sum(
        part["size"] for part in told["memory"]["parts"] if told["memory"]["fullest"] in part["phases"]
    )
    assert told["trained_parameters"] == 1_058_828_288
