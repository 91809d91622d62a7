"""The products of several linear layers of one input, as one, and their gradients."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._utils import _flatten_dense_tensors

MAX_ROWS = 1 << 15
"""Rows of which a product takes about as long as the host needs to launch it."""
_FEW_ROWS = 1 << 12


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
