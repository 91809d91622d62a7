"""The products of several linear layers of one input and their gradients: by kernels, or as products of torch's.

The kernels take float32 that torch does not allow to round to TF32, features and channels in multiples of four. One
launch reads the parameters where they are, and tensor cores multiply as accurately as float32 does.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from pyg_dfgnn.dispatch.attention import fused_device_types
from pyg_dfgnn.dispatch.attention_problem import tf32_allowed
from pyg_dfgnn.dispatch.products import MAX_LAYERS, SUM_THREADS, Tile, backward_tile, forward_tile, shares_of
from pyg_dfgnn.runtime.compiler import Spec
from pyg_dfgnn.runtime.launcher import Kernel, addresses, kernel_of, launch

MAX_ROWS = 1 << 15
"""Rows of which a product takes about as long as the host needs to launch it."""
_FEW_ROWS = 1 << 12


def apart(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor] | None:
    r"""What each linear layer makes of x by one kernel, :math:`Y_l = X W_l^T + b_l`, as accurate as in float32.

    Args:
        x: Shape [N, F].
        weights: L of them, each [K, F].
        biases: As many, each [K], or none.

    Returns:
        L tensors [N, K]; None where no kernel takes them.
    """
    if not _has_kernel(x, weights, biases):
        return None
    results = [x.new_empty((x.size(0), weights[0].size(0))) for _ in weights]
    _run_forward(x, weights, biases, results)
    return results


def beside(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """The same side by side, [N, L * K], also where no kernel takes them; and the weights for :func:`gradients`."""
    channels, features = weights[0].shape
    channels *= len(weights)
    if _has_kernel(x, weights, biases):
        rows = x.new_empty((x.size(0), channels))
        _run_forward(x, weights, biases, (rows,))
        return rows, weights
    # Weights and biases alike, side by side in one launch.
    joined = _flatten_dense_tensors((*weights, *biases))
    weight = joined.as_strided((channels, features), (features, 1))
    bias = joined.as_strided((channels,), (1,), channels * features) if biases else None
    return F.linear(x, weight, bias), (weight,)


def gradients(
    x: Tensor,
    weights: Sequence[Tensor],
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    needed: Sequence[bool],
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    """Gradients of linear layers of one input.

    Args:
        x: Shape [N, F].
        weights: L of them, each [K, F], or one of all rows, as :func:`beside` returns them.
        parameters: The weights of the layers, then their biases if they have any.
        grads: Of the results, L times [N, K], or one of them side by side.
        needed: Whether x, any weight, any bias needs one.

    Returns:
        Of x, and of each of the parameters; None for what is not needed.
    """
    count = weights[0].size(0) * len(weights) // parameters[0].size(0)
    if len(weights) == count and _has_kernel(x, weights, grads):
        return _run_backward(x, weights, parameters, grads, needed)
    if len(grads) < count == len(weights):
        weights = (torch.cat(tuple(weights)),)
    grad_x, share = None, count // len(grads)
    if needed[0]:
        grad_x = torch.mm(grads[0], weights[0])
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
    of_weights: list[Tensor | None] = [None] * count
    of_biases: list[Tensor | None] = [None] * (len(parameters) - count)
    if needed[1]:
        of_weights = [part for grad in grads for part in torch.mm(grad.t(), x).chunk(share)]
    if needed[2] and of_biases:
        of_biases = [part for grad in grads for part in _column_sums(grad).chunk(share)]
    return grad_x, [*of_weights, *of_biases]


def _column_sums(grad: Tensor) -> Tensor:
    """The sum over the rows."""
    # Of many rows a product is up to four times as fast on an H200; of few the host is slower than both.
    if grad.size(0) <= _FEW_ROWS:
        return grad.sum(0)
    return torch.mv(grad.t(), grad.new_ones(grad.size(0)))


def _has_kernel(x: Tensor, weights: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether the kernels take x, weights of one shape and dtype, and others that they read beside these."""
    (rows, features), (channels, width), device = x.shape, weights[0].shape, x.device
    if x.dtype is not torch.float32 or device.type not in fused_device_types or tf32_allowed(torch.float32):
        return False
    # What does not fit, torch refuses.
    if len(weights) > MAX_LAYERS or rows == 0 or width != features or features % 4 or channels % 4:
        return False
    for tensor in (x, *weights, *others):
        if tensor.device != device or tensor.data_ptr() % 16 or not tensor.is_contiguous():
            return False
    return True


def _run_forward(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    rows, (channels, features) = x.size(0), weights[0].shape
    tile = forward_tile(rows, channels)
    blocks = -(-rows // tile.rows) * -(-channels // tile.columns) * len(weights)
    tensors = (x, *_four(weights), *_four(biases), *_four(results))
    _run("forward", tile, len(weights), len(results), blocks, (rows, features, channels), tensors, x.device)


def _run_backward(
    x: Tensor,
    weights: Sequence[Tensor],
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    needed: Sequence[bool],
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    layers, rows, device = len(weights), x.size(0), x.device
    channels, features = weights[0].shape
    tile = backward_tile(rows)
    shares = shares_of(tile, layers, rows, features, channels, device)
    grad_x, partial, blocks, count = None, None, 0, layers * channels * (features + 1)
    if needed[0]:
        grad_x, blocks = torch.empty_like(x), shares.x_blocks
    sizes = (rows, features, channels, blocks, shares.rows)
    if needed[1] or needed[2]:
        partial = x.new_empty((shares.splits, count))
        blocks += shares.weight_blocks
    tensors = (x, *_four(weights), *_four(grads), grad_x, partial)
    _run("backward", tile, layers, len(grads), blocks, sizes, tensors, device)
    if partial is None:
        return grad_x, [None] * len(parameters)
    found = partial[0]
    if shares.splits > 1:
        found = x.new_empty(count)
        grid = (-(-count // (4 * SUM_THREADS)), 1, 1)
        launch(_sums(), grid, (SUM_THREADS, 1, 1), addresses((count, shares.splits, partial, found)), device)
    return grad_x, _unflatten_dense_tensors(found, parameters)


def _four(tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return (*tensors, *(None,) * (MAX_LAYERS - len(tensors)))


@cache
def _kernel(name: str, tile: Tile, layers: int, beside: bool) -> Kernel:
    return kernel_of(Spec(f"products/{name}.cu", tile.constants(layers, beside)), f"products_{name}")


@cache
def _sums() -> Kernel:
    return kernel_of(Spec("products/sums.cu", (("STORAGE", 0), ("THREADS", SUM_THREADS))), "products_sums")


def _run(
    name: str,
    tile: Tile,
    layers: int,
    matrices: int,
    blocks: int,
    sizes: Sequence[int],
    tensors: Sequence[Any],
    device: torch.device,
) -> None:
    """Launch a kernel on results, or their gradients, in so many matrices: one of all layers if side by side."""
    arguments = addresses((*sizes, *tensors))
    kernel = _kernel(name, tile, layers, matrices < layers)
    launch(kernel, (blocks, 1, 1), (tile.threads, 1, 1), arguments, device, tile.shared_bytes)
