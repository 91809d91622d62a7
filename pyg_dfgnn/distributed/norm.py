"""Batch normalisation over the nodes of all processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyg_dfgnn.errors import check_shape
from pyg_dfgnn.ops.eager import differentiable, differentiated

# torch 2.13 renames the function.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class SyncBatchNorm(nn.BatchNorm1d):
    """`BatchNorm1d` whose statistics in training are those of all processes, for inputs `[N, C]` where N may be 0.

    torch's SyncBatchNorm needs a GPU and waits for it in each forward; this class waits only if `momentum` is None.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`.

        Raises:
            ValueError: In training, `x` has another shape.
        """
        if not self.training:
            return super().forward(x)
        check_shape("x", x, ("N", self.num_features), f"[N, num_features={self.num_features}]")
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1 / int(self.num_batches_tracked) if momentum is None else momentum
        running = self.running_mean, self.running_var, momentum or 0.0
        return _SyncBatchNorm.apply(x.contiguous(), self.weight, self.bias, *running, self.eps)


class _Total(torch.autograd.Function):
    """The sum of a tensor over all processes, whose gradient is one too."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Total.apply(grad.contiguous())


def _again(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients by operators that can be differentiated."""
    x, weight, _, _, counts = ctx.saved_tensors
    count = counts.sum()

    def outputs(inputs: list[Any]) -> list[Tensor]:
        x, weight, bias = inputs
        rows = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = rows - _Total.apply(rows.sum(0)) / count
        out = centred * (_Total.apply(centred.square().sum(0)) / count + ctx.eps).rsqrt()
        out = out if weight is None else out * weight
        return [(out if bias is None else out + bias).to(grad.dtype)]

    # The gradients are the same for any bias.
    bias, needed = weight if ctx.needs_input_grad[2] else None, ctx.needs_input_grad[:3]
    return *differentiated(outputs, (x, weight, bias), needed, [grad]), None, None, None, None


class _SyncBatchNorm(torch.autograd.Function):
    """Batch norm with one collective each way: statistics forward, two sums of the gradient backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        kernels, (rows, channels) = batch_norm_kernels(x), x.shape
        dtype = torch.promote_types(x.dtype, torch.float32)
        own = kernels.batch_norm_stats(x, eps) if rows else (x.new_ones(2 * channels, dtype=dtype),)
        # The merge divides by the rows so far, and the first process may have none.
        count = x.new_full((1,), rows or torch.finfo(dtype).tiny, dtype=dtype)
        parts = count.new_empty(dist.get_world_size() * (2 * channels + 1))
        _all_gather(parts, torch.cat([*own, count]))
        means, invstds, counts = parts.view(-1, 2 * channels + 1).split([channels, channels, 1], dim=1)
        mean, invstd = kernels.batch_norm_gather_stats_with_counts(
            parts, means, invstds, running_mean, running_var, momentum, eps, counts.view(-1)
        )
        ctx.save_for_backward(x, weight, mean, invstd, counts.int())
        ctx.eps = eps
        return kernels.batch_norm_elemt(x, weight, bias, mean, invstd, eps) if rows else torch.empty_like(x)

    @staticmethod
    @differentiable(_again)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, counts = ctx.saved_tensors
        kernels, needed, grad = batch_norm_kernels(x), ctx.needs_input_grad, grad.contiguous()
        grad_x, grads = grad, mean.new_zeros(4, mean.numel())
        if len(x):
            grads = kernels.batch_norm_backward_reduce(grad, x, mean, invstd, weight, *needed[:3])
        *sums, grad_weight, grad_bias = grads
        if needed[0]:
            total = torch.cat(sums)
            dist.all_reduce(total)
            if len(x):
                grad_x = kernels.batch_norm_backward_elemt(grad, x, mean, invstd, weight, *total.chunk(2), counts)
        grads = [grad if is_needed else None for grad, is_needed in zip((grad_x, grad_weight, grad_bias), needed)]
        return *grads, None, None, None, None


class _OnCpu:
    """The batch norm kernels that torch has only for GPUs, with their names and arguments."""

    @staticmethod
    def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(_wide(x), dim=0, correction=0)
        return mean, (variance + eps).rsqrt()

    @staticmethod
    def batch_norm_gather_stats_with_counts(
        _: Tensor,
        means: Tensor,
        invstds: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        counts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        total = counts.sum()
        share = (counts / total).view(-1, 1)
        mean = (share * means).sum(dim=0)
        variance = (share * (invstds**-2 - eps + (means - mean) ** 2)).sum(dim=0)
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), momentum)
        return mean, (variance + eps).rsqrt()

    @staticmethod
    def batch_norm_elemt(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
    ) -> Tensor:
        normal = (_wide(x) - mean) * invstd
        return (normal if weight is None or bias is None else normal * weight + bias).to(x.dtype)

    @staticmethod
    def batch_norm_backward_reduce(
        grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *needed: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grad = _wide(grad)
        sum_dy, sum_dy_xmu = grad.sum(dim=0), (grad * (_wide(x) - mean)).sum(dim=0)
        return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy

    @staticmethod
    def batch_norm_backward_elemt(
        grad: Tensor,
        x: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight: Tensor | None,
        sum_dy: Tensor,
        sum_dy_xmu: Tensor,
        counts: Tensor,
    ) -> Tensor:
        centred = (_wide(x) - mean) * invstd**2 * sum_dy_xmu
        grad_x = (_wide(grad) - (sum_dy + centred) / counts.sum()) * invstd
        return (grad_x if weight is None else grad_x * weight).to(x.dtype)


def batch_norm_kernels(x: Tensor) -> Any:
    """Return what has torch's kernels of a batch norm in parts, for the device of a tensor."""
    return torch if x.is_cuda else _OnCpu


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
