"""Quotas as numbers of conversations, and which quota a label or length falls under."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from data_prep.select.config import EVERYTHING_ELSE, SelectConfig, is_shares


@dataclass(frozen=True)
class Quota:
    """One kind of quota.

    Args:
        kind: "domain", "language" or "length".
        names: what it distinguishes, in a fixed order.
        counts: [n] int64 conversations wanted of each; their sum is the selection's total.
        edges: upper edges in tokens, for lengths only.
    """

    kind: str
    names: tuple[str, ...]
    counts: np.ndarray
    edges: tuple[int, ...] = ()

    def place(self, label: str) -> int | None:
        """Index of the quota for a label; None when it is not asked for."""
        if label in self.names:
            return self.names.index(label)
        return self.names.index(EVERYTHING_ELSE) if EVERYTHING_ELSE in self.names else None

    def bucket(self, tokens: int) -> int:
        """Index of the length bucket of a conversation that is within the bound."""
        return int(np.searchsorted(self.edges, tokens)) if self.edges else 0


def apportion(weights: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers [n] in proportion to `weights` [n] that sum to `total`: largest remainders, ties to the first."""
    if not len(weights) or weights.sum() <= 0:
        return np.zeros(len(weights), dtype=np.int64)
    exact = weights * (total / weights.sum())
    counts = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts


def resolve(cfg: SelectConfig) -> tuple[Quota, Quota, Quota]:
    """The quotas for domain, language and length."""
    domain = _quota("domain", cfg.quotas_domain, cfg.total)
    language = _quota("language", cfg.quotas_language, cfg.total)
    edges = tuple(sorted(int(edge) for edge in cfg.length_buckets))
    named: dict[Any, float] = {}
    for lower, edge in zip((0, *edges), edges, strict=False):
        named[f"{lower + 1}-{edge}"] = {int(k): v for k, v in cfg.length_buckets.items()}[edge]
    length = _quota("length", named, cfg.total)
    return domain, language, Quota("length", length.names, length.counts, edges)


def _quota(kind: str, wanted: dict[Any, float], total: int) -> Quota:
    if not wanted:
        return Quota(kind, (EVERYTHING_ELSE,), np.array([total], dtype=np.int64))
    names = tuple(str(name) for name in wanted)
    values = np.array([float(value) for value in wanted.values()])
    return Quota(kind, names, apportion(values, total) if is_shares(wanted) else values.astype(np.int64))
