"""Every bad input gets one line, with exit code 2 and nothing half-written; the same command takes the sound input."""

from __future__ import annotations

import pytest
from bad_all import PAGE
from bad_bench import UntoldError, the_line
from faults_page import normal
from planted_bench import Bench, Fault

LINES: dict[str, str] = {}


@pytest.mark.parametrize("fault", PAGE.faults, ids=[fault.name for fault in PAGE.faults])
def test_a_bad_input_gets_one_line_and_the_sound_one_none(fault: Fault, bench: Bench) -> None:
    assert fault.run(bench, False) == ""
    line = fault.run(bench, True)
    for words in fault.words:
        assert words in line
    LINES[fault.name] = normal(line, bench)


@pytest.mark.parametrize(
    ("code", "err"),
    [
        (1, "error: it is wrong. To mend: mend it\n"),
        (2, "error: it is wrong\n"),
        (2, "it is wrong. To mend: mend it\n"),
        (2, "error: it is wrong. To mend: mend it\nand more\n"),
        (2, ""),
    ],
    ids=["another exit code", "no mend", "no error", "two lines", "nothing"],
)
def test_a_refusal_that_breaks_a_rule_is_none(code: int, err: str) -> None:
    with pytest.raises(UntoldError):
        the_line(code, err)


def test_the_list_is_long_and_names_each_input_once() -> None:
    assert len(PAGE.faults) >= 80
    assert len({fault.name for fault in PAGE.faults}) == len(PAGE.faults)


def test_the_page_is_what_the_product_prints(bench: Bench) -> None:
    lines = [LINES.get(fault.name) or normal(fault.run(bench, True), bench) for fault in PAGE.faults]
    assert PAGE.path.read_text(encoding="utf-8") == PAGE.text(lines), "run: python tests/faults/write_faults.py"
