"""Attention among linear projections of one node set, which lie side by side: few launches for small graphs."""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention.problem import tf32_allowed
from pyg_dfgnn.dispatch.core import AttentionProblem, unsupported_reasons
from pyg_dfgnn.errors import check_range
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.ops.attention.arguments import (
    Edges,
    check_tensor,
    draw_seed,
    in_float32,
    recall,
    remember,
    signature_of,
)
from pyg_dfgnn.ops.attention.autograd import is_rounded, unedited
from pyg_dfgnn.ops.attention.launch import Kernels, aligned, launch_backward, launch_forward
from pyg_dfgnn.ops.eager import apply_of, needs_grad, once_differentiable

PROJECTED = {"dot": (0, 1, 2), "gatv2": (1, None, 0)}
"""Which projections of the nodes are target, key and value, by score."""
USED = {score: sum(place is not None for place in places) for score, places in PROJECTED.items()}
"""How many projections of the nodes each score reads."""


def _roles(score: str, rows: Tensor, projections: int, heads: int) -> list[Any]:
    """Target, key and value in rows [N, projections * H * C], as kernels take them: on a GPU their addresses."""
    count, width = rows.shape
    width //= projections
    if rows.is_cuda:
        first, step = rows.data_ptr(), width * rows.itemsize
        return [0 if place is None else first + place * step for place in PROJECTED[score]]
    apart = rows.view(count, projections, heads, width // heads).unbind(1)
    return [None if place is None else apart[place] for place in PROJECTED[score]]


def _ready_in(
    kernels: Kernels,
    rows: Tensor,
    projections: int,
    parameter: Tensor | None,
    seed: Tensor | None,
    numbers: tuple[float, float, float],
) -> tuple[Any, ...]:
    """The :class:`~pyg_dfgnn.ops.attention.launch.Inputs` that lie in rows, as kernels take them."""
    roles = _roles(kernels.problem.score, rows, projections, kernels.problem.heads)
    if rows.is_cuda:
        vector, key = 0 if parameter is None else parameter.data_ptr(), 0 if seed is None else seed.data_ptr()
        return (*roles, 0, 0, vector, 0, key, *numbers)
    return (*roles, None, None, parameter, None, seed, *numbers)


def _others(score: str, rows: Tensor, projections: int) -> Sequence[Tensor]:
    """The projections that are neither target nor key nor value, [N, H * C]."""
    used = USED[score]
    return rows.chunk(projections, 1)[used:] if projections > used else ()


Projected = tuple[Kernels, Graph, int, bool, tuple[float, float, float], bool]
"""Kernels, edges, number of projections, whether heads are to be side by side; scale, slope and dropout; whether the
attention is to be in float32 where the projections are not."""


def _attend(
    rest: Projected,
    seed: Tensor | None,
    x: Tensor,
    parameter: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    saved: bool,
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], Tensor, Tensor, Sequence[Tensor]]:
    """The attention among the projections of x, its softmax, and a copy of it where backward needs one.

    Then x in the dtype of the projections, these, and their weights for backward.
    """
    kernels, _, count, concat, numbers, wide = rest
    dtype = kernels.problem.dtype
    if x.dtype is not dtype:
        x = x.to(dtype)
    rows, kept = gemm.interleaved(x, weights, biases)
    ready = _ready_in(kernels, rows, count, parameter, seed, numbers)
    return _launch(kernels, rows, ready, concat, wide, saved), x, rows, kept


def _launch(
    kernels: Kernels, rows: Tensor, ready: Sequence[Any], concat: bool, wide: bool, saved: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The attention, in float32 if it is to be wide; the softmax; the attention as it was before it was rounded."""
    nodes, heads, channels = rows.shape[0], kernels.problem.heads, kernels.problem.channels
    out = rows.new_empty((nodes, heads * channels) if concat else (nodes, heads, channels))
    exact = wide or (saved and is_rounded(rows))
    out, softmax, copy, _ = launch_forward(kernels, ready, out, nodes, saved=saved, exact=exact)
    if wide:
        assert copy is not None
        return copy, softmax, None
    return out, softmax, copy


class _ProjectedAttention(torch.autograd.Function):
    """Linear layers of x side by side, and fused attention among their results where they lie.

    Takes the weights and biases of the layers. Returns the output, with ``concat`` of the shape [N, H * C], and what
    the layers beyond those of the attention give, [N, H * C].
    """

    @staticmethod
    def forward(
        ctx: Any,
        rest: Projected,
        seed: Tensor | None,
        x: Tensor,
        parameter: Tensor | None,
        *layers: Tensor,
    ) -> tuple[Tensor, ...]:
        count = rest[2]
        weights, biases = layers[:count], layers[count:]
        ctx.rest, ctx.x_dtype = rest, x.dtype
        if x.requires_grad and x.dtype is not rest[0].problem.dtype:
            ctx.cast_from = ref(x)
        (out, softmax, copy), x, rows, kept = _attend(rest, seed, x, parameter, weights, biases, True)
        # As in _Attention.
        ctx.out = (out.detach(), out._version) if copy is None else None
        ctx.save_for_backward(x, parameter, seed, copy, softmax, rows, *kept)
        ctx.layers = layers
        ctx.set_materialize_grads(False)
        return out, *_others(rest[0].problem.score, rows, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, *grad_others: Tensor | None) -> tuple[Any, ...]:
        kernels, graph, count, concat, numbers, wide = ctx.rest
        x, parameter, seed, out, softmax, rows, *weights = ctx.saved_tensors
        # Hooks of saved tensors may give them back elsewhere.
        rows, parameter = aligned(rows), None if parameter is None else aligned(parameter)
        score, heads = kernels.problem.score, kernels.problem.heads
        grads = torch.empty_like(rows)
        grad_parameter = None
        if grad_out is None:
            ctx.out = None
            grads.zero_()
        else:
            ready = _ready_in(kernels, rows, count, parameter, seed, numbers)
            if out is None:
                out = unedited(ctx)
            if out is None:
                out = _launch(kernels, rows, ready, concat, wide, False)[0]
            if grad_out.dtype is not rows.dtype:
                grad_out = grad_out.to(rows.dtype)
            into = (*_roles(score, grads, count, heads), None, None)
            grad_parameter = launch_backward(kernels, graph, ready, out, softmax, grad_out, into, parameter=parameter)
        for other, grad in zip(_others(score, grads, count), grad_others, strict=True):
            if grad is None:
                other.zero_()
            else:
                other.copy_(grad)
        _, _, needs_x, _, *needed = ctx.needs_input_grad
        wanted = needs_x, any(needed[:count]), any(needed[count:])
        grad_x, of_layers = gemm.gradients(x, count, weights, ctx.layers, (grads,), wanted, ctx.x_dtype)
        return None, None, grad_x, grad_parameter, *of_layers


_apply = apply_of(_ProjectedAttention)


def projected_attention(
    graph: Edges,
    score: str,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    heads: int,
    *,
    parameter: Tensor | None = None,
    scale: float = 1.0,
    negative_slope: float = 0.0,
    dropout_p: float = 0.0,
    concat: bool = False,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...] | None:
    r"""Attention among linear projections of one node set, under one node of autograd.

    With :math:`Y_l = X W_l^T + b_l`: for "dot" the first three are query, key and value of :func:`dot_attention`, for
    "gatv2" the first two are source and target rows of :func:`gatv2_attention`. One product makes them side by side,
    and kernels read them and write their gradients there, so that a small graph takes few launches.

    Args:
        graph: The edges, among N nodes.
        score: "dot" or "gatv2".
        x: Shape [N, F].
        weights: Each [H * C, F], all of one dtype: that of ``x`` unless ``dtype`` is given.
        biases: As many, each [H * C], or none.
        heads: The number H of heads.
        parameter: The vector of "gatv2", as there.
        scale: The factor of "dot".
        negative_slope: As in :func:`gatv2_attention`.
        dropout_p: Probability that an attention weight becomes 0.
        concat: Return the heads side by side.
        dtype: That of the projections, to which ``x``, weights and biases are cast; None for their own.
        out_dtype: That of the attention, float32 or that of the projections; None for the latter.

    Returns:
        The attention [N, H, C], with ``concat`` [N, H * C], then of each further layer [N, H * C]. None where the
        projections are better made apart: rows are many, a tensor is traced or a subclass, no kernel takes them, or a
        pass is none of `row_split`.

    Raises:
        TypeError: ``parameter`` has the wrong dtype.
        ValueError: A range, or the shape or device of ``parameter``, does not fit.
    """
    vectors = () if parameter is None else (parameter,)
    if x.shape[0] > gemm.MAX_ROWS:
        return None
    numbers = scale, negative_slope, dropout_p
    trained = needs_grad((x, *vectors, *weights, *biases))
    plan = score, numbers, heads, len(weights), trained, dtype
    if dtype is None:
        signature = signature_of(graph, "projected", plan, (x, weights[0]), vectors)
    else:
        signature = signature_of(graph, "projected", plan, (x,), (weights[0], *vectors))
    if signature is None:
        return None
    assert isinstance(graph, Graph)
    kernels = recall(graph, signature)
    if kernels is None:
        found = _projected_kernels(graph, score, x, weights, parameter, heads, numbers, trained, dtype or x.dtype)
        if found is None:
            return None
        kernels, final = found
        if final:
            remember(graph, signature, kernels)
    count = len(weights)
    if kernels.projections != count:
        return None
    seed = draw_seed(x.device) if dropout_p > 0.0 else None
    vector = None if parameter is None else aligned(in_float32(parameter))
    numbers = float(scale), float(negative_slope), float(dropout_p)
    wide = out_dtype is not None and out_dtype is not kernels.problem.dtype
    rest = kernels, graph, count, concat, numbers, wide
    if trained:
        results: tuple[Tensor, ...] = _apply(rest, seed, x, vector, *weights, *biases)
        return results
    attended, _, rows, _ = _attend(rest, seed, x, vector, weights, biases, saved=False)
    return attended[0], *_others(score, rows, count)


def _projected_kernels(
    graph: Graph,
    score: str,
    x: Tensor,
    weights: Sequence[Tensor],
    parameter: Tensor | None,
    heads: int,
    numbers: tuple[float, float, float],
    trained: bool,
    dtype: torch.dtype,
) -> tuple[Kernels, bool] | None:
    """The kernels of checked arguments of :func:`projected_attention`, and whether they are final."""
    graph.on_this_stream()
    scale, slope, p = numbers
    tf32 = tf32_allowed(dtype)
    channels, rest = divmod(weights[0].shape[0], heads)
    problem = AttentionProblem(score, heads, channels, dtype, x.device, False, p > 0.0, False, tf32)
    if rest or unsupported_reasons(problem) or not graph.num_src == graph.num_dst == x.shape[0] > 0:
        return None
    check_range("scale", scale)
    check_range("negative_slope", slope)
    check_range("dropout_p", p, 0.0, 1.0)
    if parameter is not None:
        vector = parameter.squeeze(0) if parameter.dim() == 3 else parameter
        check_tensor("att", vector, graph.device, H=heads, C=channels)
    return Kernels.of(problem, graph).side_by_side(len(weights), graph, trained)
