"""The linear layers in front of an attention: projections of one input, and the attention among them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn import dense

from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.nn.dense import torch_linear
from pyg_dfgnn.nn.dense.linear import Linear
from pyg_dfgnn.nn.gate import is_plain_layer, is_product, promoted_dtype, settle
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.ops.attention.projected import USED, projected_attention
from pyg_dfgnn.ops.eager import is_eager, is_plain

_LINEAR = (dense.Linear, Linear, torch.nn.Linear, torch_linear.Linear)
_Parameters = tuple[list[Tensor], list[Tensor], torch.dtype | None]


def project(x: Tensor, heads: int | None, *layers: torch.nn.Module) -> Sequence[Tensor]:
    """Return what each linear layer makes of `x`, with the channels divided into heads or not.

    Plain layers of one shape share a node of autograd, see :func:`pyg_dfgnn.ops.gemm.project`. Under autocast x and the
    parameters are cast once for all layers.

    Args:
        x: Shape [N, F].
        heads: The number H of heads; None to leave the channels undivided.
        layers: Linear layers of H * C channels; others, and those with hooks, are called one by one.

    Returns:
        As many tensors [N, H, C], or [N, H * C] undivided.
    """
    parameters = None
    # The host calls one layer in less time than it plans a launch.
    if len(layers) > 1 or (is_eager() and _is_large(x, getattr(layers[0], "out_channels", 0))):
        parameters = parameters_of(x, layers)
    return _project(x, heads, layers, parameters)


def _is_large(x: Tensor, channels: int) -> bool:
    """Return whether the product of x [N, F] with a weight [K, F] takes longer than the host needs to launch it."""
    return x.size(0) > gemm.MAX_ROWS or x.numel() * channels > gemm.MAX_MULTIPLICATIONS


def attend(
    score: str,
    attention: Callable[..., Any],
    graph: Graph | EdgeSet,
    heads: int,
    inputs: Sequence[tuple[Tensor, Sequence[torch.nn.Module]]],
    *vectors: Tensor,
    edge: Mapping[str, Tensor] | None = None,
    return_weights: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Sequence[Tensor]]:
    """Return the attention among linear projections, in PyG's dtype.

    Projections of one small node set and their attention share a node of autograd and few launches
    (:func:`~pyg_dfgnn.ops.attention.projected.projected_attention`): projecting first costs such a graph's host more.

    Args:
        score: Name of the score.
        attention: Its function, which takes the graph, the projections and the vectors.
        graph: The edges.
        heads: The number H of heads.
        inputs: Each x [N, F] with its layers, whose results are the projections in turn; one result fills every role.
        vectors: Parameters of the score.
        edge: Arguments of the score for the features of the edges.
        return_weights: Whether the weights are wanted.
        options: Further arguments of the score.

    Returns:
        The attention, its weights [E, H] or None, and what each further layer gives, [N, H * C].
    """
    x, layers = inputs[0]
    roles = USED[score]
    if len(inputs) == 1 and len(layers) > 1:
        parameters = parameters_of(x, layers)
        if parameters is not None and not edge and not return_weights:
            results = _attend_at_once(score, graph, heads, x, parameters, vectors, options)
            if results is not None:
                return results[0], None, results[1:]
        rows = _project(x, heads, layers, parameters)
    else:
        rows = [row for x, layers in inputs for row in project(x, heads, *layers)]
    used = rows[:roles] if len(rows) > 1 else [rows[0]] * roles
    out = attention(graph, *used, *vectors, return_weights=return_weights, **options, **(edge or {}))
    out, weights = out if return_weights else (out, None)
    other = vectors[0] if vectors else used[1]
    dtype = promoted_dtype(used[0].dtype, other.dtype, used[0].is_cuda)
    return (
        settle(out, dtype, False),
        None if weights is None else weights.to(dtype),
        [other.flatten(1) for other in rows[roles:]],
    )


def _attend_at_once(
    score: str,
    graph: Graph | EdgeSet,
    heads: int,
    x: Tensor,
    parameters: _Parameters,
    vectors: Sequence[Tensor],
    options: dict[str, Any],
) -> Sequence[Tensor] | None:
    """Return the attention and what each further layer gives under one node of autograd; None where it does not pay."""
    weights, biases, dtype = parameters
    vector = vectors[0] if vectors else None
    out_dtype = None
    if dtype is not None:
        out_dtype = promoted_dtype(dtype, dtype if vector is None else vector.dtype, x.is_cuda)
        if out_dtype not in (dtype, torch.float32):
            return None
    elif vector is not None and vector.dtype is not x.dtype:
        return None
    return projected_attention(
        graph, score, x, weights, biases, heads, parameter=vector, dtype=dtype, out_dtype=out_dtype, **options
    )


def _project(
    x: Tensor, heads: int | None, layers: Sequence[torch.nn.Module], parameters: _Parameters | None
) -> Sequence[Tensor]:
    if parameters is not None:
        weights, biases, dtype = parameters
        return gemm.project(x, weights, biases, heads, dtype)
    results = []
    for layer in layers:
        rows = layer(x)
        results.append(rows if heads is None else rows.view(*rows.shape[:-1], heads, rows.size(-1) // heads))
    return results


def is_plain_linear(layer: torch.nn.Module) -> bool:
    """Return whether calling the layer is a product with its weight and nothing else."""
    return is_plain_layer(layer, _LINEAR)


def parameters_of(x: Tensor, layers: Sequence[torch.nn.Module]) -> _Parameters | None:
    """Return the parameters of layers that are products with matrices of one shape, which nothing watches or changes.

    Returns:
        The weights; as many biases, or none; the dtype that autocast has for the products, None without autocast. The
        whole is None where calling a layer may be more than its product.
    """
    if not is_eager() or not is_plain(x) or x.layout is not torch.strided or _has_any_global_hook():
        return None
    # Gradients of complex numbers are conjugate.
    if not x.is_floating_point():
        return None
    cast = None
    dtype: torch.dtype | None = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        cast = torch.get_autocast_dtype(x.device.type)
        dtype = _dtype_under_autocast(cast, x, layers[0])
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for layer in layers:
        if not is_product(layer, _LINEAR):
            return None
        parameters: Any = layer._parameters
        weight, bias = parameters["weight"], parameters["bias"]
        if weight.dtype is not dtype or weight.device != x.device or (weights and weight.shape != weights[0].shape):
            return None
        weights.append(weight)
        if bias is not None:
            # PyG broadcasts a bias of one element, and refuses those of another shape.
            if bias.dtype is not dtype or bias.shape != weight.shape[:1]:
                return None
            biases.append(bias)
    return (weights, biases, cast) if len(biases) in (0, len(weights)) else None


def _dtype_under_autocast(cast: torch.dtype, x: Tensor, layer: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype that all parameters need where autocast casts these and x; None where it may not."""
    # Autocast leaves float64 alone.
    dtypes = cast, torch.float32
    if cast.itemsize != 2 or type(layer) not in _LINEAR:
        return None
    weight = layer._parameters.get("weight")
    return weight.dtype if weight is not None and weight.dtype in dtypes and x.dtype in dtypes else None
