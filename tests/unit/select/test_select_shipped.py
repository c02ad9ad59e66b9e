"""The shipped selection and the benchmark do what their texts say."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from omegaconf import OmegaConf
from select_sources import read_selected

from benchmarks import selection
from data_prep.select.config import SelectConfig
from data_prep.select.stage import select

ROOT = Path(__file__).resolve().parents[3]


def test_the_shipped_selection_fills_its_quotas_and_meets_what_is_planted(tmp_path: Path) -> None:
    text = (ROOT / "conf" / "select" / "demo.yaml").read_text(encoding="utf-8").replace("${project_root:}", str(ROOT))
    merged = OmegaConf.merge(OmegaConf.structured(SelectConfig), OmegaConf.create(text))
    cfg = OmegaConf.to_object(merged)
    assert isinstance(cfg, SelectConfig) and cfg.shortfall == "refuse"
    cfg.length_buckets = {}  # lengths are in the target's tokens, and here is no target
    report = select(cfg, tmp_path, None)
    records = read_selected(tmp_path)
    assert Counter(one["domain"] for one in records) == {"chat": 146, "code": 43, "math": 41, "agent": 10}
    assert Counter(one["language"] for one in records) == {"en": 149, "zh": 48, "de": 31, "es": 12}
    assert report["evaluation_prompts"]["records_left_out"] == {"exact": 1, "contained": 1, "near": 1}
    shared = report["sources"]["shared"]
    assert shared["read"] == 17 and shared["to choose from"] + 3 <= 17
    assert report["duplicates"]["exact"] == 3 and report["duplicates"]["near"] >= 3
    assert report["bad_records"] == [] and all(one["messages"][-1]["role"] in ("user", "tool") for one in records)


def test_the_benchmark_leaves_its_figures_and_nothing_else(tmp_path: Path) -> None:
    argv = ["--records", "200", "--chars", "120", "--rounds", "1", "--exclude", str(ROOT / "data" / "eval")]
    assert selection.main([*argv, "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["selection.json", "selection.txt"]
    seconds = json.loads((tmp_path / "selection.json").read_text())["seconds"]
    assert list(seconds) == ["read, exact duplicates", "+ language", "+ near-duplicates", "+ evaluation prompts"]
    assert selection.main(["--records", "0", "--out", str(tmp_path)]) == 2
