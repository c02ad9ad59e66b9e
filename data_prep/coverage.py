"""How much of each domain's and language's text a draft vocabulary covers.

A draft can only propose tokens of its vocabulary. One that was counted on mostly English text covers English well and
says so in one figure, while the answers in another language fall out of it. So the figure is taken apart.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from data_prep.prepare import supervised_ids
from eagle3.atomic import write_json
from eagle3.vocab import DraftVocab

LABELS = ("domain", "language")
UNLABELLED = "(none)"
SHARES = (0.95, 0.98, 0.99, 0.995)
NAMED_TOKENS = 20  # most frequent uncovered tokens that the report names in each group
COUNTED_TOGETHER = 1 << 20  # tokens
LISTED_IDS = 2000  # uncovered token ids that the report lists over all groups


@dataclass
class LabelledCounts:
    """Supervised tokens by label.

    Args:
        total: [V] int64, how often each token is to be predicted.
        groups: kind ("domain", "language") -> label -> [V] int64.
        records: kind -> label -> conversations.
    """

    total: np.ndarray
    groups: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    records: dict[str, dict[str, int]] = field(default_factory=dict)


def count_by_label(dataset: Any, vocab_size: int) -> LabelledCounts:
    """Count what the loss supervises in a prepared set, in all and by its columns `domain` and `language`.

    Args:
        dataset: rows with `input_ids` and `loss_mask`; columns for labels may be missing, and so may single labels.
        vocab_size: the target's V.

    Raises:
        DataError: a token id lies outside the target's vocabulary.
    """
    kinds = [kind for kind in LABELS if kind in dataset.column_names]
    by_labels: dict[tuple[str, ...], np.ndarray] = {}
    waiting: dict[tuple[str, ...], list[np.ndarray]] = defaultdict(list)
    counts = LabelledCounts(
        np.zeros(vocab_size, dtype=np.int64), {kind: {} for kind in kinds}, {kind: {} for kind in kinds}
    )
    tokens = 0
    for row, learnt in supervised_ids(dataset.select_columns(["input_ids", "loss_mask", *kinds]), vocab_size):
        labels = tuple(str(row[kind] or UNLABELLED) for kind in kinds)
        waiting[labels].append(learnt)
        for kind, label in zip(kinds, labels, strict=True):
            counts.records[kind][label] = counts.records[kind].get(label, 0) + 1
        tokens += len(learnt)
        if tokens >= COUNTED_TOGETHER:
            _count(waiting, by_labels, vocab_size)
            tokens = 0
    _count(waiting, by_labels, vocab_size)
    for labels, own in by_labels.items():
        counts.total += own
        for kind, label in zip(kinds, labels, strict=True):
            counts.groups[kind].setdefault(label, np.zeros(vocab_size, dtype=np.int64))
            counts.groups[kind][label] += own
    return counts


def _count(waiting: dict[Any, list[np.ndarray]], counts: dict[Any, np.ndarray], vocab_size: int) -> None:
    """Move waiting ids into the counts; many conversations at a time, for a vocabulary is longer than one of them."""
    for labels, ids in waiting.items():
        own = np.bincount(np.concatenate(ids), minlength=vocab_size)
        counts[labels] = counts[labels] + own if labels in counts else own
    waiting.clear()


def coverage_report(
    dataset: Any, vocab: DraftVocab, out: Path, *, min_coverage: float = 0.95, tokenizer: Any = None
) -> dict[str, Any]:
    """Measure a draft vocabulary on a prepared set, and write the report to the JSON file `out`.

    Args:
        dataset: prepared rows; the training split, or the validation split for text the vocabulary was not counted on.
        vocab: the draft vocabulary.
        out: file to write.
        min_coverage: groups below it are named under `warnings`.
        tokenizer: to show the tokens that are not covered as text; None = ids alone.

    Returns:
        `all`, and under `domain` and `language` one entry a label, each: records, tokens, unique (distinct tokens),
        coverage (share of tokens that the draft can propose), uncovered_tokens, uncovered_unique, most_uncovered,
        and for 95 to 99.5 % `vocab_needed` (size of a vocabulary by frequency over *all* tokens, which is how one is
        built, that covers that share of this group; `vocab_needed_for_bound` for `min_coverage`) and `vocab_of_its_own`
        (size if only this group counted). `never_covered`: ids that the set supervises and the vocabulary lacks, most
        frequent first.
    """
    counts = count_by_label(dataset, len(vocab.t2d))
    covered = vocab.t2d.numpy()
    order = np.argsort(-counts.total, kind="stable")  # the order in which build_draft_vocab takes tokens
    whole = _group(counts.total, covered, order, len(dataset), min_coverage, tokenizer)
    report: dict[str, Any] = {"vocab_size": vocab.size, "target_vocab_size": len(covered), "min_coverage": min_coverage}
    report["all"] = whole
    for kind, groups in counts.groups.items():
        report[kind] = {
            label: _group(groups[label], covered, order, counts.records[kind][label], min_coverage, tokenizer)
            for label in sorted(groups)
        }
    missing = np.flatnonzero((counts.total > 0) & ~covered)
    report["never_covered"] = missing[np.argsort(-counts.total[missing], kind="stable")][:LISTED_IDS].tolist()
    report["warnings"] = coverage_warnings(report)
    write_json(out, report)
    return report


def coverage_warnings(report: dict[str, Any]) -> list[str]:
    """One line for each domain and language that the vocabulary covers less than the report's bound."""
    bound = report["min_coverage"]
    lines = []
    for kind in LABELS:
        for label, one in report.get(kind, {}).items():
            if one["tokens"] and one["coverage"] < bound:
                lines.append(
                    f"the draft vocabulary of {report['vocab_size']:,} covers {one['coverage']:.1%} of {kind} {label}, "
                    f"below {bound:.1%}; draft.vocab_size={one['vocab_needed_for_bound']} would reach it"
                )
    return lines


def _group(
    counts: np.ndarray, covered: np.ndarray, order: np.ndarray, records: int, bound: float, tokenizer: Any
) -> dict[str, Any]:
    tokens = int(counts.sum())
    inside = int(counts[covered].sum())
    missing = np.flatnonzero((counts > 0) & ~covered)
    worst = missing[np.argsort(-counts[missing], kind="stable")][:NAMED_TOKENS]
    return {
        "records": records,
        "tokens": tokens,
        "unique": int((counts > 0).sum()),
        "coverage": inside / tokens if tokens else 1.0,
        "uncovered_tokens": tokens - inside,
        "uncovered_unique": len(missing),
        "vocab_needed": _sizes(counts[order], tokens),
        "vocab_needed_for_bound": _size(np.cumsum(counts[order]), bound, tokens),
        "vocab_of_its_own": _sizes(-np.sort(-counts), tokens),
        "most_uncovered": [
            {"id": int(i), "count": int(counts[i]), "text": tokenizer.decode([int(i)]) if tokenizer else None}
            for i in worst
        ],
    }


def _sizes(ranked: np.ndarray, tokens: int) -> dict[str, int]:
    running = np.cumsum(ranked)
    return {_percent(share): _size(running, share, tokens) for share in SHARES}


def _size(running: np.ndarray, share: float, tokens: int) -> int:
    """How many of the first tokens make up a share of `tokens`, from running sums [V] that end in `tokens`."""
    return int(np.searchsorted(running, share * tokens - 1e-6)) + 1 if tokens else 0


def _percent(share: float) -> str:
    return f"{100 * share:g}%"


def coverage_table(report: dict[str, Any]) -> Table:
    """The report for a terminal: a line a group."""
    size, whole = report["vocab_size"], report["target_vocab_size"]
    title = f"draft vocabulary: {size:,} of {whole:,} tokens; sizes to cover:"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("", overflow="fold")
    for heading in ("tokens", "unique", "covered", *map(_percent, SHARES)):
        table.add_column(heading, justify="right", no_wrap=True)
    groups = [("all", report["all"])]
    groups += [(f"{kind} {label}", one) for kind in LABELS for label, one in report.get(kind, {}).items()]
    for name, one in groups:
        low = one["tokens"] and one["coverage"] < report["min_coverage"]
        sizes = (f"{value:,}" for value in one["vocab_needed"].values())
        cells = (f"{one['tokens']:,}", f"{one['unique']:,}", f"{one['coverage']:.2%}", *sizes)
        table.add_row(escape(name), *cells, style="yellow" if low else None)
    return table
