"""The tables of a selection and of the vocabulary at the sizes of a real one: 80 columns, no figure cut off."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.table import Table

from data_prep.coverage import coverage_table
from data_prep.select.table import quota_table, show_selection, source_table
from train.terminal import StageConsole

DOMAINS, LANGUAGES = ("chat", "instruction-following"), ("en", "zh")
LENGTHS = ("1-512", "513-2048", "2049-4096", "4097-8192", "8193-16384")


def quota(name: str) -> dict[str, Any]:
    return {"name": name, "got": 45_000, "wanted": 45_000, "supply": 1_234_567}


def selection(lengths: tuple[str, ...]) -> dict[str, Any]:
    cells = [
        {"domain": domain, "language": language, "length": length, "got": 12_345, "supply": 123_456}
        for domain in DOMAINS for language in LANGUAGES for length in lengths
    ]  # fmt: skip
    quotas = {"domain": map(quota, DOMAINS), "language": map(quota, LANGUAGES), "length": map(quota, lengths)}
    source = {"read": 1_234_567, "exact duplicates": 123_456, "near duplicates": 123_456, "to choose from": 1_000_000}
    return {
        "quotas": {kind: list(lines) for kind, lines in quotas.items()},
        "cells": cells,
        "sources": {"a_source_of_a_very_long_name": {**source, "selected": 100_000, "no question [sic]": 7}},
        "selected": 100_000, "wanted": 100_000, "moved_between_quotas": 12_345,
        "shortfalls": [{"kind": "language", "name": "zh", "got": 1, "wanted": 2, "why": "there is [no] more"}],
        "bad_records": [f"/data/a.jsonl, record {k}: [it] is no object" for k in range(5)],
    }  # fmt: skip


def coverage() -> dict[str, Any]:
    sizes = dict.fromkeys(("95%", "98%", "99%", "99.5%"), 123_456)
    group = {"tokens": 204_800_000, "unique": 163_840, "coverage": 0.98765, "vocab_needed": sizes, "records": 100_000}
    kinds = {"domain": dict.fromkeys(DOMAINS, group), "language": dict.fromkeys(LANGUAGES, group)}
    return {"vocab_size": 32_000, "target_vocab_size": 163_840, "min_coverage": 0.95, "all": group, **kinds}


def printed(*things: Any) -> str:
    stream = io.StringIO()
    console = StageConsole(file=stream, width=80)
    for thing in things:
        console.print(thing)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("table", "figures"),
    [
        (coverage_table(coverage()), ("204,800,000", "163,840", "98.77%", "language zh")),
        (quota_table(selection(LENGTHS[:4])), ("45,000 of 45,000", "1,234,567", "12,345", "4097-8192", "chat, en")),
        (quota_table(selection(LENGTHS)), ("45,000 of 45,000", "1,234,567", "61,725", "length 8193-16384")),
        (source_table(selection(LENGTHS)), ("1,234,567", "123,456", "1,000,000", "100,000", "to choose from")),
    ],
)
def test_80_columns_cut_no_figure_off(table: Table, figures: tuple[str, ...]) -> None:
    text = printed(table)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for figure in figures:
        assert figure in text


def test_brackets_in_names_stay_as_they_are() -> None:
    stream = io.StringIO()
    show_selection(selection(LENGTHS[:2]), StageConsole(file=stream, width=80))
    text = stream.getvalue()
    for line in (
        "      left out of a_source_of_a_very_long_name: no question [sic] 7",
        "      short: language zh: 1 of 2; there is [no] more",
        "      bad record: /data/a.jsonl, record 0: [it] is no object",
        "      and 2 more bad records, all in report.json",
    ):
        assert line in text.splitlines()
