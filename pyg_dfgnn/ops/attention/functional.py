r"""Attention over the edges of a graph: scores, softmax over the in-edges of a target, dropout, weighted sum.

.. math::
    O_i = \sum_{j \in N(i)} D_{ij} \, \mathrm{softmax}_j(S_{ij}) \, v_{ij}

All scores share one set of kernels. Nothing of length E is saved for the backward pass: it recomputes the weights from
the statistics of each row. All functions run on CPU tensors and in float64 through the reference implementation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention.family import FAMILY, leaves_dout_dlogit, shares_edge_rows
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem, tf32_allowed
from pyg_dfgnn.dispatch.traversal import storage_reasons
from pyg_dfgnn.errors import check_range, check_shape, check_tensor, check_type
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.typed_rows import one_type
from pyg_dfgnn.ops.attention.launchers import InverseNorm, prepare
from pyg_dfgnn.ops.attention.program import gradients_again
from pyg_dfgnn.ops.core import GraphLike, Op, is_eager_on
from pyg_dfgnn.ops.function import makers
from pyg_dfgnn.ops.relational.linear import typed_linear
from pyg_dfgnn.ops.visits import is_refilled
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.settings import Settings
from pyg_dfgnn.statements.attention import statement_of
from pyg_dfgnn.statements.op import Precomputed
from pyg_dfgnn.statements.score import Score
from pyg_dfgnn.statements.scores import ADD, COSINE, DOT, GATV2, SCORES, SUPERGAT_MX, SUPERGAT_SD, register


def op_of(score: Score, labels: Mapping[str, str], edge_rows: bool = False) -> Op:
    """Return the op of attention with a score.

    Args:
        score: The score.
        labels: The user's names of inputs and numbers, by role.
        edge_rows: Whether edges have rows [E, D] that all heads share.
    """

    def problem(inputs: Mapping[str, Any], numbers: Mapping[str, float], heads: int, channels: int) -> AttentionProblem:
        value = inputs["value"]
        edge, dropout = inputs.get("edge"), numbers["dropout"] > 0.0
        tf32 = tf32_allowed(value.dtype)
        edge_channels = edge.shape[-1] if edge_rows and edge is not None else 0
        return AttentionProblem(
            *(score.name, heads, channels, value.dtype, value.device, edge is not None, dropout, tf32),
            edge_channels=edge_channels,
        )

    statement = statement_of(score, partial(_reference, score), labels, edge_rows)
    return Op(statement, FAMILY, problem, prepare, _derive, _optional, partial(gradients_again, score))


def _reference(
    score: Score,
    edge_index: Tensor,
    num_dst: int,
    inputs: Mapping[str, Any],
    numbers: Mapping[str, float],
    keep: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the attention and its weights in plain torch."""
    operands = dict(inputs)
    value, parameter = operands.pop("value"), operands.pop("parameter", None)
    if parameter is not None:
        parameter = parameter.to(value.dtype)
    scale, slope = numbers["scale"], numbers["slope"]
    return reference.edge_attention(
        score, edge_index, num_dst, value, parameter=parameter, scale=scale, slope=slope, keep=keep, **operands
    )


def _derive(derived: Precomputed, problem: AttentionProblem) -> Callable[[Tensor], Tensor]:
    """Return the function that computes the inverse norms of rows."""
    return InverseNorm(problem.heads, problem.channels, problem.dtype)


def _optional(problem: AttentionProblem, graph: Graph | None, settings: Settings) -> frozenset[str]:
    """Return the optional values that a forward pass leaves."""
    if graph is None:
        # Backward may run under other settings than the forward pass: what that leaves is not up to the plan.
        score = SCORES[problem.score]
        leaves = score.saves_dout_dlogit and not problem.edge and settings.schedule in ("auto", FAMILY.fallback)
    else:
        leaves = leaves_dout_dlogit(problem, graph, settings)
    return frozenset({"dout_dlogit"}) if leaves else frozenset()


_dot = op_of(DOT, {"target": "query"})
_dot_edge_rows = op_of(DOT, {"target": "query", "edge": "edge_attr"}, edge_rows=True)
_cosine = op_of(COSINE, {"target": "x_dst", "value": "x_src", "parameter": "beta"})
_add = op_of(
    ADD,
    {
        "target_scalars": "alpha_dst",
        "source_scalars": "alpha_src",
        "edge": "alpha_edge",
        "slope": "negative_slope",
    },
)
_gatv2 = op_of(GATV2, {"target": "x_dst", "value": "x_src", "parameter": "att", "slope": "negative_slope"})


_MANY_ROWS = 1 << 15
"""Rows from which torch takes longer for the gradient of a small matrix than kernels."""
_SUPERGAT = {"target": "x_dst", "value": "x_src", "slope": "negative_slope"}
_supergat_mx = op_of(SUPERGAT_MX, {**_SUPERGAT, "target_scalars": "alpha_dst", "source_scalars": "alpha_src"})
_supergat_sd = op_of(SUPERGAT_SD, _SUPERGAT)


_ops = {
    **{DOT: _dot, COSINE: _cosine, ADD: _add, GATV2: _gatv2},
    **{SUPERGAT_MX: _supergat_mx, SUPERGAT_SD: _supergat_sd},
}


def op_by_role(score: Score) -> Op:
    """Return the op of a score; the inputs of one stated outside the package go by their roles."""
    op = _ops.get(score)
    if op is None:
        # Of a copy that another process has made the one that is known.
        known = register(score)
        op = _ops[known] = _ops[score] = _ops.get(known) or op_of(known, {})
    return op


def _make(start: str) -> None:
    """Make the op of a score that was stated outside the package, if one has this name."""
    family, _, score = start.partition("/")
    if family == "attention" and score in SCORES:
        op_by_role(SCORES[score])


makers.append(_make)


def edge_attention(
    graph: GraphLike,
    score: Score,
    *,
    value: Tensor,
    target: Tensor | None = None,
    key: Tensor | None = None,
    target_scalars: Tensor | None = None,
    source_scalars: Tensor | None = None,
    parameter: Tensor | None = None,
    edge: Tensor | None = None,
    scale: float = 1.0,
    slope: float = 0.0,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    return_weights: bool = False,
    concat: bool = False,
    heads: int | None = None,
) -> Any:
    r"""Attention with any score, also one stated outside the package.

    .. math:: O_i = \sum_j D_{ij} \, \mathrm{softmax}_j(S_{ij}) \, v_{ij}

    Args:
        graph: The edges.
        score: The record of the score; what it does not take is None.
        value: Shape [N_src, H, C].
        target: Shape [N_dst, H, C].
        key: Shape [N_src, H, C].
        target_scalars: Shape [N_dst, H].
        source_scalars: Shape [N_src, H].
        parameter: Shape as the record states.
        edge: Shape [E, H, C] or [E, H] in the order of ``graph.edge_index``.
        scale: Factor of the logits, `in.scale` in the struct; read where the record names it in `numbers`.
        slope: Slope of a leaky ReLU, `in.slope` in the struct; likewise.
        dropout_p: Probability that an attention weight becomes 0.
        seed: Key of the dropout, int64 [1]; by default one is drawn from torch's generator.
        return_weights: Also return the weights after dropout [E, H].
        concat: Return the heads side by side.
        heads: Number of heads H of features given as [N, H * C].

    Returns:
        As :func:`dot_attention`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, device or range does not fit, or the score needs an input that is None.
    """
    check_type("score", score, Score, "a pyg_dfgnn.statements.scores.Score")
    by_role = {
        "target": target,
        "key": key,
        "target_scalars": target_scalars,
        "source_scalars": source_scalars,
        "parameter": parameter,
        "edge": edge,
    }
    scalars = score.node_scalars == "input"
    needed = {
        "target": score.target,
        "key": score.key,
        "target_scalars": scalars,
        "source_scalars": scalars,
        "parameter": score.parameter is not None,
    }
    for name, tensor in by_role.items():
        if needed.get(name, False) and tensor is None:
            raise ValueError(f"'{name}' needs a tensor for the score {score.name!r} (got None)")
        if tensor is not None and not needed.get(name, score.edge is not None):
            raise ValueError(f"'{name}' needs None for the score {score.name!r} (got a tensor)")
    op = op_by_role(score)
    every = {**by_role, "value": value, "seed": seed}
    tensors = tuple(every[name] for name in op.statement.input_names)
    numbers = float(scale), float(slope), float(dropout_p)
    return op(graph, tensors, numbers, heads=heads, concat=concat, with_edge_value=return_weights)


def dot_attention(
    graph: GraphLike,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    edge: Tensor | None = None,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_weights: bool = False,
    concat: bool = False,
    heads: int | None = None,
) -> Any:
    r"""Scaled dot-product attention over edges, :math:`S_{ij} = s\,\langle q_i, k_j + e_{ij} \rangle`.

    With :math:`e_{ij} = W a_{ij}` the terms of an edge are taken at its target, and no tensor [E, H, C] is made while W
    narrows rows: :math:`\langle q_i, W a_{ij} \rangle = \langle W^T q_i, a_{ij} \rangle` and
    :math:`\sum_j P_{ij} W a_{ij} = W \sum_j P_{ij} a_{ij}`.

    Args:
        graph: The edges.
        query: Shape [N_dst, H, C].
        key: Shape [N_src, H, C].
        value: Shape [N_src, H, C]; ``edge`` is added to it too.
        edge: The terms e, shape [E, H, C] in the order of ``graph.edge_index``.
        edge_attr: The rows a in place of e, shape [E, D] in that order.
        edge_weight: The matrix W, shape [H * C, D].
        scale: The factor s, 1 / sqrt(C) by default.
        dropout_p: Probability that an attention weight becomes 0.
        return_weights: Also return the weights.
        concat: Return the heads side by side.
        heads: Number of heads H of features given as [N, H * C].

    Returns:
        Shape [N_dst, H, C], with ``concat`` [N_dst, H * C]; with ``return_weights`` also the weights after dropout
        [E, H] in the order of ``graph.edge_index``; differentiable, except while torch.compile traces. The output may
        be edited in place, but for edits that torch does not count, as those through ``.data``.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, device or range does not fit.

    Source: Vaswani et al., "Attention Is All You Need" (2017); Shi et al., arXiv 2009.03509 (edge features).
    """
    if scale is None and isinstance(value, Tensor):
        width = value.size(-1) // heads if heads else value.size(-1)
        scale = 1.0 / math.sqrt(max(1, width))
    numbers: Any = (scale, 0.0, dropout_p)
    if edge_attr is not None or edge_weight is not None:
        if edge is not None:
            raise ValueError("'edge' needs None next to 'edge_attr' and 'edge_weight' (got a tensor)")
        weight, rows = _edge_matrix(value, edge_attr, edge_weight, heads)
        if shares_edge_rows(DOT, *weight.shape):
            projections: Sequence[Tensor] = (query, key, value)
            if heads is not None:
                heads_of = weight.shape[:2]
                projections = tuple(x.reshape(x.shape[0], *heads_of) if x.dim() == 2 else x for x in projections)
            return _dot_on_edge_rows(graph, projections, rows, weight, numbers, concat, return_weights)
        edge = torch.einsum("ed,hcd->ehc", rows, weight)
    tensors = (query, key, value, None, None, None, edge, None)
    return _dot(graph, tensors, numbers, heads=heads, concat=concat, with_edge_value=return_weights)


def _edge_matrix(value: Any, edge_attr: Any, edge_weight: Any, heads: int | None) -> tuple[Tensor, Tensor]:
    """Return the checked matrix [H, C, D] and rows [E, D] of edges, in one dtype."""
    for name, tensor in (("value", value), ("edge_attr", edge_attr), ("edge_weight", edge_weight)):
        check_tensor(name, tensor)
    check_shape("edge_attr", edge_attr, ("E", "D"), "[E, D]")
    if value.dim() < 2 or (heads is None and value.dim() != 3):
        check_shape("value", value, ("N_src", "H", "C"), "[N_src, H, C]")
    heads = value.shape[1] if heads is None else heads
    width, edge_channels = value.shape[1:].numel(), edge_attr.shape[1]
    check_shape("edge_weight", edge_weight, (width, edge_channels), f"[H * C={width}, D={edge_channels}]")
    weight = edge_weight.reshape(heads, width // heads if heads else 0, edge_channels)
    return weight.to(value.dtype), edge_attr


def _by_head(graph: GraphLike, rows: Tensor, weight: Tensor, transposed: bool = False) -> Tensor:
    """Return the products [N_dst, H, D] of rows [N_dst, H, C] and the matrix [H, C, D] of each head, or the other way.

    torch sums the gradient of a small matrix over all rows in few thread blocks: of many rows that takes longer than
    the attention, and of few less time than the host for kernels.
    """
    if not is_eager_on(graph) or storage_reasons(rows.dtype, rows.device):
        return torch.einsum("nhd,hcd->nhc" if transposed else "nhc,hcd->nhd", rows, weight)
    if rows.shape[0] < _MANY_ROWS and not is_refilled():
        # As kernels do, in the dtype of the rows.
        with torch.autocast(rows.device.type, enabled=False):
            return torch.bmm(rows.transpose(0, 1), weight.mT if transposed else weight).transpose(0, 1)
    return typed_linear(one_type(graph, rows.shape[0]), rows, weight.unsqueeze(0), transposed=transposed)


def _dot_on_edge_rows(
    graph: GraphLike,
    projections: Sequence[Tensor],
    rows: Tensor,
    weight: Tensor,
    numbers: tuple[float, float, float],
    concat: bool,
    return_weights: bool,
) -> Any:
    """Return the attention with edge terms `weight` [H, C, D] times `rows` [E, D], taken at the targets.

    Args:
        graph: The edges.
        projections: Query, key and value [N, H, C].
        rows: Shape [E, D].
        weight: Shape [H, C, D].
        numbers: Scale, slope and dropout.
        concat: Return the heads side by side.
        return_weights: Also return the weights.
    """
    query, key, value = projections
    heads, channels, _ = weight.shape
    sizes = graph.num_dst, heads, channels
    check_shape("query", query, sizes, "[N_dst={}, H={}, C={}]".format(*sizes))
    edge_target = _by_head(graph, query, weight)
    tensors = (query, key, value, None, None, None, rows, edge_target, None)
    result = _dot_edge_rows(graph, tensors, numbers, with_edge_value=return_weights)
    (out, edge_out), weights = result if return_weights else (result, None)
    out = out + _by_head(graph, edge_out, weight.to(edge_out.dtype), transposed=True)
    out = out.flatten(1) if concat else out
    return (out, weights) if return_weights else out


def cosine_attention(
    graph: GraphLike,
    x_src: Tensor,
    x_dst: Tensor | None = None,
    *,
    beta: Tensor | float,
    dropout_p: float = 0.0,
    return_weights: bool = False,
    concat: bool = False,
    heads: int | None = None,
) -> Any:
    r"""Cosine attention, :math:`S_{ij} = \beta \cos(x_i, x_j)`, that sums the un-normalised source rows.

    Args:
        graph: The edges.
        x_src: Shape [N_src, H, C].
        x_dst: Shape [N_dst, H, C]; ``x_src`` by default.
        beta: Scalar tensor of one element, or a number.
        dropout_p: Probability that an attention weight becomes 0.
        return_weights: Also return the weights.
        concat: As in :func:`dot_attention`.
        heads: As in :func:`dot_attention`.

    Returns:
        As :func:`dot_attention`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, device or range does not fit.

    Source: Thekumparampil et al., "Attention-based Graph Neural Network" (arXiv 1803.03735).
    """
    if not isinstance(beta, Tensor):
        check_range("beta", beta)
        beta = torch.full((1,), float(beta), dtype=torch.float32, device=x_src.device)
    shared = (x_dst is None or x_dst is x_src) and graph.num_dst == graph.num_src
    tensors = (None if shared else x_dst, None, x_src, beta, None, None)
    numbers = (1.0, 0.0, dropout_p)
    return _cosine(graph, tensors, numbers, heads=heads, concat=concat, shared=shared, with_edge_value=return_weights)


def add_attention(
    graph: GraphLike,
    value: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor | None = None,
    *,
    alpha_edge: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout_p: float = 0.0,
    return_weights: bool = False,
    concat: bool = False,
    heads: int | None = None,
) -> Any:
    r"""Additive attention, :math:`S_{ij} = \mathrm{LeakyReLU}(r_j + l_i + t_{ij})`.

    Args:
        graph: The edges.
        value: Shape [N_src, H, C].
        alpha_src: The terms r, shape [N_src, H].
        alpha_dst: The terms l, shape [N_dst, H]; zero when absent.
        alpha_edge: The terms t, shape [E, H] in the order of ``graph.edge_index``.
        negative_slope: Slope of the LeakyReLU below 0.
        dropout_p: Probability that an attention weight becomes 0.
        return_weights: Also return the weights.
        concat: As in :func:`dot_attention`.
        heads: As in :func:`dot_attention`.

    Returns:
        As :func:`dot_attention`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, device or range does not fit.

    Source: Velickovic et al., "Graph Attention Networks" (arXiv 1710.10903).
    """
    if alpha_dst is None and isinstance(alpha_src, Tensor) and alpha_src.dim() == 2:
        alpha_dst = torch.zeros((graph.num_dst, alpha_src.shape[1]), dtype=alpha_src.dtype, device=alpha_src.device)
    tensors = (None, None, value, alpha_dst, alpha_src, None, alpha_edge, None)
    numbers = (1.0, negative_slope, dropout_p)
    return _add(graph, tensors, numbers, heads=heads, concat=concat, with_edge_value=return_weights)


def gatv2_attention(
    graph: GraphLike,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    *,
    edge: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout_p: float = 0.0,
    return_weights: bool = False,
    concat: bool = False,
    heads: int | None = None,
    exact: bool = False,
) -> Any:
    r"""GATv2 attention, :math:`S_{ij} = \langle a, \mathrm{LeakyReLU}(l_i + r_j + e_{ij}) \rangle`.

    Args:
        graph: The edges.
        x_src: The source rows r, shape [N_src, H, C]; they are also the values.
        x_dst: The target rows l, shape [N_dst, H, C].
        att: The vector a, shape [H, C] or [1, H, C].
        edge: Shape [E, H, C] in the order of ``graph.edge_index``.
        negative_slope: Slope of the LeakyReLU below 0.
        dropout_p: Probability that an attention weight becomes 0.
        return_weights: Also return the weights.
        concat: As in :func:`dot_attention`.
        heads: As in :func:`dot_attention`.
        exact: Return the attention of features in 16 bits in float32, as it was summed, without weights and while
            nothing traces.

    Returns:
        As :func:`dot_attention`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, device or range does not fit.

    Source: Brody et al., "How Attentive are Graph Attention Networks?" (arXiv 2105.14491).
    """
    tensors = (x_dst, None, x_src, None, None, att, edge, None)
    numbers = (1.0, negative_slope, dropout_p)
    return _gatv2(graph, tensors, numbers, heads=heads, concat=concat, with_edge_value=return_weights, exact=exact)


def supergat_attention(
    graph: GraphLike,
    x_src: Tensor,
    x_dst: Tensor,
    alpha_src: Tensor | None = None,
    alpha_dst: Tensor | None = None,
    *,
    scale: float = 1.0,
    negative_slope: float = 0.2,
    dropout_p: float = 0.0,
    return_weights: bool = False,
    concat: bool = False,
    heads: int | None = None,
) -> Any:
    r"""SuperGAT attention that sums the source rows, in one of two modes.

    With the terms l and r of nodes :math:`S_{ij} = \mathrm{LeakyReLU}((l_i + r_j) \, \sigma(\langle x_i, x_j \rangle))`
    ("MX"), without them :math:`S_{ij} = \mathrm{LeakyReLU}(s \, \langle x_i, x_j \rangle)` ("SD").

    Args:
        graph: The edges.
        x_src: Shape [N_src, H, C].
        x_dst: Shape [N_dst, H, C].
        alpha_src: The terms r, shape [N_src, H]; None for "SD".
        alpha_dst: The terms l, shape [N_dst, H]; None for "SD".
        scale: The factor s of "SD".
        negative_slope: Slope of the LeakyReLU below 0.
        dropout_p: Probability that an attention weight becomes 0.
        return_weights: Also return the weights.
        concat: As in :func:`dot_attention`.
        heads: As in :func:`dot_attention`.

    Returns:
        As :func:`dot_attention`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, device or range does not fit, or one of the terms is None and the other is not.

    Source: Kim and Oh, "How to Find Your Friendly Neighborhood" (ICLR 2021).
    """
    if (alpha_src is None) != (alpha_dst is None):
        name, term = ("alpha_src", "alpha_dst") if alpha_src is None else ("alpha_dst", "alpha_src")
        raise ValueError(f"'{name}' needs a tensor next to '{term}' (got None)")
    op = _supergat_sd if alpha_src is None else _supergat_mx
    tensors = (x_dst, None, x_src, alpha_dst, alpha_src, None, None, None)
    numbers = (scale, negative_slope, dropout_p)
    return op(graph, tensors, numbers, heads=heads, concat=concat, with_edge_value=return_weights)
