"""Which conversations stay: one of each cluster of duplicates, then the first of each cell by a weighted shuffle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_prep.select.allocate import Allocation, allocate
from data_prep.select.config import SelectConfig
from data_prep.select.features import Rows
from data_prep.select.near import representatives
from data_prep.select.prints import draw
from data_prep.select.quotas import Quota


@dataclass(frozen=True)
class Clusters:
    """Duplicates among N conversations, as columns [N].

    Args:
        leader: row that stands for each row; its own where it stays.
        exact: dropped, and its leader has the same text.
        near: dropped, and its leader's text resembles its own.
    """

    leader: np.ndarray
    exact: np.ndarray
    near: np.ndarray

    @property
    def kept(self) -> np.ndarray:
        """Rows [K] that stay, ascending."""
        return np.flatnonzero(~(self.exact | self.near))


@dataclass(frozen=True)
class Picked:
    """The outcome.

    Args:
        rows: [M] chosen rows in the order of the output (the seeded shuffle).
        supply: [D, L, B] conversations that could have been chosen.
        allocation: conversations taken of each cell.
        over_limit: [N] bool; left out since their source's limit was reached.
    """

    rows: np.ndarray
    supply: np.ndarray
    allocation: Allocation
    over_limit: np.ndarray


def shuffled(rows: Rows, names: list[str], files: list[str]) -> np.ndarray:
    """All rows [N] by rank. Ties (the same record twice in a source) go by name of source and file, then by number."""
    source_place = _places(names)[rows.source]
    file_place = _places(files)[rows.file]
    return np.lexsort((rows.record, file_place, source_place, rows.rank))


def clusters(rows: Rows, order: np.ndarray, signatures: np.ndarray | None, cfg: SelectConfig) -> Clusters:
    """Find duplicates.

    Args:
        rows: the conversations.
        order: [N] rows, first to keep first.
        signatures: [T, P] of the distinct texts; None = exact duplicates only (none at all with `dedupe: none`).
        cfg: threshold and seed.
    """
    count = len(rows)
    none = np.zeros(count, dtype=bool)
    if cfg.dedupe == "none" or not count:
        return Clusters(np.arange(count), none, none)
    first = np.empty(len(rows.texts), dtype=np.int64)  # [T] row that stands for each text
    first[rows.text[order[::-1]]] = order[::-1]
    own = first[rows.text]  # [N]
    exact = own != np.arange(count)
    if signatures is None:
        return Clusters(own, exact, none)
    ranks = np.array([draw(cfg.seed, "text", key.tobytes()) for key in rows.texts], dtype=np.uint64)
    text_leader = representatives(signatures, np.argsort(ranks, kind="stable"), cfg.near_threshold)  # [T]
    leader = first[text_leader][rows.text]
    moved = text_leader[rows.text] != rows.text
    return Clusters(leader, exact & ~moved, moved)


def pick(
    rows: Rows, stay: np.ndarray, order: np.ndarray, cfg: SelectConfig, quotas: tuple[Quota, Quota, Quota]
) -> Picked:
    """Choose among the rows `stay` [K] by quota, weight and the seeded shuffle `order` [N]."""
    staying = np.zeros(len(rows), dtype=bool)
    staying[stay] = True
    over = _over_limit(rows, order[staying[order]], cfg)
    staying &= ~over
    shape = tuple(len(quota.names) for quota in quotas)
    cell = np.ravel_multi_index((rows.domain, rows.language, rows.length), shape)
    supply = np.bincount(cell[staying], minlength=int(np.prod(shape))).reshape(shape)
    allocation = allocate(supply, quotas, cfg.total)
    weighted = _by_weight(rows, order[staying[order]], cfg)
    by_cell = weighted[np.argsort(cell[weighted], kind="stable")]
    starts = np.concatenate([[0], np.cumsum(supply.ravel())])[:-1]
    place_in_cell = np.arange(len(by_cell)) - starts[cell[by_cell]]
    taken = np.zeros(len(rows), dtype=bool)
    taken[by_cell[place_in_cell < allocation.take.ravel()[cell[by_cell]]]] = True
    return Picked(order[taken[order]], supply, allocation, over)


def _by_weight(rows: Rows, order: np.ndarray, cfg: SelectConfig) -> np.ndarray:
    """Rows by -log(u) / weight, u = rank in (0, 1]: drawing without replacement in proportion to the weights.

    Efraimidis and Spirakis, "Weighted random sampling with a reservoir" (2006).
    """
    weights = np.array([source.weight for source in cfg.sources])[rows.source[order]]
    uniform = 1.0 - rows.rank[order].astype(np.float64) / 2.0**64  # a low rank is a high u: first with equal weights
    keys = -np.log(np.maximum(uniform, 2.0**-64)) / weights
    return order[np.argsort(keys, kind="stable")]


def _over_limit(rows: Rows, order: np.ndarray, cfg: SelectConfig) -> np.ndarray:
    over = np.zeros(len(rows), dtype=bool)
    for number, source in enumerate(cfg.sources):
        if source.limit:
            over[order[rows.source[order] == number][source.limit :]] = True
    return over


def _places(names: list[str]) -> np.ndarray:
    places = np.empty(len(names), dtype=np.int64)
    places[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    return places
