"""How many conversations of each domain, language and length are taken.

1. *Proportional fitting.* The table domain x language x length starts as the product of the three quotas, is cut to
   what the sources hold, and its margins are scaled to the quotas in turn (iterative proportional fitting, bounded).
2. *Domain x language, exactly.* A transport problem: whole numbers within the supply, quotas of domains and languages
   filled as far as they can be filled together, and among those tables one as near to (1) as there is. Its matrix is
   totally unimodular, so the linear programme's vertices are whole.
3. *What no quota could take* is shared out over cells with supply left, in proportion to the product of their quotas,
   until `total` is reached or nothing is left. It is reported as a shortfall of the quotas that stay short.
4. *Lengths within each cell,* as in (2), with the cells' numbers given: where lengths and cells cannot both be had, the
   cells win.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_prep.select.quotas import Quota, apportion

ROUNDS = 300
MISSED = 1000.0  # cost of a conversation that a quota lacks, against 1 for one away from the fitted table


@dataclass(frozen=True)
class Allocation:
    """What is taken.

    Args:
        take: [D, L, B] int64 conversations of each cell.
        moved: conversations that step 3 shared out.
    """

    take: np.ndarray
    moved: int

    def margin(self, axis: int) -> np.ndarray:
        """Taken of each domain (0), language (1) or length (2)."""
        return margin(self.take, axis)


def margin(table: np.ndarray, axis: int) -> np.ndarray:
    """Sums of a table over all axes but one."""
    return table.sum(axis=tuple(i for i in range(table.ndim) if i != axis))


def allocate(supply: np.ndarray, quotas: tuple[Quota, Quota, Quota], total: int) -> Allocation:
    """Fill the quotas from the supply [D, L, B] int64; the module's text says how."""
    wanted = [quota.counts.astype(float) for quota in quotas]
    fitted = fit(supply, wanted)
    cells = supply.sum(axis=2)  # [D, L]
    domain, language, length = (quota.counts for quota in quotas)
    table = transport(domain, language, cells, fitted.sum(axis=2))
    missing = total - int(table.sum())
    table, moved = spread(table, cells, np.outer(wanted[0], wanted[1]), missing)
    flat = supply.reshape(-1, supply.shape[2])  # [D * L, B]
    take = transport(table.ravel(), length, flat, _within(fitted.reshape(flat.shape), flat, table.ravel()), exact=True)
    return Allocation(take.reshape(supply.shape), moved)


def fit(supply: np.ndarray, wanted: list[np.ndarray]) -> np.ndarray:
    """A table [D, L, B] within the supply whose margins are near the wanted ones (step 1)."""
    total = wanted[0].sum()
    table = np.minimum(np.einsum("i,j,k->ijk", *wanted) / total**2, supply)
    for _ in range(ROUNDS):
        before = table
        for axis, target in enumerate(wanted):
            sums = margin(table, axis)
            factor = np.divide(target, sums, out=np.zeros_like(target), where=sums > 0)
            shape = [1, 1, 1]
            shape[axis] = -1
            table = np.minimum(table * factor.reshape(shape), supply)
        if np.abs(table - before).max(initial=0) < 1e-6:
            break
    return table


def transport(
    rows: np.ndarray, columns: np.ndarray, bound: np.ndarray, near: np.ndarray, *, exact: bool = False
) -> np.ndarray:
    """A table of whole numbers [R, C] that fills its row and column sums as far as the bounds let it.

    Args:
        rows: [R] wanted row sums.
        columns: [C] wanted column sums.
        bound: [R, C] the most of each cell.
        near: [R, C] where the choice is free, stay near this table.
        exact: row sums are met exactly (they can be) and columns may get more than wanted; else nothing gets more.
    """
    from scipy.optimize import linprog  # imported here: a wrong setting must fail before heavy libraries load
    from scipy.sparse import coo_array

    r, c = bound.shape
    first = np.minimum(np.rint(near), bound)  # [R, C] what costs nothing
    n = r * c
    number = np.arange(n)
    spare = np.full(c if exact else 0, -1)
    # variables: first part of a cell, rest of a cell, lack of a row, lack of a column, excess of a column
    to_row = np.concatenate([number // c, number // c, np.arange(r)])
    to_column = r + np.concatenate([number % c, number % c, np.arange(c), np.arange(len(spare))])
    at_row = np.concatenate([number, n + number, 2 * n + np.arange(r)])
    at_column = np.concatenate([number, n + number, 2 * n + r + np.arange(c + len(spare))])
    values = np.concatenate([np.ones(2 * n + r), np.ones(2 * n + c), spare])
    matrix = coo_array((values, (np.concatenate([to_row, to_column]), np.concatenate([at_row, at_column]))))
    lack = np.concatenate([np.zeros(r) if exact else rows, columns])
    upper = np.concatenate([first.ravel(), (bound - first).ravel(), lack, np.full(len(spare), np.inf)])
    cost = np.concatenate([np.zeros(n), np.ones(n), np.full(r + c, MISSED), np.zeros(len(spare))])
    bounds = np.stack([np.zeros_like(upper), upper], axis=1)
    wanted = np.concatenate([rows, columns]).astype(float)
    solved = linprog(cost, A_eq=matrix.tocsr(), b_eq=wanted, bounds=bounds, method="highs-ds")
    if solved.x is None:
        raise AssertionError(f"a transport problem with slack has a solution: {solved.message}")
    return np.rint(solved.x[:n] + solved.x[n : 2 * n]).astype(np.int64).reshape(r, c)


def spread(table: np.ndarray, bound: np.ndarray, weights: np.ndarray, missing: int) -> tuple[np.ndarray, int]:
    """Share out `missing` over cells [D, L] with room, in proportion to `weights` (step 3); (table, shared out)."""
    table, left = table.copy(), missing
    while left > 0:
        room = np.where(weights > 0, bound - table, 0)
        if not room.any():
            break
        share = apportion(np.where(room > 0, weights, 0).ravel(), left).reshape(table.shape)
        given = np.minimum(share, room)
        table += given
        left -= int(given.sum())
    return table, missing - left


def _within(fitted: np.ndarray, supply: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """The fitted lengths [cells, B] scaled to what each cell takes."""
    shape = np.where(fitted.sum(axis=1, keepdims=True) > 0, fitted, supply)
    sums = shape.sum(axis=1, keepdims=True)
    return np.divide(shape * cells[:, None], sums, out=np.zeros_like(shape, dtype=float), where=sums > 0)
