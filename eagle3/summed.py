"""Products that read one weight several times: its gradient is summed up in one buffer, inside the products.

A draft's layer is run K times in one graph. Autograd's own way makes a new matrix of the weight's size for each run
and then adds it to what it has; of a product with half of a weight's columns it also fills a whole one with zeros. Here
each run adds `grad.T @ x` to one buffer (`addmm_`), which is handed over once, after the last of them: autograd runs
`_Handed`'s backward when all that read its output have run theirs. Tests hold gradients against autograd's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WeightSum:
    """The gradient of one weight in one graph.

    Args:
        weight: `[out, in]`; its memory is kept until backward ends.
    """

    def __init__(self, weight: Tensor) -> None:
        self._total: Tensor | None = None
        self.handle: Tensor = _Handed.apply(weight, self)  # what products read instead of the weight

    def add(self, grad: Tensor, x: Tensor, columns: slice) -> None:
        """Add the gradient of `x [n, c] @ weight[:, columns].T` for `grad [n, out]`."""
        if self._total is None:
            self._total = torch.zeros_like(self.handle)
        self._total[:, columns].addmm_(grad.T, x)

    def take(self) -> Tensor | None:
        """The sum, given away; None where nothing was added."""
        total, self._total = self._total, None
        return total


class _Handed(torch.autograd.Function):
    """The weight itself; its gradient is what was summed up, for products give none of their own."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, summed: WeightSum) -> Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.summed = summed
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return ctx.summed.take(), None


def _plain(x: Tensor, weight: Tensor, more: Tensor | None, columns: slice) -> Tensor:
    part = weight[:, columns]
    return F.linear(x, part) if more is None else torch.addmm(more, x, part.T)


class _Product(torch.autograd.Function):
    """`x @ weight[:, columns].T`, plus `more` where it is given."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, more: Tensor | None, columns: slice, summed: WeightSum
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.columns, ctx.summed = columns, summed
        return _plain(x, weight, more, columns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.summed.add(grad, x, ctx.columns)
        own = grad @ weight[:, ctx.columns] if ctx.needs_input_grad[0] else None
        return own, None, grad if ctx.needs_input_grad[2] else None, None, None


class SummedLinear(nn.Linear):
    """A linear map without bias; inside `summed_weights` its weight's gradient is summed up over its calls."""

    summing = False
    summed: WeightSum | None = None

    def opened(self) -> WeightSum | None:
        """What this graph's calls add to; None outside `summed_weights`, and where nothing is to be learnt.

        None, too, for a weight that ZeRO-3 has partitioned (it then has a `ds_id`): each call gathers it anew, and the
        handle would keep one whole copy of the draft more.
        """
        learnt = torch.is_grad_enabled() and self.weight.requires_grad
        if not (self.summing and learnt) or hasattr(self.weight, "ds_id"):
            return None
        self.summed = self.summed or WeightSum(self.weight)
        return self.summed

    def product(self, x: Tensor, columns: slice = slice(None), more: Tensor | None = None) -> Tensor:
        """`x [n, c] @ weight[:, columns].T`, plus `more [n, out]` where it is given."""
        summed = self.opened()
        if summed is not None:
            return _Product.apply(x, summed.handle, more, columns, summed)
        return _plain(x, self.weight, more, columns)

    def forward(self, x: Tensor) -> Tensor:
        """`x [n, in] -> [n, out]`."""
        return self.product(x)


@contextmanager
def summed_weights(module: nn.Module) -> Iterator[None]:
    """Calls of `module`'s `SummedLinear`s in here share one gradient each: one graph, to be run back at most once."""
    inside = [one for one in module.modules() if isinstance(one, SummedLinear)]
    for one in inside:
        one.summing, one.summed = True, None
    try:
        yield
    finally:
        for one in inside:
            one.summing, one.summed = False, None
