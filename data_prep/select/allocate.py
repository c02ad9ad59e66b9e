"""How many conversations of each domain, language and length are taken.

1. *Proportional fitting.* The table domain x language x length starts as the product of the three quotas, is cut to
   what the sources hold, and its margins are scaled to the quotas in turn (iterative proportional fitting, bounded).
   What no quota could take is shared out over cells with supply left, in proportion to the product of their quotas.
2. *Domain x language, exactly.* As many as are wanted or there are, in whole numbers within the supply, so that as few
   as possible exceed the quota of their domain or language: a quota that falls short is made up for by others of its
   own kind, not at the cost of the other kind. Among those tables it is one as near to (1) as there is. This is a
   minimum-cost flow, whose linear programme has whole numbers for vertices.
3. *Lengths within each cell,* likewise, with the cells' numbers given: where lengths and cells cannot both be had, the
   cells win.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_prep.select.quotas import Quota

ROUNDS = 300
EXCESS = 1000.0  # cost of a conversation beyond its quota, against 1 for one away from the fitted table


@dataclass(frozen=True)
class Allocation:
    """What is taken.

    Args:
        take: [D, L, B] int64 conversations of each cell.
        moved: conversations taken beyond the quota of their domain or language, in place of others.
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
    asked = np.einsum("i,j,k->ijk", *wanted) / float(total) ** 2
    supply = np.where(asked.sum(axis=2, keepdims=True) > 0, supply, 0)  # what has a quota of 0 stays out
    fitted = spread(fit(supply, wanted), supply, asked, float(total))
    domain, language, length = (quota.counts for quota in quotas)
    cells = supply.sum(axis=2)  # [D, L]
    table = transport(domain, language, cells, fitted.sum(axis=2), min(total, int(cells.sum())))
    flat = supply.reshape(-1, supply.shape[2])  # [D * L, B]
    near = _within(fitted.reshape(flat.shape), flat, table.ravel())
    take = transport(table.ravel(), length, flat, near, int(table.sum()), rows_may_exceed=False)
    excess = [np.maximum(margin(table, axis) - quotas[axis].counts, 0).sum() for axis in (0, 1)]
    return Allocation(take.reshape(supply.shape), int(max(excess)))


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


def spread(table: np.ndarray, bound: np.ndarray, weights: np.ndarray, total: float) -> np.ndarray:
    """Raise a table to a sum of `total`, in proportion to `weights` and within `bound`, as far as there is room."""
    while (left := total - table.sum()) > 1e-6:
        shares = np.where(bound - table > 1e-9, weights, 0)
        if not shares.any():
            break
        table = np.minimum(table + shares * (left / shares.sum()), bound)
    return table


def transport(
    rows: np.ndarray,
    columns: np.ndarray,
    bound: np.ndarray,
    near: np.ndarray,
    total: int,
    *,
    rows_may_exceed: bool = True,
) -> np.ndarray:
    """A table of whole numbers [R, C] with the sum `total` that exceeds its row and column sums as little as it can.

    Args:
        rows: [R] wanted row sums.
        columns: [C] wanted column sums.
        bound: [R, C] the most of each cell; their sum is at least `total`.
        near: [R, C] where the choice is free, stay near this table.
        total: how many are to be taken in all.
        rows_may_exceed: whether rows may get more than wanted, as columns may.
    """
    from scipy.optimize import linprog  # imported here: a wrong setting must fail before heavy libraries load
    from scipy.sparse import eye_array, hstack, kron, vstack

    r, c = bound.shape
    first = np.clip(np.rint(near), 0, bound)  # [R, C] what costs nothing
    # variables: first part of each cell, rest of each cell, excess of each row, excess of each column
    sums = vstack([kron(eye_array(r), np.ones((1, c))), kron(np.ones((1, r)), eye_array(c))])  # [R + C, R * C]
    at_most = hstack([sums, sums, -eye_array(r + c)]).tocsr()
    in_all = np.concatenate([np.ones(2 * r * c), np.zeros(r + c)])[None]
    free = np.full(r, np.inf if rows_may_exceed else 0.0)
    upper = np.concatenate([first.ravel(), (bound - first).ravel(), free, np.full(c, np.inf)])
    cost = np.concatenate([np.zeros(r * c), np.ones(r * c), np.full(r + c, EXCESS)])
    solved = linprog(
        cost, A_ub=at_most, b_ub=np.concatenate([rows, columns]), A_eq=in_all, b_eq=[total],
        bounds=np.stack([np.zeros_like(upper), upper], axis=1), method="highs-ds",
    )  # fmt: skip
    if solved.x is None:
        raise AssertionError(f"taking what there is can be done: {solved.message}")
    return np.rint(solved.x[: r * c] + solved.x[r * c : 2 * r * c]).astype(np.int64).reshape(r, c)


def _within(fitted: np.ndarray, supply: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """The fitted lengths [cells, B] scaled to what each cell takes."""
    shape = np.where(fitted.sum(axis=1, keepdims=True) > 0, fitted, supply)
    sums = shape.sum(axis=1, keepdims=True)
    return np.divide(shape * cells[:, None], sums, out=np.zeros_like(shape, dtype=float), where=sums > 0)
