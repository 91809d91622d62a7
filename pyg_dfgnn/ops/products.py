"""The products of several linear layers of one input and their gradients: by own kernels, or as torch's products."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from pyg_dfgnn.dispatch.attention import fused_device_types
from pyg_dfgnn.dispatch.attention_problem import tf32_allowed
from pyg_dfgnn.dispatch.products import MAX_LAYERS, SUM_THREADS, Shares, Tile, backward_tile, forward_tile, shares_of
from pyg_dfgnn.runtime.compiler import Spec
from pyg_dfgnn.runtime.launcher import Kernel, addresses, kernel_of, launch

MAX_ROWS = 1 << 15
"""Rows of which a product takes about as long as the host needs to launch it."""
_FEW_ROWS = 1 << 12


def layer_products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], beside: bool) -> list[Tensor] | None:
    r"""What each layer makes of x by one kernel, :math:`Y_l = X W_l^T + b_l`, as accurate as float32 products.

    Args:
        x: Shape [N, F].
        weights: L of them, each [K, F].
        biases: As many, each [K], or none.
        beside: Whether the results are to lie side by side.

    Returns:
        L tensors [N, K], with ``beside`` one of shape [N, L * K]. None where no kernel takes them.
    """
    if not _has_kernel(x, weights) or any(not bias.is_contiguous() for bias in biases):
        return None
    layers, rows = len(weights), x.size(0)
    channels, features = weights[0].shape
    if beside:
        results = [x.new_empty((rows, layers * channels))]
    else:
        results = [x.new_empty((rows, channels)) for _ in weights]
    device = x.device
    tile = forward_tile(rows, layers * channels, device)
    blocks = -(-rows // tile.rows) * -(-channels // tile.columns) * layers
    tensors = (x, *_four(weights), *_four(biases), *_four(results))
    kernel = _kernel("forward", tile, layers, beside)
    _run(kernel, tile, blocks, (rows, features, channels), tensors, device)
    return results


def layer_gradients(
    x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], beside: bool, needed: Sequence[bool]
) -> tuple[Tensor | None, Sequence[Tensor], Sequence[Tensor]] | None:
    """Gradients of x, of the weights and of the biases of :func:`layer_products`; None where no kernel takes them.

    Args:
        x: Shape [N, F].
        weights: L of them, each [K, F].
        grads: Of the results, in the shape that these have.
        beside: Whether they lie side by side.
        needed: Whether x, any weight, any bias needs one; empty lists stand for those that do not.
    """
    if not _has_kernel(x, weights) or any(not _is_ready(grad) for grad in grads):
        return None
    layers, rows, device = len(weights), x.size(0), x.device
    channels, features = weights[0].shape
    tile = backward_tile(rows, features, device)
    shares = shares_of(tile, layers, rows, features, channels, device)
    needs_x, needs_sums = needed[0], needed[1] or needed[2]
    grad_x = torch.empty_like(x) if needs_x else None
    found = partial = None
    count = layers * channels * (features + 1)
    if needs_sums:
        partial = x.new_empty((shares.splits, count))
        found = x.new_empty(count) if shares.splits > 1 else partial.view(count)
    x_blocks = shares.x_blocks if needs_x else 0
    blocks = x_blocks + (shares.weight_blocks if needs_sums else 0)
    tensors = (x, *_four(weights), *_four(grads), grad_x, partial)
    kernel = _kernel("backward", tile, layers, beside)
    _run(kernel, tile, blocks, (rows, features, channels, x_blocks, shares.rows), tensors, device)
    if found is None:
        return grad_x, (), ()
    if shares.splits > 1:
        grid = (-(-count // (4 * SUM_THREADS)), 1, 1)
        launch(_sums(), grid, (SUM_THREADS, 1, 1), addresses((count, shares.splits, partial, found)), device)
    of_weights, of_biases = found.split_with_sizes((count - layers * channels, layers * channels))
    return (
        grad_x,
        of_weights.view(layers, channels, features).unbind() if needed[1] else (),
        of_biases.view(layers, channels).unbind() if needed[2] else (),
    )


def _has_kernel(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the kernels take x and weights of one shape."""
    return (
        x.dtype is torch.float32
        and x.device.type in fused_device_types
        and len(weights) <= MAX_LAYERS
        and x.size(0) > 0
        and not (x.size(1) % 4 or weights[0].size(0) % 4)
        and not tf32_allowed(torch.float32)
        and _is_ready(x)
        and all(map(_is_ready, weights))
    )


def _is_ready(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def _four(tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return (*tensors, *(None,) * (MAX_LAYERS - len(tensors)))


@cache
def _kernel(name: str, tile: Tile, layers: int, beside: bool) -> Kernel:
    return kernel_of(Spec(f"products/{name}.cu", tile.constants(layers, beside)), f"products_{name}")


@cache
def _sums() -> Kernel:
    return kernel_of(Spec("products/sums.cu", (("STORAGE", 0), ("THREADS", SUM_THREADS))), "products_sums")


def _run(
    kernel: Kernel, tile: Tile, blocks: int, sizes: Sequence[int], tensors: Sequence[Any], device: torch.device
) -> None:
    arguments = addresses((*sizes, *tensors))
    launch(kernel, (blocks, 1, 1), (tile.threads, 1, 1), arguments, device, tile.shared_bytes)


def joined_product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What each layer makes of x, side by side, and the weights one below the other.

    Args:
        x: Shape [N, F].
        weights: L of them, each [K, F].
        biases: As many, each [K], or none.

    Returns:
        Shapes [N, L * K] and [L * K, F].
    """
    channels, features = weights[0].shape
    channels *= len(weights)
    # Weights and biases alike, side by side in one launch.
    joined = _flatten_dense_tensors((*weights, *biases))
    weight = joined.as_strided((channels, features), (features, 1))
    bias = joined.as_strided((channels,), (1,), channels * features) if biases else None
    return F.linear(x, weight, bias), weight


def product_gradients(
    x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], share: int, needed: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    """Gradients of x, of the weights and of the biases of products with x.

    Args:
        x: Shape [N, F].
        weights: Of each product, [share * K, F].
        grads: Of each result, [N, share * K].
        share: Layers that one product holds.
        needed: Whether x, any weight, any bias needs one; empty lists stand for those that do not.

    Returns:
        Of x, and of every layer [K, F] and [K].
    """
    grad_x, grad_weights, grad_biases = None, [], []
    if needed[0] and grads:
        grad_x = torch.mm(grads[0], weights[0])
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
    if needed[1]:
        grad_weights = [part for grad in grads for part in torch.mm(grad.t(), x).chunk(share)]
    if needed[2]:
        grad_biases = [part for grad in grads for part in _column_sums(grad).chunk(share)]
    return grad_x, grad_weights, grad_biases


def _column_sums(grad: Tensor) -> Tensor:
    """The sum over the rows."""
    # Of many rows a product is up to four times as fast on an H200; of few the host is slower than both.
    if grad.size(0) <= _FEW_ROWS:
        return grad.sum(0)
    return torch.mv(grad.t(), grad.new_ones(grad.size(0)))


def per_layer(found: Sequence[Any], used: Sequence[int], count: int) -> list[Any]:
    """What was found for the layers `used`, None for the others of `count`."""
    placed: list[Any] = [None] * count
    for index, each in zip(used, found):
        placed[index] = each
    return placed
