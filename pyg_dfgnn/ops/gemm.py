"""The products of several linear layers of one input and their gradients: by kernels, or as products of torch's.

The kernels take float32, features and channels in multiples of four. One launch reads the parameters where they are; of
many rows the gradients of the input and of the parameters have one each. Tensor cores multiply, with up to 1.9 times
the error of torch's products in float32.
Factors that are infinite, or 3.402e38 or more, give NaN, and errors grow below 1e-35. For the results of many rows and
the gradient of their input, a number over 5e8 times smaller than the largest of its row of x or of a gradient, or of
those of its weight that it is added up with, is rounded to fewer bits than float32 has. Where torch may round factors
to TF32, the kernels do, to nearest.
"""

from collections.abc import Sequence
from functools import cache, lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from pyg_dfgnn.dispatch.attention.problem import STORAGE, tf32_allowed
from pyg_dfgnn.dispatch.core import fused_device_types, runs_on
from pyg_dfgnn.dispatch.gemm import (
    MAX_LAYERS,
    SHARE_ROWS,
    SUM_THREADS,
    Shares,
    Strips,
    Tile,
    WeightSums,
    backward_strips,
    backward_tile,
    forward_strips,
    forward_tile,
    shares_of,
    sum_groups,
    sum_shares,
    weight_sums,
)
from pyg_dfgnn.runtime.compiler import HOPPER, Spec
from pyg_dfgnn.runtime.launcher import Argument, Grid, Kernel, addresses, is_overridden, kernel_of, launch

MAX_ROWS = 1 << 15
"""Rows of which a product takes about as long as the host needs to launch it."""
_MAX_PRODUCTS = MAX_ROWS << 14
"""The same in products of two numbers: those of so many rows of 128 features and channels."""
_SUMMED_ROWS = 1 << 12
"""Rows up to which torch's sum over them is taken: the host needs longer to launch than it takes."""


def is_large(x: Tensor, channels: int) -> bool:
    """Whether the product of x [N, F] with a weight [K, F] takes longer than the host needs to launch it."""
    return x.size(0) > MAX_ROWS or x.numel() * channels > _MAX_PRODUCTS


def pays(x: Tensor, channels: int) -> bool:
    """Whether a kernel should take it: large, in float32 that nothing may round, on a device that has a kernel."""
    # First what most calls end at, which this should not delay.
    if x.numel() * channels <= _MAX_PRODUCTS or x.dim() != 2 or x.dtype is not torch.float32:
        return False
    if not (x.is_cuda or x.device.type in fused_device_types) or x.layout is not torch.strided:
        return False
    if torch.is_autocast_enabled(x.device.type) or tf32_allowed(torch.float32):
        return False
    return _pays(*x.shape, channels, x.device)


@lru_cache(maxsize=1024)
def _pays(rows: int, features: int, channels: int, device: torch.device) -> bool:
    """Whether its size was timed to be faster than torch's product, and the device has kernels."""
    if device.type == "cuda" and not runs_on(device):
        return False
    sizes = 1, rows, features, channels, True, device
    return forward_strips(*sizes) is not None and backward_strips(*sizes) is not None


def apart(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor] | None:
    r"""What each linear layer makes of x by one kernel, :math:`Y_l = X W_l^T + b_l`.

    Args:
        x: Shape [N, F].
        weights: L of them, each [K, F], of one dtype with x and the biases.
        biases: As many, each [K], or none.

    Returns:
        L tensors [N, K]; None where no kernel takes them.
    """
    taken = _taken(x, weights, biases)
    if taken is None:
        return None
    results = [x.new_empty((x.size(0), weights[0].size(0))) for _ in weights]
    _run_forward(x, weights, taken, results)
    return results


def beside(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """The same side by side, [N, L * K], also where no kernel takes them; and the weights for :func:`gradients`.

    Weights and biases of another dtype than x are cast to that.
    """
    channels, features = weights[0].shape
    channels *= len(weights)
    taken = _taken(x, weights, biases)
    if taken is not None:
        rows = x.new_empty((x.size(0), channels))
        _run_forward(x, weights, taken, (rows,))
        return rows, weights
    # Weights and biases alike, side by side in one launch.
    joined = _flatten_dense_tensors((*weights, *biases))
    if joined.dtype is not x.dtype:
        joined = joined.to(x.dtype)
    weight = joined.as_strided((channels, features), (features, 1))
    bias = joined.as_strided((channels,), (1,), channels * features) if biases else None
    return F.linear(x, weight, bias), (weight,)


def in_dtype(
    dtype: torch.dtype, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The weights and biases, all of one dtype, in this one: with two launches where it is another."""
    if weights[0].dtype is dtype:
        return weights, biases
    tensors = (*weights, *biases)
    found = _unflatten_dense_tensors(_flatten_dense_tensors(tensors).to(dtype), tensors)
    return found[: len(weights)], found[len(weights) :]


def gradients(
    x: Tensor,
    layers: int,
    weights: Sequence[Tensor],
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    needed: Sequence[bool],
    x_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    """Gradients of linear layers of one input.

    Args:
        x: Shape [N, F].
        layers: Their number L.
        weights: Of each [K, F], or one of all rows, as :func:`beside` returns them.
        parameters: The weights of the layers, then their biases if they have any.
        grads: Of the results, L times [N, K], or one of them side by side.
        needed: Whether x, any weight, any bias needs one.
        x_dtype: What x was cast from; None where it was not.

    Returns:
        Of x in this dtype, and of each of the parameters in its own; None for what is not needed.
    """
    if len(weights) == layers:
        # Sums hand out gradients that have one number for all elements.
        grads = [grad.contiguous() for grad in grads]
        taken = _taken(x, weights, grads)
        if taken is not None:
            return _run_backward(x, weights, taken, parameters, grads, needed)
        if len(grads) < layers:
            weights = (torch.cat(tuple(weights)),)
    # Several gradients are added in the dtype of x, which nobody has cast here.
    assert x_dtype is None or len(grads) == 1
    dtypes = x_dtype or x.dtype, parameters[0].dtype
    if not torch.is_autocast_enabled(x.device.type):
        return _gradients(x, layers, weights, len(parameters), grads, needed, dtypes)
    # Backward in a region of autocast that forward may not have been in: the products keep their dtypes.
    with torch.autocast(x.device.type, enabled=False):
        return _gradients(x, layers, weights, len(parameters), grads, needed, dtypes)


def _gradients(
    x: Tensor,
    layers: int,
    weights: Sequence[Tensor],
    parameters: int,
    grads: Sequence[Tensor],
    needed: Sequence[bool],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    """The same by products of torch's, for so many parameters, in the dtypes of x and of these."""
    grad_x, share = None, layers // len(grads)
    x_dtype, dtype = dtypes
    if needed[0]:
        grad_x = _product(grads[0], weights[0], x_dtype)
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
    of_weights: list[Tensor | None] = [None] * layers
    of_biases: list[Tensor | None] = [None] * (parameters - layers)
    if needed[1]:
        of_weights = [part for grad in grads for part in _product(grad.t(), x, dtype).chunk(share)]
    if needed[2] and of_biases:
        of_biases = [part for grad in grads for part in _column_sums(grad, dtype).chunk(share)]
    return grad_x, [*of_weights, *of_biases]


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Their product in another dtype, not rounded to theirs where torch can."""
    if a.dtype is not dtype and a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return _cast(torch.mm(a, b), dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # A call that casts nothing costs the host more than this.
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _column_sums(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the rows, in this dtype."""
    rows, columns = grad.shape
    if rows <= _SUMMED_ROWS or not _is_summed(grad):
        return grad.sum(0, dtype=dtype)
    shares, share = sum_shares(rows, sum_groups(columns, grad.itemsize), grad.device)
    sums = _sum_rows(_sums(rows, columns, share, grad.dtype), grad, (shares, columns))
    if shares > 1:
        sums = _sum_rows(_sums(shares, columns, shares, torch.float32), sums, (1, columns))
    return _cast(sums[0], dtype)


def _is_summed(rows: Tensor) -> bool:
    """Whether the kernel takes them."""
    if rows.dtype not in STORAGE or not (rows.is_cuda or rows.device.type in fused_device_types):
        return False
    return rows.is_contiguous() and not (rows.data_ptr() | rows.size(1) * rows.itemsize) % 16 and rows.size(1) > 0


class _Taken(NamedTuple):
    """What the kernels take: on a GPU addresses, weights and the others those of `MAX_LAYERS` layers.

    Rows, features and channels come first, then whether numbers are split or may be rounded to TF32.
    """

    sizes: tuple[int, int, int]
    split: bool
    x: Any
    weights: tuple[Any, ...]
    others: tuple[Any, ...]


_address_of, _place_of, _is_contiguous = Tensor.data_ptr, Tensor.get_device, Tensor.is_contiguous
_NULLS = (0,) * MAX_LAYERS
_NONES = (None,) * MAX_LAYERS


def _taken(x: Tensor, weights: Sequence[Tensor], others: Sequence[Tensor]) -> _Taken | None:
    """The input, weights of one shape and dtype, and what is read beside them, if the kernels take these."""
    rows, features = x.shape
    channels, width = weights[0].shape
    layers, place = len(weights), x.get_device()
    if x.dtype is not torch.float32 or not (x.is_cuda or x.device.type in fused_device_types):
        return None
    # What does not fit, torch refuses.
    if layers > MAX_LAYERS or width != features or features % 4 or channels % 4 or not rows * features * channels:
        return None
    tensors = (x, *weights, *others)
    # Maps of methods cost the host less than a loop.
    found: tuple[Any, ...] = tuple(map(_address_of, tensors))
    if reduce(or_, found) % 16 or not all(map(_is_contiguous, tensors)) or set(map(_place_of, tensors)) != {place}:
        return None
    nothing: tuple[Any, ...] = _NULLS
    if place < 0:
        found, nothing = tensors, _NONES
    sizes = rows, features, channels
    rest = (*found[layers + 1 :], *nothing)
    split = not tf32_allowed(torch.float32)
    return _Taken(sizes, split, found[0], (*found[1 : layers + 1], *nothing[layers:]), rest[:MAX_LAYERS])


class _Plan(NamedTuple):
    """How a kernel is launched, and the sizes that it takes."""

    kernel: Kernel
    grid: Grid
    block: Grid
    shared_bytes: int
    sizes: tuple[int, ...]

    def launch(self, arguments: Sequence[Argument], device: torch.device) -> None:
        """Arguments after the sizes; tensors become addresses."""
        launch(self.kernel, self.grid, self.block, (*self.sizes, *addresses(arguments)), device, self.shared_bytes)


@lru_cache(maxsize=1024)
def _sums(rows: int, columns: int, share: int, dtype: torch.dtype) -> _Plan:
    """Of each share of so many rows in float32."""
    blocks = -(-rows // share) * sum_groups(columns, dtype.itemsize)
    return _Plan(_sums_kernel(dtype), (blocks, 1, 1), (SUM_THREADS, 1, 1), 0, (rows, columns, share))


def _sum_rows(plan: _Plan, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    sums = rows.new_empty(shape, dtype=torch.float32)
    plan.launch((rows, sums), rows.device)
    return sums


def _rows_plan(strips: Strips, rows: int, side_by_side: bool, device: torch.device) -> _Plan:
    grid = (strips.blocks(rows, device), 1, 1)
    return _Plan(
        _hopper_kernel("forward_strips", strips, side_by_side), grid, strips.block, strips.shared_bytes, (rows,)
    )


@lru_cache(maxsize=1024)
def _forward(
    rows: int, features: int, channels: int, split: bool, layers: int, side_by_side: bool, device: torch.device
) -> _Plan:
    strips = forward_strips(layers, rows, features, channels, split, device)
    if strips is not None:
        return _rows_plan(strips, rows, side_by_side, device)
    tile = forward_tile(rows, channels)
    blocks = -(-rows // tile.rows) * -(-channels // tile.columns) * layers
    kernel = _kernel("forward", tile, layers, side_by_side, split)
    return _Plan(kernel, (blocks, 1, 1), tile.block, tile.shared_bytes, (rows, features, channels))


def _run_forward(x: Tensor, weights: Sequence[Tensor], taken: _Taken, results: Sequence[Tensor]) -> None:
    sizes, split, input_at, weights_at, biases_at = taken
    plan = _forward(*sizes, split, len(weights), len(results) < len(weights), x.device)
    # What all the layers read, where a kernel has room for one input each.
    inputs_at = (input_at, *_NONES[1:]) if len(plan.sizes) == 1 else (input_at,)
    plan.launch((*inputs_at, *weights_at, *biases_at, *results, *_NONES[len(results) :]), x.device)


class _Backward(NamedTuple):
    """How gradients are found: by kernels of their own, if any, of the input and of the parameters; by tiles."""

    x_plan: _Plan | None
    weights_plan: _Plan | None
    kernel: Kernel
    tile: Tile
    shares: Shares
    sums: _Plan


def _is_for_host(x: Tensor, channels: int) -> bool:
    """Whether launches take longer than what they start: few rows, few products, and no graph is captured."""
    if x.size(0) > SHARE_ROWS or x.numel() * channels > _MAX_PRODUCTS:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


@lru_cache(maxsize=1024)
def _backward(
    rows: int,
    features: int,
    channels: int,
    split: bool,
    layers: int,
    side_by_side: bool,
    device: torch.device,
    whole: bool = False,
) -> _Backward:
    tile, sizes = backward_tile(rows), (layers, rows, features, channels)
    strips, sums = backward_strips(*sizes, split, device), weight_sums(*sizes, split, device)
    shares = shares_of(tile, *sizes, device, sums, whole)
    x_plan = None if strips is None else _rows_plan(strips, rows, side_by_side, device)
    weights_plan = None
    if sums is not None:
        kernel, grid = _hopper_kernel("weight_grad", sums, side_by_side), (shares.weight_blocks, 1, 1)
        weights_plan = _Plan(kernel, grid, sums.block, sums.shared_bytes, (rows, shares.rows))
    kernel = _kernel("backward", tile, layers, side_by_side, split)
    added = _sums(shares.splits, layers * channels * (features + 1), shares.splits, torch.float32)
    if whole and device.type == "cuda" and not is_overridden():
        # A capture of the same gradients has shares to add, and no kernel can be loaded in it.
        with torch.cuda.device(device):
            added.kernel.function(device.index, 0)
    return _Backward(x_plan, weights_plan, kernel, tile, shares, added)


def _run_backward(
    x: Tensor,
    weights: Sequence[Tensor],
    taken: _Taken,
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    needed: Sequence[bool],
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    layers, device = len(weights), x.device
    sizes, split, input_at, weights_at, grads_at = taken
    key = *sizes, split, layers, len(grads) < layers, device
    x_plan, weights_plan, kernel, tile, shares, sums = _backward(*key, _is_for_host(x, sizes[2] * layers))
    _, features, channels = sizes
    grad_x, partial, x_blocks, blocks = None, None, 0, 0
    size = layers * channels * features
    count = size + layers * channels
    if needed[0]:
        grad_x = torch.empty_like(x)
        if x_plan is None:
            x_blocks = shares.x_blocks
        else:
            x_plan.launch((*grads_at, *weights_at, *_NONES, grad_x, *_NONES[1:]), device)
    if needed[1] or needed[2]:
        partial = x.new_empty((shares.splits, count))
        if weights_plan is None:
            blocks = shares.weight_blocks
        else:
            weights_plan.launch((input_at, *grads_at, partial), device)
    # What is left to tiles, if anything.
    given = (*sizes, x_blocks, shares.rows, input_at, *weights_at, *grads_at)
    arguments = (*given, *addresses((grad_x, partial)))
    launch(kernel, (x_blocks + blocks, 1, 1), tile.block, arguments, device, tile.shared_bytes)
    if partial is None:
        return grad_x, [None] * len(parameters)
    found = partial if shares.splits == 1 else _sum_rows(sums, partial, (count,))
    of_weights = found.as_strided((layers, channels, features), (channels * features, features, 1)).unbind()
    if len(parameters) == layers:
        return grad_x, of_weights
    return grad_x, (*of_weights, *found.as_strided((layers, channels), (channels, 1), size).unbind())


@cache
def _kernel(name: str, tile: Tile, layers: int, side_by_side: bool, split: bool) -> Kernel:
    return kernel_of(Spec(f"gemm/{name}.cu", tile.constants(layers, side_by_side, split)), f"gemm_{name}")


@cache
def _hopper_kernel(name: str, plan: Strips | WeightSums, side_by_side: bool) -> Kernel:
    return kernel_of(Spec(f"gemm/{name}.cu", plan.constants(side_by_side), HOPPER), f"gemm_{name}")


@cache
def _sums_kernel(dtype: torch.dtype) -> Kernel:
    return kernel_of(Spec("gemm/sums.cu", (("STORAGE", STORAGE[dtype]),)), "gemm_sums")
