"""The step benchmark's yardstick computes what it is measured against, and its clock counts what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import extract, step
from benchmarks.plain_step import plain_loss
from benchmarks.side_by_side import Pair, take_turns
from benchmarks.step import Case, random_batch, random_draft, random_teacher
from eagle3.errors import RedraftError
from eagle3.ttt import PackedBatch
from train.losses import step_weights, supervised_counts, ttt_loss

CASE = Case(
    steps=4, length=9, documents=3, hidden=128, vocab=90, draft_vocab=50, supervised=0.7, device="cpu", dtype="float64"
)


def uneven(batch: PackedBatch) -> PackedBatch:
    """The same rows cut into documents of other lengths, supervised here and there."""
    batch.doc_lengths = [5, 1, 14, 7]
    batch.loss_mask = torch.rand(batch.rows) < 0.6
    return batch


@pytest.mark.parametrize("draft_vocab", [50, 90])
def test_plain_step_has_the_same_loss_counts_and_gradients(draft_vocab: int) -> None:
    case = replace(CASE, draft_vocab=draft_vocab)
    torch.manual_seed(0)
    draft = random_draft(case)
    teacher, batch = random_teacher(case, draft), uneven(random_batch(case))
    weights = step_weights(supervised_counts(batch, case.steps), 0.8)
    fast, (plain, right) = ttt_loss(draft, batch, teacher, weights, chunk=7), plain_loss(draft, batch, teacher, weights)
    assert plain > 0
    torch.testing.assert_close(fast.loss, plain, rtol=1e-10, atol=1e-12)
    assert fast.right.tolist() == right.tolist()
    leaves = [p for p in draft.parameters() if p.requires_grad]
    got, wanted = torch.autograd.grad(fast.loss, leaves), torch.autograd.grad(plain, leaves)
    for g, w in zip(got, wanted, strict=True):
        assert w.any()
        torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-12)


def test_benchmark_batches_are_supervised_as_asked() -> None:
    batch = random_batch(replace(CASE, length=20, supervised=0.5))
    assert batch.loss_mask.view(3, 20).int().tolist() == [[0] * 10 + [1] * 9 + [0]] * 3


def test_sides_take_turns_and_medians_make_the_ratio() -> None:
    calls: list[str] = []
    pair = take_turns(lambda: calls.append("a"), lambda: calls.append("b"), 3, torch.device("cpu"))
    assert "".join(calls) == "ababab" and len(pair.a) == len(pair.b) == 3
    known = Pair([2.0, 9.0, 4.0], [1.0, 2.0, 8.0])
    assert known.medians == (4.0, 2.0) and known.ratio == 2.0 and known.spread == (0.5, 4.5)


def test_sizes_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(RedraftError, match="--hidden"):
        replace(CASE, hidden=100)
    with pytest.raises(RedraftError, match="--supervised"):
        replace(CASE, supervised=0.0)


def test_nothing_is_timed_when_the_losses_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "plain_loss", lambda *args: tuple(1.001 * x for x in plain_loss(*args)))
    with pytest.raises(RedraftError, match="losses differ"):
        step.compare(CASE, 1)


def test_extract_benchmark_leaves_its_figures_and_no_store(tmp_path: Path) -> None:
    sizes = ["--hidden", "64", "--layers", "8", "--vocab", "50", "--documents", "3", "--length", "16", "--rounds", "2"]
    assert extract.main([*sizes, "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["extract.json", "extract.txt"]
    result = json.loads((tmp_path / "extract.json").read_text())
    assert [case["codec"] for case in result["cases"]] == ["raw", "lossless", "fp8", "int8"]
    for case in result["cases"]:
        assert len(case["seconds_extract_forward"]["a"]) == len(case["seconds_extract_forward"]["b"]) == 2
        assert min(case["processor_extract_forward"]["a"]) > 0
    assert result["cases"][0]["store_bytes"] >= result["tokens"] * 4 * 64 * 2  # three sites and the teacher, bfloat16
