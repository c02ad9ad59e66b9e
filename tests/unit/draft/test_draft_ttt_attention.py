"""The joined flash attention against one plain masked softmax over a K-times-longer sequence."""

from __future__ import annotations

import pytest
import torch

from eagle3 import ttt_kernels
from eagle3.ttt_attention import ttt_attention

LENGTHS, HQ, HKV, D = [5, 1, 70, 33], 6, 2, 8


def reference(q, k0, v0, lengths, diagonals, scale=None):
    """All keys laid end to end, one mask: step-0 keys causal in the document, later keys at the own row alone."""
    n = q.shape[0]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    row = torch.arange(n)
    first = (document[:, None] == document[None]) & (row[:, None] >= row[None])
    mask = torch.cat([first] + [torch.eye(n, dtype=torch.bool)] * (len(diagonals) // 2), dim=1)
    groups = q.shape[1] // k0.shape[1]
    k = torch.cat([k0, *diagonals[::2]]).repeat_interleave(groups, 1)
    v = torch.cat([v0, *diagonals[1::2]]).repeat_interleave(groups, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * (scale or q.shape[-1] ** -0.5)
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def inputs(later, dtype=torch.float64, kv_heads=HKV, width=D, values=D):
    torch.manual_seed(later)
    n = sum(LENGTHS)

    def leaf(heads, size):
        return (torch.randn(n, heads, size, dtype=dtype) * 1.5).requires_grad_()

    q, k0, v0 = leaf(HQ, width), leaf(kv_heads, width), leaf(kv_heads, values)
    return q, k0, v0, [leaf(kv_heads, size) for _ in range(later) for size in (width, values)]


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("later", [0, 1, 4])
def test_values_and_gradients_match(later, kv_heads):
    q, k0, v0, diagonals = inputs(later, kv_heads=kv_heads)
    leaves = [q, k0, v0, *diagonals]
    weight = torch.randn(sum(LENGTHS), HQ, D, dtype=torch.float64)
    fast, plain = ttt_attention(q, k0, v0, LENGTHS, diagonals), reference(q, k0, v0, LENGTHS, diagonals)
    torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-10)
    got, wanted = (torch.autograd.grad((out * weight).sum(), leaves) for out in (fast, plain))
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("plain_path", [False, True])
@pytest.mark.parametrize("later", [0, 3])
@pytest.mark.parametrize(("width", "values"), [(12, 5), (5, 12)])
def test_values_narrower_or_wider_than_keys(monkeypatch, width, values, later, plain_path):
    """Latent attention: two widths and a scale of its own, through the flash kernel and the plain path."""
    if plain_path:
        monkeypatch.setattr(ttt_kernels, "_cpu_forward", ttt_kernels._plain_forward)
        monkeypatch.setattr(ttt_kernels, "_cpu_backward", ttt_kernels._plain_backward)
    q, k0, v0, diagonals = inputs(later, kv_heads=6, width=width, values=values)
    rows = torch.tensor([0, 3, 6, 7, 40, 75, 76, 100])
    some = [x.detach()[rows].requires_grad_() for x in (q, *diagonals)]
    weight = torch.randn(len(rows), HQ, values, dtype=torch.float64)
    fast = ttt_attention(some[0], k0, v0, LENGTHS, some[1:], rows, 0.7)
    plain = reference(q, k0, v0, LENGTHS, diagonals, 0.7)[rows]
    torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-10)
    got = torch.autograd.grad((fast * weight).sum(), [k0, v0, *some])
    wanted = torch.autograd.grad((plain * weight).sum(), [k0, v0, q, *diagonals])
    for i, (g, w) in enumerate(zip(got, wanted, strict=True)):
        torch.testing.assert_close(g, w if i < 2 else w[rows], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("later", [0, 2])
def test_gradients_match_when_only_some_rows_ask(later):
    q, k0, v0, diagonals = inputs(later)
    rows = torch.tensor([0, 3, 6, 7, 40, 75, 76, 100])
    some = [x.detach()[rows].requires_grad_() for x in (q, *diagonals)]
    weight = torch.randn(len(rows), HQ, D, dtype=torch.float64)
    fast = ttt_attention(some[0], k0, v0, LENGTHS, some[1:], rows)
    plain = reference(q, k0, v0, LENGTHS, diagonals)[rows]
    torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-10)
    got = torch.autograd.grad((fast * weight).sum(), [k0, v0, *some])
    wanted = torch.autograd.grad((plain * weight).sum(), [k0, v0, q, *diagonals])
    for i, (g, w) in enumerate(zip(got, wanted, strict=True)):
        torch.testing.assert_close(g, w if i < 2 else w[rows], rtol=1e-9, atol=1e-9)


def test_the_plain_path_matches_too(monkeypatch):
    """What a GPU in float32 runs, on the CPU."""
    monkeypatch.setattr(ttt_kernels, "_cpu_forward", ttt_kernels._plain_forward)
    monkeypatch.setattr(ttt_kernels, "_cpu_backward", ttt_kernels._plain_backward)
    test_values_and_gradients_match(2, 2)


def test_bfloat16_stays_near_float64():
    q, k0, v0, diagonals = inputs(3)
    exact = reference(q, k0, v0, LENGTHS, diagonals)
    weight = torch.randn(sum(LENGTHS), HQ, D, dtype=torch.float64)
    wanted = torch.autograd.grad((exact * weight).sum(), [q, k0, v0, *diagonals])
    half = [x.detach().bfloat16().requires_grad_() for x in (q, k0, v0, *diagonals)]
    out = ttt_attention(*half[:3], LENGTHS, half[3:])
    got = torch.autograd.grad((out * weight.bfloat16()).sum(), half)
    assert out.dtype == torch.bfloat16
    for g, w in zip((out, *got), (exact, *wanted), strict=True):
        assert (g.double() - w).norm() < 0.03 * w.norm()


def test_no_matrix_of_rows_by_rows_is_made():
    """One long document: every tensor of the forward and backward stays linear in its rows."""
    from torch.utils._python_dispatch import TorchDispatchMode

    rows, largest = 1500, [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for item in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(item, torch.Tensor):
                    largest[0] = max(largest[0], item.numel())
            return out

    leaves = [torch.randn(rows, h, 4, requires_grad=True) for h in (2, 1, 1, 1, 1)]
    with Watch():
        ttt_attention(*leaves[:3], [rows], leaves[3:]).sum().backward()
    assert 0 < largest[0] < rows * 64
