"""Weights read by several products of one graph: the summed gradient against autograd's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from eagle3 import summed
from eagle3.summed import SummedLinear, summed_weights
from eagle3.ttt import unroll

LENGTHS = [5, 9, 3]


class Chain(nn.Module):
    """One weight used over and over, as a whole, by halves, and on top of something."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = SummedLinear(4, 4, bias=False).double()
        self.unused = SummedLinear(4, 4, bias=False).double()

    def forward(self, x: Tensor, times: int) -> list[Tensor]:
        outputs = []
        for _ in range(times):
            x = torch.tanh(self.linear(x))
            half = self.linear.product(x[:, :2], slice(2))
            x = self.linear.product(x[:, 2:], slice(2, None), half)
            outputs.append(x)
        return outputs


def gradients(chain: Chain, losses: slice, together: bool) -> list[Tensor]:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    if together:
        with summed_weights(chain):
            outputs = chain(x, 4)
    else:
        outputs = chain(x, 4)
    loss = sum((out.square().sum() for out in outputs[losses]), torch.zeros((), dtype=torch.float64))
    return list(torch.autograd.grad(loss, [x, chain.linear.weight]))


@pytest.mark.parametrize("losses", [slice(None), slice(3, 4), slice(0, 1)], ids=["all", "the last", "the first"])
def test_the_sum_is_autograds_whatever_is_run_back(losses: slice) -> None:
    chain = Chain()
    torch.testing.assert_close(gradients(chain, losses, True), gradients(chain, losses, False), rtol=1e-12, atol=1e-12)
    assert chain.linear.summed is None and not chain.linear.summing


def test_gradients_add_up_over_graphs_and_nothing_is_given_where_nothing_was_read() -> None:
    chain, x = Chain(), torch.ones(2, 4, dtype=torch.float64)
    for _ in range(2):
        with summed_weights(chain):
            chain(x, 3)[-1].sum().backward()
    twice = chain.linear.weight.grad
    chain.zero_grad()
    chain(x, 3)[-1].sum().backward()
    torch.testing.assert_close(twice, 2 * chain.linear.weight.grad)
    assert chain.unused.weight.grad is None


def test_a_graph_that_fails_leaves_nothing_behind() -> None:
    chain, x = Chain(), torch.ones(2, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="on purpose"), summed_weights(chain):
        chain(x, 2)
        raise RuntimeError("on purpose")
    assert chain.linear.summed is None
    with torch.no_grad(), summed_weights(chain):
        assert not chain(x, 2)[-1].requires_grad


def test_a_frozen_weight_and_a_frozen_input_are_left_alone() -> None:
    chain, x = Chain(), torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    chain.linear.weight.requires_grad_(False)
    with summed_weights(chain):
        chain(x, 2)[-1].sum().backward()
    assert chain.linear.weight.grad is None and x.grad is not None


def test_a_weight_that_zero_3_has_partitioned_is_left_to_autograd() -> None:
    chain, x = Chain(), torch.ones(2, 4, dtype=torch.float64)
    chain.linear.weight.ds_id = 0
    with summed_weights(chain):
        chain(x, 2)
        assert chain.linear.summed is None and chain.unused.opened() is not None


@pytest.mark.parametrize("steps", [1, 4])
def test_an_unrolled_draft_has_the_same_gradients(make_draft, make_batch, variant, monkeypatch, steps):
    draft, batch = make_draft(**variant), make_batch(LENGTHS)
    leaves = {name: p for name, p in draft.named_parameters() if p.requires_grad and "lm_head" not in name}
    found, calls = [], []
    monkeypatch.setattr(summed._Handed, "backward", counted(summed._Handed.backward, calls))
    for recompute in (False, True):  # recomputed steps leave the sums to autograd
        out = torch.stack(unroll(draft, batch, steps, recompute=recompute))
        found.append(torch.autograd.grad(out.square().sum(), list(leaves.values()), allow_unused=True))
        calls.append("then")
    assert calls.count(0) == sum(isinstance(m, SummedLinear) for m in draft.modules()) and calls[-1] == "then"
    for name, one, other in zip(leaves, *found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, msg=name)


def counted(function, calls):
    def run(*args):
        calls.append(0)
        return function(*args)

    return staticmethod(run)
