"""The layer's hand-written gradients against autograd's own, and how little they keep."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from eagle3.draft_layer import DraftMLP, JointLinear
from eagle3.fused import gated_down, rms_norm


def both(fast, plain, *tensors):
    """Values and gradients of the fast and the plain way, on the same upstream gradient."""
    results = []
    for function in (fast, plain):
        inputs = [t.clone().requires_grad_() for t in tensors]
        out = function(*inputs)
        upstream = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, upstream)])
    return results


@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24), (1, 24), (24,)])
def test_a_norm_is_torchs(shape):
    torch.manual_seed(0)
    x, weight = torch.randn(*shape, dtype=torch.float64) * 3, torch.rand(24, dtype=torch.float64) + 0.5
    found, wanted = both(lambda a, w: rms_norm(a, w, 1e-3), lambda a, w: F.rms_norm(a, (24,), w, 1e-3), x, weight)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_norm_of_bfloat16_is_computed_wider():
    torch.manual_seed(0)
    x, weight = torch.randn(64, 512).bfloat16(), (torch.rand(512) + 0.5).bfloat16()
    found = rms_norm(x, weight, 1e-5)
    exact = F.rms_norm(x.double(), (512,), weight.double(), 1e-5)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)  # half a unit in the last place


def test_a_norm_without_a_gradient_for_its_input_gives_the_weights():
    x, weight = torch.randn(5, 8), torch.ones(8, requires_grad=True)
    rms_norm(x, weight, 1e-5).sum().backward()
    torch.testing.assert_close(weight.grad, F.rms_norm(x, (8,), None, 1e-5).sum(0))


def test_the_gated_mlp_is_its_formula():
    torch.manual_seed(0)
    gate, up, weight = (torch.randn(*s, dtype=torch.float64) for s in ((9, 20), (9, 20), (6, 20)))
    found, wanted = both(gated_down, lambda g, u, w: (F.silu(g) * u) @ w.T, gate, up, weight)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_both_parts_of_a_joint_projection_make_the_whole():
    torch.manual_seed(0)
    module = JointLinear(12, 5, bias=False).double()
    word, hidden = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)

    def in_parts(w, h):
        return module(h, module(w))

    def whole(w, h):
        return torch.cat((w, h), -1) @ module.weight.T

    found, wanted = both(in_parts, whole, word, hidden)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    slopes = [torch.autograd.grad(f(word, hidden).square().sum(), module.weight)[0] for f in (in_parts, whole)]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-12)


def test_little_is_kept_for_backward(make_draft):
    kept: dict[int, int] = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    rows, shape = 50, make_draft().shape
    mlp, x = DraftMLP(shape).double(), torch.randn(rows, shape.hidden_size, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(shape.hidden_size, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        normed = rms_norm(x, weight, 1e-5)
        mlp(normed)
    for tensor in (*mlp.parameters(), weight):
        kept.pop(tensor.data_ptr(), None)
    assert sum(kept.values()) == 8 * rows * (2 * shape.hidden_size + 1 + 2 * shape.intermediate_size)
