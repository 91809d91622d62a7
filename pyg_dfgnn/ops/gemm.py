"""Large linear layers of one input and their gradients by kernels, for `settings(linear="kernels")`.

The kernels take many rows in float32 on compute capability 9.0. One launch gives the results of up to four layers of
one shape, one the gradient of the input, and one those of the parameters. Tensor cores multiply, with less than twice
the error of torch's products in float32. Factors that are infinite, or 3.402e38 or more, give NaN, and errors grow
below 1e-35. A number over 5e8 times smaller than the largest of its row of x or of a gradient, or of those of its
weight that it is added up with, is rounded to fewer bits than float32 has.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention.problem import tf32_allowed
from pyg_dfgnn.dispatch.core import fused_device_types, runs_on
from pyg_dfgnn.dispatch.gemm import MAX_LAYERS, Strips, WeightGrad, strips_of
from pyg_dfgnn.ops.eager import aligned, apply_of, is_for_torch, needs_grad
from pyg_dfgnn.runtime.launcher import Grid, Kernel, addresses, compiled_together, kernel_of, launch
from pyg_dfgnn.statements.spec import HOPPER, Spec

SMALL_PRODUCT = 1 << 28
"""Most multiplications of a layer that torch is left with: kernels save about what autograd costs the host there."""


def kernel_is_faster(x: Tensor, channels: int, layers: int = 1) -> bool:
    """Return whether kernels are faster than torch for products of x [..., F] with so many weights [K, F].

    The products are large, in float32 that nothing may round, and the device has kernels.
    """
    # First what most calls end at, which this should not delay.
    if x.numel() * channels <= SMALL_PRODUCT or x.dim() != 2 or x.dtype is not torch.float32:
        return False
    if not (x.is_cuda or x.device.type in fused_device_types) or x.layout is not torch.strided:
        return False
    if torch.is_autocast_enabled(x.device.type) or tf32_allowed(torch.float32):
        return False
    return _has_kernels(layers, *x.shape, channels, x.device)


@lru_cache(maxsize=1024)
def _has_kernels(layers: int, rows: int, features: int, channels: int, device: torch.device) -> bool:
    if device.type == "cuda" and not runs_on(device):
        return False
    return all(strips_of(backward, layers, rows, features, channels, device) for backward in (False, True))


def project(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Sequence[Tensor]:
    r"""Return what linear layers of one shape make of x, under one node of autograd.

    .. math::
        Y_l = X W_l^T + b_l, \quad
        \partial X = \sum_l \partial Y_l W_l, \quad
        \partial W_l = \partial Y_l^T X, \quad
        \partial b_l = \partial Y_l^T 1

    Gradients may be differentiated; torch's products give such gradients.

    Args:
        x: Shape [N, F], for which :func:`kernel_is_faster`.
        weights: L of them, each [K, F].
        biases: As many, each [K], or none.

    Returns:
        L tensors [N, K].
    """
    tensors = (*weights, *biases)
    if needs_grad((x, *tensors)):
        results: Sequence[Tensor] = _apply(len(weights), x, *tensors)
        return results
    return _forward(x, weights, biases)


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Weights that no gradient reads may be edited.
        ctx.save_for_backward(x, *(tensors[:count] if x.requires_grad else ()))
        # A layer whose result nothing reads gets no gradient, rather than one of zeros.
        ctx.set_materialize_grads(False)
        return tuple(_forward(x, tensors[:count], tensors[count:]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        _, needs_x, *needed = ctx.needs_input_grad
        count, used = len(grads), [place for place, grad in enumerate(grads) if grad is not None]
        layer_grads: list[Any] = [grads[place] for place in used]
        weights = [weights[place] for place in used] if needs_x else []
        of_parameters: list[Tensor | None] = [None] * len(needed)
        if not used:
            return None, None, *of_parameters
        rows, channels = layer_grads[0].shape
        fits = _has_kernels(len(used), rows, x.size(1), channels, x.device)
        by_kernel = fits and not torch.compiler.is_compiling() and not is_for_torch(grads)
        grad_x, of_weights, of_biases = (_backward if by_kernel else _backward_of_torch)(
            x, weights, layer_grads, any(needed)
        )
        for place, of_weight, of_bias in zip(used, of_weights, of_biases, strict=True):
            of_parameters[place] = of_weight if needed[place] else None
            if len(needed) > count and needed[count + place]:
                of_parameters[count + place] = of_bias
        return None, grad_x, *of_parameters


_apply = apply_of(_Projection)
_GemmGradients = tuple[Tensor | None, Sequence[Tensor | None], Sequence[Tensor | None]]
"""Gradients of x, None without weights; of the weights and the biases, or as many None."""


def _backward_of_torch(x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], needed: bool) -> _GemmGradients:
    """Return the gradients by torch's products, which have derivatives of their own."""
    # Backward may run in a region of autocast that forward was not in.
    with torch.autocast(x.device.type, enabled=False):
        of_x = [grad @ weight for grad, weight in zip(grads, weights)]
        grad_x = reduce(torch.add, of_x) if of_x else None
        return grad_x, [grad.t() @ x for grad in grads], [grad.sum(0) for grad in grads]


# Launches ------------------------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """How a kernel is launched, and the sizes that it takes."""

    kernel: Kernel
    grid: Grid
    block: Grid
    shared_bytes: int
    sizes: tuple[int, ...]

    def launch(self, device: torch.device, *arguments: Tensor | None) -> None:
        """Launch with arguments after the sizes."""
        launch_arguments = (*self.sizes, *addresses(arguments))
        launch(self.kernel, self.grid, self.block, launch_arguments, device, self.shared_bytes)


def _of_layers(tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return tensors that start at multiples of 16 bytes, one of each layer, and None for layers that a launch has room
    for.
    """
    return [*map(aligned, tensors), *[None] * (MAX_LAYERS - len(tensors))]


def _strips_plan(strips: Strips | None, rows: int, device: torch.device) -> _Plan:
    assert strips is not None
    kernel = kernel_of(Spec("gemm/forward_strips.cu", strips.constants, HOPPER), "gemm_forward_strips")
    return _Plan(kernel, (strips.blocks(rows, device), 1, 1), strips.block, strips.shared_bytes, (rows,))


@lru_cache(maxsize=1024)
def _forward_plan(layers: int, rows: int, features: int, channels: int, device: torch.device) -> _Plan:
    return _strips_plan(strips_of(False, layers, rows, features, channels, device), rows, device)


@lru_cache(maxsize=1024)
def _backward_plans(
    layers: int, rows: int, features: int, channels: int, device: torch.device
) -> tuple[_Plan, _Plan, int]:
    """Return the plans for the gradients of the input and of the parameters, and the number of partial sums."""
    of_weights = WeightGrad(layers, features, channels)
    splits, rows_per_split = of_weights.splits(rows, device)
    with compiled_together(device):
        x_plan = _strips_plan(strips_of(True, layers, rows, features, channels, device), rows, device)
        kernel = kernel_of(Spec("gemm/weight_grad.cu", of_weights.constants, HOPPER), "gemm_weight_grad")
    grid = of_weights.groups * splits, 1, 1
    plan = _Plan(kernel, grid, of_weights.block, of_weights.shared_bytes, (rows, rows_per_split))
    return x_plan, plan, splits


def _forward(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Sequence[Tensor]:
    channels = weights[0].size(0)
    results = [x.new_empty((x.size(0), channels)) for _ in weights]
    plan = _forward_plan(len(weights), *x.shape, channels, x.device)
    plan.launch(x.device, *_of_layers((x,)), *_of_layers(weights), *_of_layers(biases), *_of_layers(results))
    return results


def _backward(x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], needed: bool) -> _GemmGradients:
    layers, channels, features = len(grads), grads[0].size(1), x.size(1)
    x_plan, weights_plan, splits = _backward_plans(layers, *x.shape, channels, x.device)
    layer_grads, grad_x = _of_layers(grads), None
    if weights:
        grad_x = x.new_empty(x.shape)
        x_plan.launch(x.device, *layer_grads, *_of_layers(weights), *_of_layers(()), *_of_layers((grad_x,)))
    if not needed:
        return grad_x, [None] * layers, [None] * layers
    size = layers * channels * features
    partial = x.new_empty((splits, size + layers * channels))
    weights_plan.launch(x.device, aligned(x), *layer_grads, partial)
    total = partial.sum(0)
    return (
        grad_x,
        total[:size].view(layers, channels, features).unbind(),
        total[size:].view(layers, channels).unbind(),
    )
