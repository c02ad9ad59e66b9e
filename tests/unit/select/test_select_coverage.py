"""Coverage of a draft vocabulary, taken apart by domain and language, against counting by hand."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from data_prep import coverage
from data_prep.coverage import count_by_label, coverage_report, coverage_table
from eagle3.errors import DataError
from eagle3.vocab import build_draft_vocab

V = 40


def rows(*made: tuple[list[int], str, str]) -> Dataset:
    """Prepared rows whose tokens are all to be learnt, from position 2 on."""
    records = [
        {"input_ids": [0, 0, *ids], "loss_mask": [1, 1] + [1] * len(ids), "domain": domain, "language": language}
        for ids, domain, language in made
    ]
    return Dataset.from_list(records)


def by_hand(ids: list[int], covered: set[int]) -> dict[str, Any]:
    counts = Counter(ids)
    return {
        "tokens": len(ids),
        "unique": len(counts),
        "uncovered_tokens": sum(n for i, n in counts.items() if i not in covered),
        "uncovered_unique": sum(i not in covered for i in counts),
    }


RECORD = st.tuples(
    st.lists(st.integers(0, V - 1), max_size=20), st.sampled_from(["chat", "code", ""]), st.sampled_from(["en", "zh"])
)


@given(st.lists(RECORD, min_size=1, max_size=6), st.integers(1, V))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_figures_are_those_of_counting_by_hand(tmp_path: Path, made: list[Any], size: int) -> None:
    dataset = rows(*made)
    counts = count_by_label(dataset, V)
    vocab = build_draft_vocab(torch.from_numpy(counts.total), size)
    report = coverage_report(dataset, vocab, tmp_path / "coverage.json")
    covered = set(vocab.target_ids.tolist())
    groups: dict[tuple[str, str], list[int]] = {("all", ""): []}
    for ids, domain, language in made:
        for key in (("all", ""), ("domain", domain or "(none)"), ("language", language)):
            groups.setdefault(key, []).extend(ids)
    for (kind, label), ids in groups.items():
        one = report["all"] if kind == "all" else report[kind][label]
        wanted = by_hand(ids, covered)
        assert {key: one[key] for key in wanted} == wanted
        assert one["coverage"] == pytest.approx(1 - wanted["uncovered_tokens"] / len(ids) if ids else 1.0)
        for share in (0.95, 0.98, 0.99, 0.995):
            need = one["vocab_needed"][f"{100 * share:g}%"]
            assert reaches(counts.total, ids, need, share) and not (
                need and reaches(counts.total, ids, need - 1, share)
            )
    assert json.loads((tmp_path / "coverage.json").read_text()) == report


def reaches(total: np.ndarray, ids: list[int], size: int, share: float) -> bool:
    """Whether the vocabulary of that size, built as for training, covers the share of these tokens."""
    if not ids or not size:
        return not ids
    known = set(build_draft_vocab(torch.from_numpy(total), size).target_ids.tolist())
    return sum(i in known for i in ids) >= share * len(ids) - 1e-6


def test_a_small_language_below_the_bound_is_warned_about_with_the_size_that_would_do(tmp_path: Path) -> None:
    english = [list(range(2, 10)) * 12, "chat", "en"]
    chinese = [list(range(20, 30)), "chat", "zh"]
    dataset = rows(tuple(english), tuple(chinese))
    vocab = build_draft_vocab(torch.from_numpy(count_by_label(dataset, V).total), 12)
    report = coverage_report(dataset, vocab, tmp_path / "c.json", min_coverage=0.9)
    assert report["all"]["coverage"] > 0.9 and report["language"]["en"]["coverage"] == 1.0
    assert report["language"]["zh"]["coverage"] == 0.4 and report["language"]["zh"]["vocab_of_its_own"]["95%"] == 10
    assert report["warnings"] == [
        "the draft vocabulary of 12 covers 40.0% of language zh, below 90.0%; draft.vocab_size=17 would reach it"
    ]
    assert report["never_covered"] == list(range(24, 30))
    bigger = build_draft_vocab(torch.from_numpy(count_by_label(dataset, V).total), 17)
    assert coverage_report(dataset, bigger, tmp_path / "d.json", min_coverage=0.9)["warnings"] == []
    buffer = io.StringIO()
    Console(file=buffer, width=120).print(coverage_table(report))
    assert "language zh" in buffer.getvalue() and "40.00%" in buffer.getvalue()


def test_only_what_the_loss_supervises_counts(tmp_path: Path) -> None:
    dataset = Dataset.from_list([{"input_ids": [1, 2, 3, 4, 5], "loss_mask": [1, 1, 0, 1, 1]}])
    counts = count_by_label(dataset, V)
    assert np.flatnonzero(counts.total).tolist() == [4, 5] and counts.groups == {}
    report = coverage_report(dataset, build_draft_vocab(torch.from_numpy(counts.total), V), tmp_path / "c.json")
    assert "domain" not in report and report["all"]["tokens"] == 2 and report["never_covered"] == []


def test_counting_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    made = [(rng.integers(0, V, 9).tolist(), "abc"[i % 3], "de"[i % 2]) for i in range(20)]
    whole = count_by_label(rows(*made), V)
    monkeypatch.setattr(coverage, "COUNTED_TOGETHER", 10)
    pieces = count_by_label(rows(*made), V)
    assert whole.total.tolist() == pieces.total.tolist() and whole.records == pieces.records
    for kind, groups in whole.groups.items():
        assert {k: v.tolist() for k, v in groups.items()} == {k: v.tolist() for k, v in pieces.groups[kind].items()}


def test_a_token_of_another_tokenizer_is_refused() -> None:
    with pytest.raises(DataError, match="outside the vocabulary"):
        count_by_label(rows(([V], "a", "b")), V)


def test_uncovered_tokens_are_shown_as_text_where_a_tokenizer_is_given(tmp_path: Path) -> None:
    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join(chr(97 + i) for i in ids)

    dataset = rows(([2, 2, 2, 3, 3, 4], "a", "b"))
    vocab = build_draft_vocab(torch.from_numpy(count_by_label(dataset, V).total), 1)
    report = coverage_report(dataset, vocab, tmp_path / "c.json", tokenizer=Letters())
    assert [(one["text"], one["count"]) for one in report["all"]["most_uncovered"]] == [("d", 2), ("e", 1)]
