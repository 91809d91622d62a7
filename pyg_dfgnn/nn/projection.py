"""Linear layers of one input under one node of autograd, of few rows also as one product."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn.dense.linear import Linear

from pyg_dfgnn.ops.eager import PLAIN, apply_of, is_eager, needs_grad, once_differentiable

# Rows of which a product takes about as long as the host needs to launch it.
_MAX_ROWS = 1 << 15
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def project(x: Tensor, heads: int, *layers: torch.nn.Module) -> Sequence[Tensor]:
    r"""What each linear layer makes of `x`, with the heads apart.

    .. math::
        Y_l = X W_l^T + b_l, \quad
        \partial X = \sum_l \partial Y_l W_l, \quad
        \partial W_l = \partial Y_l^T X, \quad
        \partial b_l = \partial Y_l^T 1

    Plain layers of one shape share a node of autograd, which sums the gradient of `x` inside the products. Of few rows
    each of these lines is one product for all layers, since launches take longer there than their work.

    Args:
        x: Shape [N, F].
        heads: The number H of heads that the channels of a layer divide into.
        layers: PyG's `Linear` of H * C channels; others, and those with hooks, are called one by one.

    Returns:
        As many tensors [N, H, C].
    """
    if not _are_plain(x, layers):
        return [_apart(layer(x), heads) for layer in layers]
    weights = [layer._parameters["weight"] for layer in layers]
    biases = [layer._parameters["bias"] for layer in layers]
    if biases[0] is None:
        biases = []
    tensors: list[Any] = weights + biases
    if needs_grad((x, *tensors)):
        return _apply((heads, len(layers)), x, *tensors)
    return _forward(heads, x, weights, biases)[0]


def _apart(rows: Tensor, heads: int) -> Tensor:
    """The channels [..., H * C] as [..., H, C]."""
    return rows.view(*rows.shape[:-1], heads, rows.size(-1) // heads)


def _are_plain(x: Tensor, layers: Sequence[torch.nn.Module]) -> bool:
    """Whether the layers are products with matrices of one shape, and nothing watches or changes them."""
    if type(x) not in PLAIN or x.layout is not torch.strided or not is_eager():
        return False
    if torch.is_autocast_enabled(x.device.type) or not all(map(is_plain_linear, layers)):
        return False
    first = layers[0]._parameters
    shape, unbiased = first["weight"].shape, first["bias"] is None  # type: ignore[union-attr]
    for layer in layers[1:]:
        own = layer._parameters
        if own["weight"].shape != shape or (own["bias"] is None) != unbiased:  # type: ignore[union-attr]
            return False
    return True


def _forward(
    heads: int, x: Tensor, weights: list[Any] | tuple[Tensor, ...], biases: list[Any] | tuple[Tensor, ...]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The results, and the weights for backward: of few rows one below the other."""
    count, rows = len(weights), x.size(0)
    if rows > _MAX_ROWS:
        layers = zip(weights, biases or [None] * count, strict=True)
        return [_apart(F.linear(x, weight, bias), heads) for weight, bias in layers], weights
    # Side by side in one launch, weights and biases alike.
    width, length = weights[0].size(0), weights[0].numel()
    joined = _flatten_dense_tensors((*weights, *biases))
    weight = joined[: count * length].view(count * width, -1)
    out = F.linear(x, weight, joined[count * length :] if biases else None)
    apart = out.view(rows, count, heads, width // heads).transpose(0, 1).contiguous()
    return apart.unbind(), (weight,)


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rest: tuple[int, int], x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        heads, count = rest
        found, weights = _forward(heads, x, tensors[:count], tensors[count:])
        ctx.save_for_backward(x, *weights)
        # A layer whose result nothing reads gets no gradient, rather than one of zeros.
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        count, shape = len(grads), (x.size(0), weights[0].size(0))
        used = [index for index, grad in enumerate(grads) if grad is not None]
        if len(weights) == 1 and len(used) == count:
            # One weight has the rows of all layers.
            given = [torch.stack(grads, 1).view(shape)]  # type: ignore[arg-type]
        else:
            weights = weights if len(weights) == count else list(weights[0].chunk(count))
            weights = [weights[index] for index in used]
            given = [grads[index].flatten(1) for index in used]  # type: ignore[union-attr]
        grad_x = None
        if ctx.needs_input_grad[1] and given:
            grad_x = given[0] @ weights[0]
            for grad, weight in zip(given[1:], weights[1:], strict=True):
                grad_x.addmm_(grad, weight)
        needed, share = ctx.needs_input_grad[2:], len(used) // max(1, len(given))
        found: list[Any] = [None] * len(needed)
        if any(needed[:count]):
            parts = [part for grad in given for part in (grad.t() @ x).chunk(share)]
            for index, part in zip(used, parts, strict=True):
                found[index] = part
        if any(needed[count:]):
            # Up to four times as fast as a sum over the rows, on an H200.
            ones = x.new_ones(shape[0])
            parts = [part for grad in given for part in torch.mv(grad.t(), ones).chunk(share)]
            for index, part in zip(used, parts, strict=True):
                found[count + index] = part
        return None, grad_x, *found


_apply = apply_of(_Projection)


def is_plain_linear(layer: torch.nn.Module) -> bool:
    """Whether calling the layer is a product with its weight and nothing else."""
    own = layer.__dict__
    return (
        type(layer) is Linear
        # Pruning, weight normalisation and replicas keep the weight elsewhere.
        and type(layer._parameters.get("weight")) in PLAIN
        and "bias" in layer._parameters
        and "forward" not in own
        and not any([own[name] for name in _HOOKS])
        and not _has_any_global_hook()
    )
