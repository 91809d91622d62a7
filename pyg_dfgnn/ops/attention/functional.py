r"""Attention over the edges of a graph: scores, softmax over the in-edges of a target, dropout, weighted sum.

.. math::
    O_i = \sum_{j \in N(i)} D_{ij} \, \mathrm{softmax}_j(S_{ij}) \, v_j

Four scores share one set of kernels. Nothing of length E is saved for the backward pass: it recomputes the weights from
the softmax of each row. All functions run on CPU tensors and in float64 through the reference implementation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention.row_split import has_tangent
from pyg_dfgnn.errors import check_device, check_dtype, check_range
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.attention.arguments import (
    FEATURE_DTYPES,
    Edges,
    check_graph,
    check_tensor,
    common_dtype,
    draw_seed,
    in_float32,
    is_eager_on,
    is_fusable,
    num_edges,
    recall,
    remember,
    signature_of,
)
from pyg_dfgnn.ops.attention.autograd import AttentionWeights, TracedAttention, apply_attention
from pyg_dfgnn.ops.attention.launch import (
    Inputs,
    Kernels,
    inverse_norm,
    problem_of,
    room_for_norms,
    run_forward,
    run_weights,
)
from pyg_dfgnn.ops.attention.operators import Operands
from pyg_dfgnn.ops.eager import is_plain, needs_grad
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.reference.philox import dropout_factor
from pyg_dfgnn.settings import current


def _without_repeats(arguments: Operands) -> Operands:
    """A view for each repetition of a tensor: torch.compile refuses a Function that takes one tensor twice."""
    distinct: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor) and any(argument is other for other in distinct):
            argument = argument.view_as(argument)
        distinct.append(argument)
    return Operands(*distinct)


def _run(
    graph: Edges,
    score: str,
    inputs: Inputs,
    same: bool,
    return_weights: bool,
    concat: bool,
    signature: Any,
    kernels: Kernels | None,
) -> Any:
    """The result of checked inputs.

    Args:
        graph: The edges.
        score: The score.
        inputs: The inputs, without the seed.
        same: Whether target and value are one tensor.
        return_weights: As the public functions have it.
        concat: The same.
        signature: Of the arguments.
        kernels: Those of an earlier call with this signature.
    """
    value = inputs.value
    if inputs.dropout > 0.0:
        inputs = inputs._replace(seed=draw_seed(value.device))
    tensors = inputs[:8]
    tracked = needs_grad(tensors)
    if kernels is None and is_eager_on(graph) and all(tensor is None or is_plain(tensor) for tensor in tensors):
        kernels = Kernels.of(problem_of(score, inputs), graph)
        if kernels.final:
            remember(graph, signature, kernels)
    if kernels is not None:
        if tracked:
            found = apply_attention((kernels, graph, same, return_weights, concat), inputs, *tensors)
            if not return_weights:
                return found
            out, softmax = found
        else:
            out, softmax, _, _ = run_forward(kernels, inputs, graph.num_dst, saved=return_weights, concat=concat)
            if not return_weights:
                return out
        # No closures: their cells would cost every call.
        weigh = partial(run_weights, kernels, graph, inputs, softmax)  # type: ignore[arg-type]
        return out, AttentionWeights.apply(weigh, score, graph, same, inputs[8:], *tensors)
    arguments = Operands(*graph.key, score, *inputs)  # type: ignore[call-arg]
    if torch.compiler.is_compiling():
        arguments = _without_repeats(arguments)
    # Backward may run under other settings than these, so what forward leaves is not up to the plan. The output may be
    # edited in place, even what a compiled function returns: so backward has one of its own.
    tangent = tracked and has_tangent(score, inputs.edge is not None) and current().schedule in ("auto", "row_split")
    out, softmax = TracedAttention.apply(same, tracked, tangent, *arguments)
    out = out.flatten(1) if concat else out
    if not return_weights:
        return out
    if torch.compiler.is_compiling():
        return out, _traced_weights(arguments, softmax)
    weigh = partial(_traced_weights, arguments, softmax)
    return out, AttentionWeights.apply(weigh, score, graph, same, inputs[8:], *tensors)


def _inverse_norm(graph: Edges, x: Tensor) -> Tensor:
    """The norms as the kernels take them: their gradient is part of that of the attention."""
    if is_eager_on(graph) and is_plain(x):
        return inverse_norm(x)
    with torch.no_grad():
        return torch.ops.pyg_dfgnn.attention_inverse_norm(x.detach())


def _traced_weights(arguments: Operands, softmax: Tensor) -> Tensor:
    """The weights by the registered operator, without a gradient."""
    detached = (a.detach() if isinstance(a, Tensor) else a for a in arguments)
    with torch.no_grad():
        return torch.ops.pyg_dfgnn.attention_weights(*detached, softmax)


def _by_reference(
    attend: Callable[..., tuple[Tensor, Tensor]],
    graph: Edges,
    tensors: Sequence[Any],
    options: Mapping[str, Any],
    dropout_p: float,
    return_weights: bool,
    concat: bool,
) -> Any:
    """The result of a function of the reference on checked inputs, the first of which has the shape [N, H, C]."""
    graph = graph if isinstance(graph, Graph) else Graph.resolve(*graph.key)
    edge_index, keep = graph.edge_index, None
    if dropout_p > 0.0:
        device = edge_index.device
        edge_ids = torch.arange(edge_index.shape[1], device=device)
        keep = dropout_factor(edge_ids, tensors[0].shape[1], dropout_p, draw_seed(device))
    out, weights = attend(edge_index, graph.num_dst, *tensors, keep=keep, **options)
    out = out.flatten(1) if concat else out
    return (out, weights) if return_weights else out


def dot_attention(
    graph: Edges,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    edge: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    return_weights: bool = False,
    concat: bool = False,
) -> Any:
    r"""Scaled dot-product attention over edges, :math:`S_{ij} = s\,\langle q_i, k_j + e_{ij} \rangle`.

    Args:
        graph: The edges.
        query: Shape [N_dst, H, C].
        key: Shape [N_src, H, C].
        value: Shape [N_src, H, C]; ``edge`` is added to it too.
        edge: Shape [E, H, C] in the order of ``graph.edge_index``.
        scale: The factor s, 1 / sqrt(C) by default.
        dropout_p: Probability that an attention weight becomes 0.
        return_weights: Also return the weights.
        concat: Return the heads side by side.

    Returns:
        Shape [N_dst, H, C], with ``concat`` [N_dst, H * C]; with ``return_weights`` also the weights after dropout
        [E, H] in the order of ``graph.edge_index``; differentiable, except while torch.compile traces. The output may
        be edited in place, but for edits that torch does not count, as those through ``.data``.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, device or range does not fit.

    Source: Vaswani et al., "Attention Is All You Need" (2017); Shi et al., arXiv 2009.03509 (edge features).
    """
    signature = signature_of(graph, "dot", (scale, dropout_p), (query, key, value, edge))
    kernels = recall(graph, signature)
    if kernels is None:
        graph, device = check_graph(graph)
        check_tensor("value", value, device, N_src=graph.num_src, H=None, C=None)
        _, heads, channels = value.shape
        check_tensor("key", key, device, N_src=graph.num_src, H=heads, C=channels)
        check_tensor("query", query, device, N_dst=graph.num_dst, H=heads, C=channels)
        if edge is not None:
            check_tensor("edge", edge, device, E=num_edges(graph), H=heads, C=channels)
        check_range("dropout_p", dropout_p, 0.0, 1.0)
        scale = 1.0 / math.sqrt(max(1, channels)) if scale is None else scale
        check_range("scale", scale)
        dtype = common_dtype(query, key, value, edge)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        edge = None if edge is None else edge.to(dtype)
        if not is_fusable("dot", value, edge, dropout_p):
            tensors, options = (query, key, value), {"edge": edge, "scale": scale}
            return _by_reference(reference.dot_attention, graph, tensors, options, dropout_p, return_weights, concat)
    scale = 1.0 / math.sqrt(value.shape[2]) if scale is None else float(scale)
    inputs = Inputs(query, key, value, None, None, None, edge, None, scale, 0.0, float(dropout_p))
    return _run(graph, "dot", inputs, False, return_weights, concat, signature, kernels)


def cosine_attention(
    graph: Edges,
    x_src: Tensor,
    x_dst: Tensor | None = None,
    *,
    beta: Tensor | float,
    dropout_p: float = 0.0,
    return_weights: bool = False,
    concat: bool = False,
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

    Returns:
        As :func:`dot_attention`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, device or range does not fit.

    Source: Thekumparampil et al., "Attention-based Graph Neural Network" (arXiv 1803.03735).
    """
    signature = None
    if isinstance(beta, Tensor):
        signature = signature_of(graph, "cosine", (dropout_p,), (x_src, x_dst), (beta,))
    kernels = recall(graph, signature)
    if kernels is None:
        graph, device = check_graph(graph)
    same = x_dst is x_src or (x_dst is None and graph.num_dst == graph.num_src)
    target: Any = x_src if same else x_dst
    if kernels is None:
        check_tensor("x_src", x_src, device, N_src=graph.num_src, H=None, C=None)
        _, heads, channels = x_src.shape
        check_tensor("x_dst", target, device, N_dst=graph.num_dst, H=heads, C=channels)
        check_range("dropout_p", dropout_p, 0.0, 1.0)
        if isinstance(beta, Tensor):
            check_dtype("beta", beta, FEATURE_DTYPES)
            check_device("beta", beta, device)
            if beta.numel() != 1:
                raise ValueError(f"'beta' needs one element (got shape {list(beta.shape)})")
        else:
            check_range("beta", beta)
            beta = torch.full((1,), float(beta), dtype=torch.float32, device=device)
        dtype = common_dtype(x_src, target)
        x_src, target = x_src.to(dtype), target.to(dtype)
        if not is_fusable("cosine", x_src, None, dropout_p):
            tensors, options = (x_src, target), {"beta": beta.to(dtype).reshape(1)}
            return _by_reference(reference.cosine_attention, graph, tensors, options, dropout_p, return_weights, concat)
    vector = _one_element(beta)  # type: ignore[arg-type]
    # A first call does not know its kernels yet: those that find norms write these once more.
    found = None if kernels is None else kernels.forward.finds_norms
    source_norms = target_norms = None
    if found != "targets" or return_weights or needs_grad((x_src, target, vector)):
        finds_norms = found == "sources" or (found == "targets" and same)
        source_norms = room_for_norms(x_src) if finds_norms else _inverse_norm(graph, x_src)
        target_norms = source_norms if same else _inverse_norm(graph, target)
    inputs = Inputs(target, None, x_src, target_norms, source_norms, vector, None, None, 1.0, 0.0, float(dropout_p))
    return _run(graph, "cosine", inputs, same, return_weights, concat, signature, kernels)


def cosine_attention_of_rows(graph: Edges, x: Tensor, beta: Tensor | float) -> Tensor:
    """:func:`cosine_attention` of one head among nodes of features x [N, C], of this shape.

    Features are taken as they are: a view of them, with its node of autograd, and what only several heads, dropout or
    weights need take a small graph's host longer than its kernels.
    """
    signature = signature_of(graph, "cosine of rows", (), (x,), (beta,))
    kernels = recall(graph, signature)
    if kernels is None:
        # A first call saves what a later one does: checkpoints repeat it.
        kernels = _kernels_of_rows(graph, x, beta, signature)
        if kernels is None:
            out: Tensor = cosine_attention(graph, x.unsqueeze(1), beta=beta, concat=True)
            return out
    vector = _one_element(beta)  # type: ignore[arg-type]
    tracked, found = needs_grad((x, vector)), kernels.forward.finds_norms
    norms = None
    if found is None:
        norms = inverse_norm(x.unsqueeze(1))
    elif found == "sources" or tracked:
        norms = room_for_norms(x)
    inputs = Inputs(x, None, x, norms, norms, vector, None, None, 1.0, 0.0, 0.0)
    if not tracked:
        return run_forward(kernels, inputs, graph.num_dst, saved=False)[0]
    attended: Tensor = apply_attention(
        (kernels, graph, True, False, False), inputs, None, None, x, None, norms, vector, None, None
    )
    return attended


def _kernels_of_rows(graph: Edges, x: Tensor, beta: Tensor | float, signature: Any) -> Kernels | None:
    """The kernels of a first call, remembered; None where :func:`cosine_attention` has to check it or takes others."""
    if signature is None or not isinstance(graph, Graph) or not isinstance(beta, Tensor):
        return None
    device = graph.edge_index.device
    nodes_fit = graph.num_src == graph.num_dst == x.shape[0] and x.dim() == 2 and x.dtype in FEATURE_DTYPES
    if not nodes_fit or beta.numel() != 1 or beta.dtype not in FEATURE_DTYPES or {x.device, beta.device} != {device}:
        return None
    heads = x.detach().unsqueeze(1)
    if not is_fusable("cosine", heads, None, 0.0):
        return None
    inputs = Inputs(heads, None, heads, None, None, None, None, None, 1.0, 0.0, 0.0)
    graph.on_this_stream()
    kernels = Kernels.of(problem_of("cosine", inputs), graph)
    if not kernels.final:
        return None
    remember(graph, signature, kernels)
    return kernels


def _one_element(beta: Tensor) -> Tensor:
    """The factor as kernels take it, [1] in float32."""
    beta = in_float32(beta)
    # A view would cost a node of autograd.
    return beta if beta.dim() == 1 else beta.reshape(1)


def add_attention(
    graph: Edges,
    value: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor | None = None,
    *,
    alpha_edge: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout_p: float = 0.0,
    return_weights: bool = False,
    concat: bool = False,
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

    Returns:
        As :func:`dot_attention`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, device or range does not fit.

    Source: Velickovic et al., "Graph Attention Networks" (arXiv 1710.10903).
    """
    signature = signature_of(graph, "add", (negative_slope, dropout_p), (value,), (alpha_src, alpha_dst, alpha_edge))
    kernels = recall(graph, signature)
    if kernels is None:
        graph, device = check_graph(graph)
        check_tensor("value", value, device, N_src=graph.num_src, H=None, C=None)
        heads = value.shape[1]
        check_tensor("alpha_src", alpha_src, device, N_src=graph.num_src, H=heads)
        if alpha_dst is not None:
            check_tensor("alpha_dst", alpha_dst, device, N_dst=graph.num_dst, H=heads)
        if alpha_edge is not None:
            check_tensor("alpha_edge", alpha_edge, device, E=num_edges(graph), H=heads)
        check_range("dropout_p", dropout_p, 0.0, 1.0)
        check_range("negative_slope", negative_slope)
        if not is_fusable("add", value, alpha_edge, dropout_p):
            tensors = (value, alpha_src, alpha_dst)
            options = {"alpha_edge": alpha_edge, "negative_slope": negative_slope}
            return _by_reference(reference.add_attention, graph, tensors, options, dropout_p, return_weights, concat)
    if alpha_dst is None:
        alpha_dst = torch.zeros((graph.num_dst, alpha_src.shape[1]), dtype=torch.float32, device=alpha_src.device)
    edge = None if alpha_edge is None else in_float32(alpha_edge)
    slope, p = float(negative_slope), float(dropout_p)
    inputs = Inputs(None, None, value, in_float32(alpha_dst), in_float32(alpha_src), None, edge, None, 1.0, slope, p)
    return _run(graph, "add", inputs, False, return_weights, concat, signature, kernels)


def gatv2_attention(
    graph: Edges,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    *,
    edge: Tensor | None = None,
    negative_slope: float = 0.2,
    dropout_p: float = 0.0,
    return_weights: bool = False,
    concat: bool = False,
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

    Returns:
        As :func:`dot_attention`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, device or range does not fit.

    Source: Brody et al., "How Attentive are Graph Attention Networks?" (arXiv 2105.14491).
    """
    signature = signature_of(graph, "gatv2", (negative_slope, dropout_p), (x_src, x_dst, edge), (att,))
    kernels = recall(graph, signature)
    if kernels is None:
        graph, device = check_graph(graph)
        check_tensor("x_src", x_src, device, N_src=graph.num_src, H=None, C=None)
        _, heads, channels = x_src.shape
        check_tensor("x_dst", x_dst, device, N_dst=graph.num_dst, H=heads, C=channels)
        vector = att.squeeze(0) if isinstance(att, Tensor) and att.dim() == 3 else att
        check_tensor("att", vector, device, H=heads, C=channels)
        if edge is not None:
            check_tensor("edge", edge, device, E=num_edges(graph), H=heads, C=channels)
        check_range("dropout_p", dropout_p, 0.0, 1.0)
        check_range("negative_slope", negative_slope)
        dtype = common_dtype(x_src, x_dst, edge)
        x_src, x_dst = x_src.to(dtype), x_dst.to(dtype)
        edge = None if edge is None else edge.to(dtype)
        if not is_fusable("gatv2", x_src, edge, dropout_p):
            tensors, options = (x_src, x_dst, att.to(dtype)), {"edge": edge, "negative_slope": negative_slope}
            return _by_reference(reference.gatv2_attention, graph, tensors, options, dropout_p, return_weights, concat)
    slope, p = float(negative_slope), float(dropout_p)
    inputs = Inputs(x_dst, None, x_src, None, None, in_float32(att), edge, None, 1.0, slope, p)
    return _run(graph, "gatv2", inputs, False, return_weights, concat, signature, kernels)
