"""Every planted fault is caught before training or serving, and the same inputs without it pass."""

from __future__ import annotations

import pytest
from faults_page import normal
from planted_all import PAGE
from planted_bench import Bench, Fault
from planted_store import train

LINES: dict[str, str] = {}


@pytest.mark.parametrize("fault", PAGE.faults, ids=[fault.name for fault in PAGE.faults])
def test_a_planted_fault_is_caught_and_its_absence_is_not(fault: Fault, bench: Bench) -> None:
    assert fault.run(bench, False) == ""
    line = fault.run(bench, True)
    assert "\n" not in line
    for words in fault.words:
        assert words in line
    LINES[fault.name] = normal(line, bench)


@pytest.mark.parametrize("setting", ["store.verify_records=0", "store.verify_max_gib=0"])
def test_without_the_measurement_a_wrong_store_reaches_training(setting: str, bench: Bench) -> None:
    """So it is the measurement that finds it, and a target too large to measure with does not stop training."""
    wrong = bench.planted_store(lambda sample: bench.feed(sample, None, layer_2="layer_3"))
    assert "layer_2 holds layer_3" in train(bench, wrong)
    assert train(bench, wrong, setting) == ""


def test_the_list_is_long_and_names_each_fault_once() -> None:
    assert len(PAGE.faults) >= 30
    assert len({fault.name for fault in PAGE.faults}) == len(PAGE.faults)


def test_the_page_is_what_the_product_prints(bench: Bench) -> None:
    lines = [LINES.get(fault.name) or normal(fault.run(bench, True), bench) for fault in PAGE.faults]
    assert PAGE.path.read_text(encoding="utf-8") == PAGE.text(lines), "run: python tests/faults/write_faults.py"
