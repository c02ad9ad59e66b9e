"""A draft layer's elementwise parts with gradients by hand: less kept for backward, fewer passes over memory.

Autograd's own form of a norm on a CPU keeps every intermediate product, and of the gated MLP four tensors of the
intermediate width. Here a norm keeps its input and one number a row, the MLP its two products; what else backward needs
is computed again, which costs no matrix product. Tests hold values and gradients against the plain formulas.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.summed import WeightSum


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, computed in at least float32.

    Args:
        x: `[..., H]`, any float dtype, which the result keeps.
        weight: `[H]`.
        eps: added to the mean square (Zhang & Sennrich 2019).
    """
    if x.is_cuda:  # one kernel there, which keeps just as little
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return _RmsNorm.apply(x, weight, eps)


def gated_down(gate: Tensor, up: Tensor, weight: Tensor, summed: WeightSum | None = None) -> Tensor:
    """`(silu(gate) * up) @ weight.T`: `gate`, `up [n, I]`, `weight [H, I]` -> `[n, H]` (Shazeer 2020, SwiGLU).

    With `summed` the weight's gradient is added to it.
    """
    return _GatedDown.apply(gate, up, weight if summed is None else summed.handle, summed)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        wide = torch.promote_types(x.dtype, torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)  # [..., 1]
        scale = (length.square() / x.shape[-1] + eps).rsqrt()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight.to(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        normed = x * scale  # [..., H], wide
        product = normed * grad
        weight_grad = product.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, weight_grad, None
        wide = weight.to(normed.dtype)
        common = (product @ wide)[..., None] / x.shape[-1]  # [..., 1]
        own = torch.mul(grad, wide, out=product).sub_(normed.mul_(common)).mul_(scale)
        return own.to(x.dtype), weight_grad, None


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, summed: WeightSum | None
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.summed = summed
        return F.silu(gate).mul_(up) @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate, up, weight = ctx.saved_tensors
        active = F.silu(gate)  # [n, I]
        inner = grad @ weight  # [n, I]
        up_grad = inner * active
        weight_grad = None
        if ctx.needs_input_grad[2]:
            active.mul_(up)
            if ctx.summed is None:
                weight_grad = grad.T @ active
            else:
                ctx.summed.add(grad, active, slice(None))
        gate_grad = torch.ops.aten.silu_backward(inner.mul_(up), gate)
        return gate_grad, up_grad, weight_grad, None
