"""Linear layers of one input and their gradients: by kernels, or as torch's products.

The kernels take float32, features and channels in multiples of four. One launch reads the parameters where they are;
for many rows the gradients of the input and of the parameters have one launch each. Tensor cores multiply, with up to
1.9 times the error of torch's products in float32. Factors that are infinite, or 3.402e38 or more, give NaN, and errors
grow below 1e-35. For the results of many rows and the gradient of their input, a number over 5e8 times smaller than the
largest of its row of x or of a gradient, or of those of its weight that it is added up with, is rounded to fewer bits
than float32 has. Where torch may round factors to TF32, the kernels do, to nearest.
"""

from collections.abc import Sequence
from functools import cache, lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from pyg_dfgnn.dispatch.attention.problem import tf32_allowed
from pyg_dfgnn.dispatch.core import fused_device_types, runs_on
from pyg_dfgnn.dispatch.gemm import (
    COLUMN_SUM_THREADS,
    MAX_LAYERS,
    SPLIT_ROWS,
    GemmTile,
    SplitK,
    Strips,
    WeightGrad,
    backward_tile,
    column_groups,
    column_sum_splits,
    forward_tile,
    split_k,
    strips_of,
    weight_grad,
)
from pyg_dfgnn.dispatch.traversal import STORAGE
from pyg_dfgnn.ops.eager import PLAIN, apply_of, is_for_torch, needs_grad, once_differentiable
from pyg_dfgnn.runtime.launcher import (
    Argument,
    Grid,
    Kernel,
    addresses,
    compiled_together,
    is_overridden,
    kernel_of,
    launch,
)
from pyg_dfgnn.statements.spec import HOPPER, Spec

MAX_ROWS = 1 << 15
"""Number of rows at which a GEMM costs as much as its launch."""
MAX_MULTIPLICATIONS = MAX_ROWS << 14
"""Number of multiplications at which a GEMM costs as much as its launch: of so many rows, 128 features and channels."""
SMALL_PRODUCT = 1 << 28
"""Most multiplications of a layer that torch is left with: kernels save about what autograd costs the host there."""
_COLUMN_SUM_ROWS = 1 << 12
"""Most rows that torch sums: the kernel takes less time than the host needs to launch it."""


def kernel_is_faster(x: Tensor, channels: int) -> bool:
    """Return whether a kernel is faster than torch for the product of x [..., F] with a weight [K, F].

    The product is large, in float32 that nothing may round, and the device has a kernel.
    """
    # First what most calls end at, which this should not delay.
    if x.numel() * channels <= SMALL_PRODUCT or x.dim() != 2 or x.dtype is not torch.float32:
        return False
    if not (x.is_cuda or x.device.type in fused_device_types) or x.layout is not torch.strided:
        return False
    if torch.is_autocast_enabled(x.device.type) or tf32_allowed(torch.float32):
        return False
    return _kernel_is_faster(*x.shape, channels, x.device)


@lru_cache(maxsize=1024)
def _kernel_is_faster(rows: int, features: int, channels: int, device: torch.device) -> bool:
    if device.type == "cuda" and not runs_on(device):
        return False
    sizes = 1, rows, features, channels, True, device
    return all(strips_of(backward, *sizes) is not None for backward in (False, True))


def keeps_weight(parameters: Any) -> bool:
    """Return whether a layer's weight and bias are parameters: pruning, norms and replicas keep them elsewhere."""
    weight = parameters.get("weight")
    return type(weight) in PLAIN and weight.layout is torch.strided and "bias" in parameters


# With autograd -------------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `X W^T + b` by a kernel, or by torch where no kernel takes the tensors as they lie.

    Args:
        x: Shape [N, F].
        weight: Shape [K, F].
        bias: Shape [K].

    Returns:
        Shape [N, K].
    """
    return project(x, (weight,), () if bias is None else (bias,), twice=True)[0]


def project(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    heads: int | None = None,
    dtype: torch.dtype | None = None,
    *,
    twice: bool = False,
) -> Sequence[Tensor]:
    r"""Return what linear layers of one shape make of x, under one node of autograd.

    .. math::
        Y_l = X W_l^T + b_l, \quad
        \partial X = \sum_l \partial Y_l W_l, \quad
        \partial W_l = \partial Y_l^T X, \quad
        \partial b_l = \partial Y_l^T 1

    Each of these lines is one product for all layers where a kernel takes them; gradients also where x has few rows.

    Args:
        x: Shape [N, F].
        weights: L of them, each [H * C, F].
        biases: As many, each [H * C], or none.
        heads: The number H of heads; None to leave the channels undivided.
        dtype: To which x and the parameters are cast; None for their own.
        twice: Whether gradients may be differentiated; torch's products give such gradients. Only without a cast.

    Returns:
        L tensors [N, H, C], or [N, H * C] undivided.
    """
    if dtype is not None:
        x = x.to(dtype)
    tensors = (*weights, *biases)
    if needs_grad((x, *tensors)):
        results: Sequence[Tensor] = _apply_projection((heads, len(weights), twice), x, *tensors)
        return results
    return _project(heads, x, weights, biases)[0]


def _project(
    heads: int | None, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[list[Tensor], Sequence[Tensor]]:
    """Return the results, and the weights in the dtype of x, which backward needs."""
    results = separate(x, weights, biases)
    if results is None:
        weights, biases = _in_dtype(x.dtype, weights, biases)
        added: Sequence[Tensor | None] = biases or [None] * len(weights)
        results = [F.linear(x, weight, bias) for weight, bias in zip(weights, added, strict=True)]
    if heads is None:
        return results, weights
    shape = x.size(0), heads, weights[0].size(0) // heads
    return [result.view(shape) for result in results], weights


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rest: tuple[int | None, int, bool], x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        heads, count, ctx.twice = rest
        results, weights = _project(heads, x, tensors[:count], tensors[count:])
        # Weights that no gradient reads may be edited.
        ctx.save_for_backward(x, *(weights if x.requires_grad else ()))
        ctx.layers, ctx.unread = tensors, () if x.requires_grad else weights
        # A layer whose result nothing reads gets no gradient, rather than one of zeros.
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.twice and not torch.compiler.is_compiling() and is_for_torch(grads):
            return _differentiable_gradients(ctx, grads)
        return _projection_gradients(ctx, *grads)  # type: ignore[no-any-return]


@once_differentiable
def _projection_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    saved: list[Tensor] = [*ctx.saved_tensors, *ctx.unread]
    x, weights = saved[0], saved[1:]
    count, layers = len(grads), ctx.layers
    used = [index for index, grad in enumerate(grads) if grad is not None]
    _, needs_x, *needed = ctx.needs_input_grad
    if not used:
        return None, None, *[None] * len(needed)
    places = [*used, *([index + count for index in used] if len(layers) > count else ())]
    grad_x, of_parameters = gradients(
        x,
        len(used),
        [weights[index] for index in used],
        [layers[place] for place in places],
        [grads[index].flatten(1) for index in used],  # type: ignore[union-attr]
        (needs_x, any(needed[:count]), any(needed[count:])),
    )
    by_place = dict(zip(places, of_parameters, strict=True))
    return None, grad_x, *[by_place.get(place) for place in range(len(needed))]


def _differentiable_gradients(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return the gradients of undivided results by torch's products, which have derivatives of their own."""
    saved: list[Tensor] = [*ctx.saved_tensors, *ctx.unread]
    x, weights = saved[0], saved[1:]
    of_x = [grad @ weight for grad, weight in zip(grads, weights, strict=True) if grad is not None]
    of_weights = [None if grad is None else grad.t() @ x for grad in grads]
    of_biases = [None if grad is None else grad.sum(0) for grad in grads] if len(ctx.layers) > len(weights) else []
    computed = [reduce(torch.add, of_x) if of_x else None, *of_weights, *of_biases]
    return None, *(grad if needed else None for grad, needed in zip(computed, ctx.needs_input_grad[1:], strict=True))


_apply_projection = apply_of(_Projection)


# Without autograd ----------------------------------------------------------------------------------------------------


def separate(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor] | None:
    r"""Return what each linear layer makes of x by one kernel, :math:`Y_l = X W_l^T + b_l`.

    Args:
        x: Shape [N, F].
        weights: L of them, each [K, F], of one dtype with x and the biases.
        biases: As many, each [K], or none.

    Returns:
        L tensors [N, K]; None where no kernel takes them.
    """
    arguments = _kernel_arguments(x, weights, biases)
    if arguments is None:
        return None
    results = [x.new_empty((x.size(0), weights[0].size(0))) for _ in weights]
    _run_forward(x, weights, arguments, results)
    return results


def interleaved(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """Return what all layers make of a row of x in one row, [N, L * K], and the weights for :func:`gradients`.

    Weights and biases of another dtype than x are cast to it. Torch's product gives what no kernel takes.
    """
    channels, features = weights[0].shape
    channels *= len(weights)
    arguments = _kernel_arguments(x, weights, biases)
    if arguments is not None:
        rows = x.new_empty((x.size(0), channels))
        _run_forward(x, weights, arguments, (rows,))
        return rows, weights
    # Weights and biases alike, joined in one launch.
    joined = _cast(_flatten_dense_tensors((*weights, *biases)), x.dtype)
    weight = joined.as_strided((channels, features), (features, 1))
    bias = joined.as_strided((channels,), (1,), channels * features) if biases else None
    return F.linear(x, weight, bias), (weight,)


def _in_dtype(
    dtype: torch.dtype, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the weights and biases, all of one dtype, in this one: with two launches where it is another."""
    if weights[0].dtype is dtype:
        return weights, biases
    tensors = (*weights, *biases)
    cast = _unflatten_dense_tensors(_flatten_dense_tensors(tensors).to(dtype), tensors)
    return cast[: len(weights)], cast[len(weights) :]


def gradients(
    x: Tensor,
    layers: int,
    weights: Sequence[Tensor],
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    needed: Sequence[bool],
    x_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    """Return the gradients of linear layers of one input.

    Args:
        x: Shape [N, F].
        layers: The number L of layers.
        weights: Of each layer [K, F], or one of all rows, as :func:`interleaved` returns them.
        parameters: The weights of the layers, then their biases if they have any.
        grads: Of the results, L tensors [N, K], or one [N, L * K].
        needed: Whether x, any weight, any bias needs a gradient.
        x_dtype: What x was cast from; None where it was not.

    Returns:
        The gradient of x in this dtype, and of each of the parameters in its own; None for what is not needed.
    """
    if len(weights) == layers:
        # Sums hand out gradients that have one number for all elements.
        grads = [grad.contiguous() for grad in grads]
        arguments = _kernel_arguments(x, weights, grads)
        if arguments is not None:
            return _run_backward(x, weights, arguments, parameters, grads, needed)
        if layers > 1 and (len(grads) == 1 or x.size(0) <= MAX_ROWS):
            # The host needs longer to launch several products of few rows than these take.
            weights = (torch.cat(tuple(weights)),)
            grads = grads if len(grads) == 1 else [torch.cat(grads, 1)]
    # Several gradients are added in the dtype of x, which nobody has cast here.
    if x_dtype is not None and len(grads) > 1:
        raise ValueError(f"'x_dtype' needs one gradient of all results (got {len(grads)})")
    dtypes = x_dtype or x.dtype, parameters[0].dtype
    if not torch.is_autocast_enabled(x.device.type):
        return _torch_gradients(x, layers, weights, len(parameters), grads, needed, dtypes)
    # Backward in a region of autocast that forward may not have been in: the products keep their dtypes.
    with torch.autocast(x.device.type, enabled=False):
        return _torch_gradients(x, layers, weights, len(parameters), grads, needed, dtypes)


def _torch_gradients(
    x: Tensor,
    layers: int,
    weights: Sequence[Tensor],
    parameters: int,
    grads: Sequence[Tensor],
    needed: Sequence[bool],
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    """Return the gradients by torch's products, for so many parameters, in the dtypes of x and of these."""
    grad_x, layers_per_grad = None, layers // len(grads)
    x_dtype, dtype = dtypes
    if needed[0]:
        grad_x = _product(grads[0], weights[0], x_dtype)
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
    of_weights: list[Tensor | None] = [None] * layers
    of_biases: list[Tensor | None] = [None] * (parameters - layers)
    if needed[1]:
        of_weights = [part for grad in grads for part in _product(grad.t(), x, dtype).chunk(layers_per_grad)]
    if needed[2] and of_biases:
        of_biases = [part for grad in grads for part in column_sums(grad, dtype).chunk(layers_per_grad)]
    return grad_x, [*of_weights, *of_biases]


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product in another dtype, not rounded to that of a and b where torch can."""
    if a.dtype is not dtype and a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return _cast(torch.mm(a, b), dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # A call that casts nothing costs the host more than this.
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def column_sums(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over the rows of a matrix, [columns]; torch's own leaves a GPU idle where these are few."""
    rows, columns = grad.shape
    if rows <= _COLUMN_SUM_ROWS or not _has_column_sum_kernel(grad):
        return grad.sum(0, dtype=dtype)
    splits, rows_per_split = column_sum_splits(rows, column_groups(columns, grad.itemsize), grad.device)
    sums = _sum_rows(_column_sum_plan(rows, columns, rows_per_split, grad.dtype), grad, (splits, columns))
    if splits > 1:
        sums = _sum_rows(_column_sum_plan(splits, columns, splits, torch.float32), sums, (1, columns))
    return _cast(sums[0], dtype)


def _has_column_sum_kernel(rows: Tensor) -> bool:
    if rows.dtype not in STORAGE or not (rows.is_cuda or rows.device.type in fused_device_types):
        return False
    return rows.is_contiguous() and not (rows.data_ptr() | rows.size(1) * rows.itemsize) % 16 and rows.size(1) > 0


# Launches ------------------------------------------------------------------------------------------------------------


class _KernelArguments(NamedTuple):
    """What a kernel takes: addresses on a GPU, else tensors.

    Attributes:
        sizes: Rows, features and channels.
        split: Whether numbers are split, else they may be rounded to TF32.
        x: The input.
        weights: Of `MAX_LAYERS` layers.
        others: Biases or gradients of as many layers.
    """

    sizes: tuple[int, int, int]
    split: bool
    x: Any
    weights: tuple[Any, ...]
    others: tuple[Any, ...]


_address_of, _place_of, _is_contiguous = Tensor.data_ptr, Tensor.get_device, Tensor.is_contiguous
_NULLS = (0,) * MAX_LAYERS
_NONES = (None,) * MAX_LAYERS


def _kernel_arguments(x: Tensor, weights: Sequence[Tensor], others: Sequence[Tensor]) -> _KernelArguments | None:
    """Return the arguments of a kernel for weights of one shape and dtype; None where no kernel takes them."""
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
    raw: tuple[Any, ...] = tuple(map(_address_of, tensors))
    if reduce(or_, raw) % 16 or not all(map(_is_contiguous, tensors)) or set(map(_place_of, tensors)) != {place}:
        return None
    nothing: tuple[Any, ...] = _NULLS
    if place < 0:
        raw, nothing = tensors, _NONES
    rest = (*raw[layers + 1 :], *nothing)
    split = not tf32_allowed(torch.float32)
    padded = (*raw[1 : layers + 1], *nothing[layers:])
    return _KernelArguments((rows, features, channels), split, raw[0], padded, rest[:MAX_LAYERS])


class _Plan(NamedTuple):
    """How a kernel is launched, and the sizes that it takes."""

    kernel: Kernel
    grid: Grid
    block: Grid
    shared_bytes: int
    sizes: tuple[int, ...]

    def launch(self, arguments: Sequence[Argument], device: torch.device) -> None:
        """Launch with arguments after the sizes; tensors become addresses."""
        launch(self.kernel, self.grid, self.block, (*self.sizes, *addresses(arguments)), device, self.shared_bytes)


@lru_cache(maxsize=1024)
def _column_sum_plan(rows: int, columns: int, rows_per_split: int, dtype: torch.dtype) -> _Plan:
    blocks = -(-rows // rows_per_split) * column_groups(columns, dtype.itemsize)
    sizes = rows, columns, rows_per_split
    return _Plan(_column_sum_kernel(dtype), (blocks, 1, 1), (COLUMN_SUM_THREADS, 1, 1), 0, sizes)


def _sum_rows(plan: _Plan, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    sums = rows.new_empty(shape, dtype=torch.float32)
    plan.launch((rows, sums), rows.device)
    return sums


def _strips_plan(strips: Strips, rows: int, is_interleaved: bool, device: torch.device) -> _Plan:
    kernel, grid = _hopper_kernel("forward_strips", strips, is_interleaved), (strips.blocks(rows, device), 1, 1)
    return _Plan(kernel, grid, strips.block, strips.shared_bytes, (rows,))


@lru_cache(maxsize=1024)
def _forward(
    rows: int, features: int, channels: int, split: bool, layers: int, is_interleaved: bool, device: torch.device
) -> _Plan:
    strips = strips_of(False, layers, rows, features, channels, split, device)
    if strips is not None:
        return _strips_plan(strips, rows, is_interleaved, device)
    tile = forward_tile(rows, channels)
    blocks = -(-rows // tile.rows) * -(-channels // tile.columns) * layers
    kernel = _kernel("forward", tile, layers, is_interleaved, split)
    return _Plan(kernel, (blocks, 1, 1), tile.block, tile.shared_bytes, (rows, features, channels))


def _run_forward(x: Tensor, weights: Sequence[Tensor], arguments: _KernelArguments, results: Sequence[Tensor]) -> None:
    sizes, split, input_at, weights_at, biases_at = arguments
    plan = _forward(*sizes, split, len(weights), len(results) < len(weights), x.device)
    # Strips have room for one input per layer, and read the first.
    inputs_at = (input_at, *_NONES[1:]) if len(plan.sizes) == 1 else (input_at,)
    plan.launch((*inputs_at, *weights_at, *biases_at, *results, *_NONES[len(results) :]), x.device)


class _Backward(NamedTuple):
    """How gradients are computed.

    Attributes:
        x_plan: The launch for the gradient of the input; None if tiles compute it.
        weights_plan: The launch for the gradients of the parameters; None if tiles compute them.
        kernel: The kernel of tiles.
        tile: Its tile.
        split: How the work is divided.
        sums: The launch that adds the partial sums.
    """

    x_plan: _Plan | None
    weights_plan: _Plan | None
    kernel: Kernel
    tile: GemmTile
    split: SplitK
    sums: _Plan


def _is_launch_bound(x: Tensor, channels: int) -> bool:
    """Return whether launches take longer than what they start: few rows and products, and no graph is captured."""
    if x.size(0) > SPLIT_ROWS or x.numel() * channels > MAX_MULTIPLICATIONS:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


@lru_cache(maxsize=1024)
def _backward(
    rows: int,
    features: int,
    channels: int,
    split: bool,
    layers: int,
    is_interleaved: bool,
    device: torch.device,
    one_split: bool = False,
) -> _Backward:
    tile, sizes = backward_tile(rows), (layers, rows, features, channels)
    strips, of_weights = strips_of(True, *sizes, split, device), weight_grad(*sizes, split, device)
    division = split_k(tile, *sizes, device, of_weights, one_split)
    x_plan = weights_plan = None
    with compiled_together(device):
        if strips is not None:
            x_plan = _strips_plan(strips, rows, is_interleaved, device)
        if of_weights is not None:
            kernel, grid = _hopper_kernel("weight_grad", of_weights, is_interleaved), (division.weight_blocks, 1, 1)
            weights_plan = _Plan(kernel, grid, of_weights.block, of_weights.shared_bytes, (rows, division.rows))
        # Nothing launches tiles where others compute both.
        if x_plan is None or weights_plan is None:
            _kernel("backward", tile, layers, is_interleaved, split)
        sums = _column_sum_plan(division.splits, layers * channels * (features + 1), division.splits, torch.float32)
    kernel = _kernel("backward", tile, layers, is_interleaved, split)
    if one_split and device.type == "cuda" and not is_overridden():
        # A capture of the same gradients has partial sums to add, and no kernel can be loaded in it.
        with torch.cuda.device(device):
            sums.kernel.function(device.index, 0)
    return _Backward(x_plan, weights_plan, kernel, tile, division, sums)


def _run_backward(
    x: Tensor,
    weights: Sequence[Tensor],
    arguments: _KernelArguments,
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    needed: Sequence[bool],
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    layers, device = len(weights), x.device
    sizes, split, input_at, weights_at, grads_at = arguments
    key = *sizes, split, layers, len(grads) < layers, device
    x_plan, weights_plan, kernel, tile, division, sums = _backward(*key, _is_launch_bound(x, sizes[2] * layers))
    _, features, channels = sizes
    grad_x, partial, x_blocks, weight_blocks = None, None, 0, 0
    size = layers * channels * features
    count = size + layers * channels
    if needed[0]:
        grad_x = torch.empty_like(x)
        if x_plan is None:
            x_blocks = division.x_blocks
        else:
            x_plan.launch((*grads_at, *weights_at, *_NONES, grad_x, *_NONES[1:]), device)
    if needed[1] or needed[2]:
        partial = x.new_empty((division.splits, count))
        if weights_plan is None:
            weight_blocks = division.weight_blocks
        else:
            weights_plan.launch((input_at, *grads_at, partial), device)
    # What is left to tiles, if anything.
    of_tiles = (*sizes, x_blocks, division.rows, input_at, *weights_at, *grads_at, *addresses((grad_x, partial)))
    launch(kernel, (x_blocks + weight_blocks, 1, 1), tile.block, of_tiles, device, tile.shared_bytes)
    if partial is None:
        return grad_x, [None] * len(parameters)
    total = partial if division.splits == 1 else _sum_rows(sums, partial, (count,))
    of_weights = total.as_strided((layers, channels, features), (channels * features, features, 1)).unbind()
    if len(parameters) == layers:
        return grad_x, of_weights
    return grad_x, (*of_weights, *total.as_strided((layers, channels), (channels, 1), size).unbind())


@cache
def _kernel(name: str, tile: GemmTile, layers: int, is_interleaved: bool, split: bool) -> Kernel:
    return kernel_of(Spec(f"gemm/{name}.cu", tile.constants(layers, is_interleaved, split)), f"gemm_{name}")


@cache
def _hopper_kernel(name: str, plan: Strips | WeightGrad, is_interleaved: bool) -> Kernel:
    return kernel_of(Spec(f"gemm/{name}.cu", plan.constants(is_interleaved), HOPPER), f"gemm_{name}")


@cache
def _column_sum_kernel(dtype: torch.dtype) -> Kernel:
    return kernel_of(Spec("gemm/sums.cu", (("STORAGE", STORAGE[dtype]),)), "gemm_sums")
