"""What was wanted, what was got, what was dropped where, and why a quota fell short."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from data_prep.select.allocate import margin
from data_prep.select.config import EVERYTHING_ELSE, SelectConfig
from data_prep.select.quotas import Quota
from data_prep.select.write import Selection
from eagle3.errors import DataError

NAMED_SHORTFALLS = 6  # quotas that the refusing line names; the mend tells how to see all


@dataclass
class Counts:
    """What pass one counted.

    Args:
        left_out: by source: "read", "bad" and each reason for leaving a record out.
        bad: one line for each bad record, the first thousand.
        excluded: evaluation prompts kept out.
    """

    left_out: dict[str, Counter[str]]
    bad: list[str]
    excluded: int


def selection_report(
    cfg: SelectConfig, quotas: tuple[Quota, Quota, Quota], counts: Counts, found: Selection, unit: str | None
) -> dict[str, Any]:
    """The report as JSON; `unit` says how lengths were measured, None where they were not."""
    supply, take = found.picked.supply, found.picked.allocation.take
    clusters = found.clusters
    return {
        "selected": len(found.picked.rows),
        "wanted": cfg.total,
        "moved_between_quotas": found.picked.allocation.moved,
        "lengths_in": unit,
        "quotas": {quota.kind: _quota_lines(quota, axis, supply, take) for axis, quota in enumerate(quotas)},
        "cells": _cells(quotas, supply, take),
        "shortfalls": _shortfalls(cfg, quotas, supply, take),
        "sources": _sources(cfg, counts, found),
        "duplicates": {"exact": int(clusters.exact.sum()), "near": int(clusters.near.sum())},
        "evaluation_prompts": {"known": counts.excluded, "records_left_out": _contaminated(counts)},
        "bad_records": counts.bad,
        "seed": cfg.seed,
        "settings": asdict(cfg),
    }


def refuse_shortfall(cfg: SelectConfig, report: dict[str, Any]) -> None:
    """Refuse a selection that is not the one asked for, under `shortfall: refuse`.

    Raises:
        DataError: naming the quotas that fall short.
    """
    short = report["shortfalls"]
    if cfg.shortfall == "report" or not short:
        return
    lines = [f"{one['kind']} {one['name']}: {one['got']} of {one['wanted']} ({one['why']})" for one in short]
    more = f"; and {len(lines) - NAMED_SHORTFALLS} more" if len(lines) > NAMED_SHORTFALLS else ""
    raise DataError(
        "the quotas cannot be filled",
        where="select",
        why="; ".join(lines[:NAMED_SHORTFALLS]) + more,
        mend="add sources, lower those quotas or select.total, or set select.shortfall=report to take what there is",
        page="samples",
    )


def _quota_lines(quota: Quota, axis: int, supply: np.ndarray, take: np.ndarray) -> list[dict[str, Any]]:
    have, got = margin(supply, axis), margin(take, axis)
    return [
        {"name": name, "wanted": int(quota.counts[i]), "got": int(got[i]), "supply": int(have[i])}
        for i, name in enumerate(quota.names)
    ]


def _cells(quotas: tuple[Quota, Quota, Quota], supply: np.ndarray, take: np.ndarray) -> list[dict[str, Any]]:
    kinds = [quota.kind for quota in quotas]
    lines = []
    for place in np.argwhere(supply > 0).tolist():
        names = {kind: quota.names[i] for kind, quota, i in zip(kinds, quotas, place, strict=True)}
        lines.append(names | {"supply": int(supply[tuple(place)]), "got": int(take[tuple(place)])})
    return lines


def _shortfalls(
    cfg: SelectConfig, quotas: tuple[Quota, Quota, Quota], supply: np.ndarray, take: np.ndarray
) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    if take.sum() < cfg.total:
        why = f"the sources hold {int(supply.sum())} that the quotas may take"
        lines.append({"kind": "total", "name": "", "wanted": cfg.total, "got": int(take.sum()), "why": why})
    for axis, quota in enumerate(quotas):
        if quota.names == (EVERYTHING_ELSE,):
            continue
        for one in _quota_lines(quota, axis, supply, take):
            if one["got"] < one["wanted"]:
                lines.append({"kind": quota.kind, **one, "why": _why(one, quota.kind)})
    return lines


def _why(one: dict[str, Any], kind: str) -> str:
    if one["supply"] < one["wanted"]:
        return f"the sources hold {one['supply']}"
    if kind == "length":
        return f"the sources hold {one['supply']}, but not within the domains and languages asked for"
    other = "languages" if kind == "domain" else "domains"
    return f"the sources hold {one['supply']}, but its {other} are used up by other quotas"


def _sources(cfg: SelectConfig, counts: Counts, found: Selection) -> dict[str, dict[str, int]]:
    rows, many = found.rows, len(cfg.sources)

    def per_source(mask: np.ndarray) -> np.ndarray:
        return np.bincount(rows.source[mask], minlength=many)

    chosen = np.bincount(rows.source[found.picked.rows], minlength=many)
    exact, near = per_source(found.clusters.exact), per_source(found.clusters.near)
    over = per_source(found.picked.over_limit)
    eligible = np.bincount(rows.source, minlength=many) - exact - near - over
    lines = {}
    for i, source in enumerate(cfg.sources):
        lines[source.name] = dict(counts.left_out[source.name]) | {
            "exact duplicates": int(exact[i]),
            "near duplicates": int(near[i]),
            "over the source's limit": int(over[i]),
            "to choose from": int(eligible[i]),
            "selected": int(chosen[i]),
        }
    return lines


def _contaminated(counts: Counts) -> dict[str, int]:
    prefix = "evaluation prompt: "
    total: Counter[str] = Counter()
    for own in counts.left_out.values():
        total.update({why.removeprefix(prefix): n for why, n in own.items() if why.startswith(prefix)})
    return {kind: total[kind] for kind in ("exact", "contained", "near")}
