"""The draft vocabulary: built once from what the loss supervises, and measured by domain and language."""

from __future__ import annotations

from pathlib import Path

import torch

from data_prep.coverage import coverage_report, coverage_table
from data_prep.prepare import count_supervised, load_prepared
from eagle3.errors import IntegrityError
from eagle3.vocab import DraftVocab, build_draft_vocab, load_vocab, save_vocab, vocab_key
from train.front.console import console
from train.front.context import Run


def draft_vocab_file(run: Run) -> Path:
    """The draft vocabulary's file, built from the supervised tokens unless one of these very counts stands there."""
    path = run.run_dir / "train" / "draft_vocab.safetensors"
    counts = torch.from_numpy(count_supervised(load_prepared(run.prepared, "train"), run.config.target.vocab_size))
    key = vocab_key(counts, run.config.draft.vocab_size)
    if path.exists():
        try:
            load_vocab(path, key=key)
            return path
        except IntegrityError:
            pass  # of other counts or sizes: built again below
    vocab = build_draft_vocab(counts, run.config.draft.vocab_size)
    filled = f", {vocab.filled:,} ids filled up with tokens never seen" if vocab.filled else ""
    console.print(f"      draft vocabulary: {vocab.size:,} tokens, {vocab.coverage:.2%} of supervised ones{filled}")
    show_coverage(run, vocab)
    save_vocab(path, vocab)  # last: where it stands, coverage.json is its own
    return path


def show_coverage(run: Run, vocab: DraftVocab) -> None:
    """Measure the vocabulary by domain and language, where records name them; write `train/coverage.json`."""
    rows = load_prepared(run.prepared, "train")
    out = run.run_dir / "train" / "coverage.json"
    report = coverage_report(rows, vocab, out, min_coverage=run.config.select.min_coverage, tokenizer=run.tokenizer)
    labels = {label for kind in ("domain", "language") for label in report.get(kind, {})}
    if len(labels) > 1:
        console.print(coverage_table(report))
    for line in report["warnings"]:
        console.print(f"      {line}", style="yellow")
