r"""Group functions for layers beyond :func:`pyg_dfgnn.ops.segment.aggregate`: sizes, a softmax, extremes of segments.

The groups of rows are the graph of an index or of offsets, whose sources are the rows in their order.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.core import GraphLike
from pyg_dfgnn.ops.eager import differentiable
from pyg_dfgnn.ops.segment import aggregate, of_degrees


def degree(graph: GraphLike) -> Tensor:
    """Return the number of edges of each target, float32 [N_dst]; a graph whose edges stay keeps it."""
    return of_degrees(graph, "degree", "targets", lambda counts: counts)


def _at_rows(graph: Graph, values: Tensor) -> Tensor:
    """Return the values [G, F] of the group of each row, [E, F]."""
    return values.index_select(0, graph.csc.col)


def _total(graph: Graph, powers: Tensor) -> Tensor:
    return aggregate(graph, powers, "sum") + 1e-16


def _of_powers(graph: Graph, grad: Tensor, powers: Tensor, total: Tensor) -> Tensor:
    # Float32, in which the difference of two gradients keeps its digits.
    inner = aggregate(graph, powers.float() * grad, "sum") / total
    return ((grad - _at_rows(graph, inner)) / _at_rows(graph, total)).to(powers.dtype)


def _again(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    powers, _ = ctx.saved_tensors
    return None, _of_powers(ctx.graph, grad, powers, _total(ctx.graph, powers))


class _Shares(Function):
    """(graph, powers) to their shares of the sum of their group."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, powers: Tensor) -> Tensor:
        total = _total(graph, powers)
        ctx.graph = graph
        ctx.save_for_backward(powers, total)
        return powers / _at_rows(graph, total)

    @staticmethod
    @differentiable(_again)
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, _of_powers(ctx.graph, grad, *ctx.saved_tensors)


def softmax(graph: Graph, x: Tensor) -> Tensor:
    r"""Softmax over the rows of each group, channel by channel.

    .. math:: o_e = \exp(x_e - m_g) / (\sum_{f \in g} \exp(x_f - m_g) + 10^{-16}), \quad m_g = \max_{f \in g} x_f

    Two reductions and two gathers forward, one reduction and two gathers backward.

    Args:
        graph: The groups.
        x: Shape [E, F].

    Returns:
        Shape [E, F].
    """
    powers = (x - _at_rows(graph, aggregate(graph, x.detach(), "max"))).exp()
    return _Shares.apply(graph, powers)  # type: ignore[no-any-return, no-untyped-call]


class _SegmentExtreme(Function):
    @staticmethod
    def forward(ctx: Any, graph: Graph, x: Tensor, stat: str) -> Tensor:
        out = aggregate(graph, x, stat)
        ctx.graph = graph
        ctx.save_for_backward(x, out)
        return _without_infinities(out)

    @staticmethod
    @differentiable()
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, out = ctx.saved_tensors
        ties = (x == _at_rows(ctx.graph, out)).logical_or_(x.isnan())
        # Half precision would not count beyond 2048 ties.
        count = aggregate(ctx.graph, ties.float(), "sum").clamp(min=1)
        # Torch divides no negative gradient.
        share = torch.where(grad > 0, grad / count, grad).masked_fill_(out.isinf(), 0.0)
        return None, ties * _at_rows(ctx.graph, share.to(x.dtype)), None


def _without_infinities(out: Tensor) -> Tensor:
    return torch.where(out.isinf(), 0.0, out)


def segment_extreme(graph: Graph, x: Tensor, stat: str) -> Tensor:
    """Maxima or minima of groups as PyG has them for offsets: those of `torch.segment_reduce`, and 0 for an infinity.

    Ties, which in a group with NaNs are the NaNs, share a positive gradient evenly, and each gets a negative one in
    full. `scatter_reduce`, which :func:`~pyg_dfgnn.ops.segment.aggregate` follows, divides both, and gives a part of
    the gradient of a 0 to its initial zeros.

    Args:
        graph: The groups.
        x: Shape [E, F].
        stat: "max" or "min".

    Returns:
        Shape [G, F].
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _SegmentExtreme.apply(graph, x, stat)  # type: ignore[no-any-return, no-untyped-call]
    return _without_infinities(aggregate(graph, x, stat))
