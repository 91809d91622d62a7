"""Batch norm over the first rows of a padded batch: two launches each way, or torch's operators."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_dfgnn.dispatch.core import fused_device_types
from pyg_dfgnn.dispatch.traversal import STORAGE
from pyg_dfgnn.ops.eager import differentiable, differentiated
from pyg_dfgnn.runtime.launcher import Kernel, addresses, kernel_of, launch
from pyg_dfgnn.statements.spec import Spec

_COLUMNS, _SLOTS = 32, 8
_MOST_BLOCKS = 64
"""Blocks that share the rows of a column: each joins what all have found."""
_ROWS = 64
"""Rows of a block up to that."""
_ENTRIES = ("moments", "forward", "sums", "backward")


class RowMask:
    """Which rows of a batch are not padding: the first n of them.

    Args:
        num_rows: Number of rows with padding.
        count: Number n of rows of the batch, int64 [1], which may change.
    """

    def __init__(self, num_rows: int, count: Tensor) -> None:
        self.count = count
        self._row = torch.arange(num_rows, device=count.device).view(-1, 1)

    def is_padding(self) -> Tensor:
        """Return which rows hold nothing of the batch, bool [N, 1]."""
        return self._row >= self.count


class Running(NamedTuple):
    """Running statistics of a norm.

    Attributes:
        mean: Running mean [C].
        var: Running variance [C].
        batches: Number of batches with this one, int64 [].
        momentum: Share of this batch; None: all batches have the same.
    """

    mean: Tensor
    var: Tensor
    batches: Tensor
    momentum: float | None


@cache
def _kernels(dtype: torch.dtype) -> tuple[Kernel, ...]:
    spec = spec_of(dtype)
    return tuple(kernel_of(spec, f"masked_norm_{entry}") for entry in _ENTRIES)


def spec_of(dtype: torch.dtype) -> Spec:
    """Return the module for features of a dtype."""
    return Spec("norm/masked_norm.cu", (("STORAGE", STORAGE[dtype]),))


def masked_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: RowMask, running: Running | None, eps: float
) -> Tensor:
    """Return `(x - mean) / sqrt(var + eps) * weight + bias` with the statistics of the rows of a batch.

    Args:
        x: Shape [N, C], of which padding may hold any number.
        weight: Shape [C]; None: 1.
        bias: Shape [C]; None: 0.
        mask: Which rows are padding; these get 0, and no gradient.
        running: Statistics that follow those of the batch; None without.
        eps: Added to the variance.

    Returns:
        Shape [N, C], with the dtype of `x`.
    """
    of_columns = [weight, bias, *(running[:2] if running is not None else ())]
    is_float = all(tensor is None or tensor.dtype is torch.float32 for tensor in of_columns)
    if x.device.type in fused_device_types and x.dtype in STORAGE and is_float:
        out: Tensor = _MaskedNorm.apply(x, weight, bias, mask, running, eps)
        return out
    out, mean, variance = _by_operators(x, weight, bias, mask, eps)
    if running is not None:
        with torch.no_grad():
            share = 1 / running.batches if running.momentum is None else running.momentum
            running.mean.lerp_(mean.to(running.mean.dtype), share)
            variance = variance * mask.count / (mask.count - 1).clamp(min=1)
            running.var.lerp_(variance.to(running.var.dtype), share)
    return out


def _by_operators(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: RowMask, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the mean and the variance."""
    is_padding = mask.is_padding()
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).masked_fill(is_padding, 0.0)
    mean = wide.sum(0) / mask.count
    centred = (wide - mean).masked_fill(is_padding, 0.0)
    variance = centred.square().sum(0) / mask.count
    out = centred * (variance + eps).rsqrt()
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.masked_fill(is_padding, 0.0).to(x.dtype), mean, variance


def _again(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients by torch's operators."""
    x, weight = ctx.saved_tensors[:2]
    # The gradients are the same for any.
    bias = weight if ctx.needs_input_grad[2] else None

    def outputs(inputs: list[Any]) -> list[Tensor]:
        x, weight, bias = inputs
        return [_by_operators(x, weight, bias, ctx.mask, ctx.eps)[0]]

    return *differentiated(outputs, (x, weight, bias), ctx.needs_input_grad[:3], [grad]), None, None, None


class _MaskedNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mask: RowMask,
        running: Running | None,
        eps: float,
    ) -> Tensor:
        moments, forward, _, _ = _kernels(x.dtype)
        ctx.save_for_backward(x, weight, statistics := x.new_empty(2, x.size(1), dtype=torch.float32))
        x = x.contiguous()
        sizes, pairs, out = x.shape, _pairs(x), torch.empty_like(x)
        _launch(moments, x, (x, mask.count, x.size(1), pairs))
        share, batches, mean, var = -1.0, None, None, None
        if running is not None:
            mean, var, batches, momentum = running
            share = share if momentum is None else float(momentum)
        of_running = share, eps, batches, mean, var
        _launch(forward, x, (x, mask.count, *sizes, pairs, weight, bias, *of_running, statistics, out))
        ctx.mask, ctx.eps = mask, eps
        return out

    @staticmethod
    @differentiable(_again)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, statistics = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        _, _, sums, backward = _kernels(x.dtype)
        x, grad, count = x.contiguous(), grad.contiguous(), ctx.mask.count
        pairs, grads = _pairs(x), torch.empty_like(statistics)
        grad_x = torch.empty_like(x) if needs_x else None
        _launch(sums, x, (grad, x, count, x.size(1), statistics, pairs))
        _launch(backward, x, (grad, x, count, *x.shape, statistics, pairs, weight, grads, grad_x))
        return grad_x, grads[1] if needs_weight else None, grads[0] if needs_bias else None, None, None, None


def _blocks(x: Tensor) -> int:
    return max(1, min(_MOST_BLOCKS, -(-x.size(0) // _ROWS)))


def _pairs(x: Tensor) -> Tensor:
    """Return room for two numbers of each column and block."""
    return x.new_empty(_blocks(x), 2, x.size(1), dtype=torch.float32)


def _launch(kernel: Kernel, x: Tensor, arguments: tuple[Any, ...]) -> None:
    grid = -(-x.size(1) // _COLUMNS), _blocks(x), 1
    launch(kernel, grid, (_COLUMNS * _SLOTS, 1, 1), addresses(arguments), x.device)
