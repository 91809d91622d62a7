"""The end of a layer of HGT, of which nothing but its inputs is saved: GELU, linear map, gated residual connection."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import gelu, linear

from pyg_dfgnn.ops.eager import apply_of, differentiable, differentiated

_DOT_ELEMENTS = 1 << 30
"""Elements of one dot product, which cuBLAS counts in 32 bits."""


def _again(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients by differentiable operators."""

    def outputs(inputs: list[Any]) -> list[Tensor]:
        h, weight, bias, skip, x = inputs
        return [torch.lerp(x, linear(gelu(h), weight, bias), skip.sigmoid())]

    return differentiated(outputs, ctx.saved_tensors, ctx.needs_input_grad, [grad])


class _GatedResidual(Function):
    """(h, W, b, s, x) to the rows. Backward computes GELU again, and has the product with W from the gradient of W."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor, skip: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight, bias, skip, x)
        mapped = linear(gelu(h), weight, bias)
        return torch.lerp(x, mapped, skip.sigmoid(), out=mapped)

    @staticmethod
    @differentiable(_again)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, bias, skip, x = ctx.saved_tensors
        needs_h, needs_weight, needs_bias, needs_skip, needs_x = ctx.needs_input_grad
        share = skip.sigmoid()
        grad_h = torch.ops.aten.gelu_backward(grad @ weight, h).mul_(share) if needs_h else None
        grad_weight = grad.t() @ gelu(h) if needs_weight or needs_skip else None
        grad_bias = grad.sum(0) if needs_bias or needs_skip else None
        grad_skip = None
        if needs_skip:
            assert grad_weight is not None and grad_bias is not None
            # sum_i <g_i, W gelu(h_i) + b - x_i>
            of_share = torch.sum(grad_weight * weight) + torch.sum(grad_bias * bias) - _dot(grad, x)
            grad_skip = (of_share * share * (1 - share)).to(skip.dtype)
        return (
            grad_h,
            grad_weight * share if needs_weight and grad_weight is not None else None,
            grad_bias * share if needs_bias and grad_bias is not None else None,
            grad_skip,
            grad * (1 - share) if needs_x else None,
        )


_apply = apply_of(_GatedResidual)


def gated_residual(h: Tensor, weight: Tensor, bias: Tensor, skip: Tensor, x: Tensor) -> Tensor:
    """Return `a (W gelu(h_i) + b) + (1 - a) x_i` with `a = sigmoid(s)`.

    Args:
        h: Shape [N, K].
        weight: W [F, K].
        bias: b [F].
        skip: s [1].
        x: Shape [N, F].

    Returns:
        Shape [N, F].
    """
    out: Tensor = _apply(h, weight, bias, skip, x)
    return out


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum over all elements of the products, without a tensor of these."""
    parts = zip(left.flatten().split(_DOT_ELEMENTS), right.flatten().split(_DOT_ELEMENTS), strict=True)
    return torch.stack([torch.dot(a, b) for a, b in parts]).sum()
