r"""Attention over the edges of a graph: scores, softmax over the in-edges of a target, dropout, weighted sum.

.. math::
    O_i = \sum_{j \in N(i)} D_{ij} \, \mathrm{softmax}_j(S_{ij}) \, v_j

Four scores share one set of kernels. Nothing of length E is saved for the backward pass: it recomputes the weights from
the softmax of each row. All functions run on CPU tensors and in float64 through the reference implementation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention import AttentionProblem, fused_device_types, unsupported_reasons
from pyg_dfgnn.dispatch.attention_problem import tf32_allowed
from pyg_dfgnn.dispatch.attention_rows import has_tangent
from pyg_dfgnn.errors import check_device, check_dtype, check_range, check_shape
from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.graph.forms import check_edge_index
from pyg_dfgnn.ops import products
from pyg_dfgnn.ops.attention_autograd import (
    AttentionWeights,
    TracedAttention,
    apply_attention,
    apply_projected_attention,
    attend_projections,
)
from pyg_dfgnn.ops.attention_launch import (
    Inputs,
    Kernels,
    aligned,
    inverse_norm,
    problem_of,
    room_for_norms,
    run_forward,
    run_weights,
)
from pyg_dfgnn.ops.attention_operators import Operands
from pyg_dfgnn.ops.eager import is_eager, is_plain, needs_grad
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.reference.philox import dropout_factor
from pyg_dfgnn.settings import current

Edges = Graph | EdgeSet
# Bounds what a graph remembers when a scale or slope is another number in each call.
_MAX_PLANS = 256

_FEATURE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _check_graph(graph: Edges) -> tuple[Edges, torch.device]:
    """The edges, as a Graph unless torch.compile traces, and their device."""
    if isinstance(graph, Graph):
        return graph.on_this_stream(), graph.device
    if not isinstance(graph, EdgeSet):
        raise TypeError(f"'graph' needs a Graph or an EdgeSet (got {type(graph).__name__})")
    check_edge_index(graph.edge_index)
    return graph if torch.compiler.is_compiling() else Graph.resolve(*graph.key), graph.edge_index.device


def _check(name: str, tensor: Any, device: torch.device, **sizes: int | None) -> None:
    """Check dtype, device and shape, given as one letter and size per dimension; None stands for any size."""
    check_dtype(name, tensor, _FEATURE_DTYPES)
    check_device(name, tensor, device)
    fits = len(tensor.shape) == len(sizes) and all(
        size is None or size == given for size, given in zip(sizes.values(), tensor.shape, strict=True)
    )
    if not fits:
        expected = tuple(letter if size is None else size for letter, size in sizes.items())
        spec = ", ".join(letter if size is None else f"{letter}={size}" for letter, size in sizes.items())
        check_shape(name, tensor, expected, f"[{spec}]")


def _signature(
    graph: Edges, score: str, numbers: tuple[Any, ...], features: Sequence[Any], scalars: Sequence[Any] = ()
) -> Any:
    """What decides whether arguments are valid and which kernels they take; None for what is not worth remembering.

    Args:
        graph: The edges.
        score: The score.
        numbers: Arguments that are numbers.
        features: Tensors that need a common dtype; None when they have several, since they are cast then.
        scalars: Further tensors.
    """
    if not _is_eager(graph):
        return None
    found: list[Any] = [score, numbers]
    dtype = None
    for tensor in features:
        if is_plain(tensor):
            if dtype is None:
                dtype = tensor.dtype
            elif tensor.dtype is not dtype:
                return None
            found += (tensor.shape, tensor.device)
        elif tensor is None:
            found.append(None)
        else:
            return None
    for tensor in scalars:
        if is_plain(tensor):
            found += (tensor.shape, tensor.dtype, tensor.device)
        elif tensor is None:
            found.append(None)
        else:
            return None
    found.append(dtype)
    return tuple(found)


def _recall(graph: Any, signature: Any) -> Kernels | None:
    """The kernels for arguments like these, if such have passed all checks on this graph before."""
    if signature is None:
        return None
    try:
        kernels: Kernels | None = graph.plans.get(signature)
    except TypeError:
        # A number that is not even hashable: the checks will name it.
        return None
    if kernels is None or kernels.device_type not in fused_device_types:
        return None
    settings = current()
    # Most often they are the same object; each `with` block has one of its own.
    if kernels.settings is not settings and kernels.settings != settings:
        return None
    if kernels.problem.tf32 is not tf32_allowed(kernels.problem.dtype):
        return None
    graph.on_this_stream()
    return kernels


def _num_edges(graph: Edges) -> int | None:
    """The number of edges, unknown before tracing ends when self-loops are added."""
    if isinstance(graph, Graph):
        return graph.num_edges
    return None if graph.self_loops else graph.edge_index.shape[1]


def _fusable(score: str, value: Tensor, edge: Tensor | None, dropout_p: float) -> bool:
    _, heads, channels = value.shape
    has_edge, drops = edge is not None, dropout_p > 0.0
    problem = AttentionProblem(score, heads, channels, value.dtype, value.device, has_edge, drops, False)
    return not unsupported_reasons(problem)


def _common_dtype(*tensors: Tensor | None) -> torch.dtype:
    present = [t.dtype for t in tensors if t is not None]
    dtype = present[0]
    for other in present[1:]:
        dtype = torch.promote_types(dtype, other)
    return dtype


def _fp32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float32 else tensor.float()


def _draw_seed(device: torch.device) -> Tensor:
    """A key for one call from torch's generator of the device, so that manual_seed and graph capture work as usual."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


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
        inputs = inputs._replace(seed=_draw_seed(value.device))
    tensors = inputs[:8]
    tracked = needs_grad(tensors)
    if kernels is None and _is_eager(graph) and all(tensor is None or is_plain(tensor) for tensor in tensors):
        kernels = Kernels.of(problem_of(score, inputs), graph)
        if signature is not None and kernels.final and len(graph.plans) < _MAX_PLANS:
            graph.plans[signature] = kernels
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
    arguments = Operands(*graph.key, score, *inputs)  # type: ignore[arg-type]
    if torch.compiler.is_compiling():
        arguments = _without_repeats(arguments)
    # Backward may run under other settings than these, so what forward leaves is not up to the plan. The output may be
    # edited in place, even what a compiled function returns: so backward has one of its own.
    tangent = tracked and has_tangent(score, inputs.edge is not None) and current().schedule in ("auto", "rows")
    out, softmax = TracedAttention.apply(same, tracked, tangent, *arguments)
    out = out.flatten(1) if concat else out
    if not return_weights:
        return out
    if torch.compiler.is_compiling():
        return out, _traced_weights(arguments, softmax)
    weigh = partial(_traced_weights, arguments, softmax)
    return out, AttentionWeights.apply(weigh, score, graph, same, inputs[8:], *tensors)


def _is_eager(graph: Edges) -> TypeGuard[Graph]:
    return is_eager() and isinstance(graph, Graph)


def _inverse_norm(graph: Edges, x: Tensor) -> Tensor:
    """The norms as the kernels take them: their gradient is part of that of the attention."""
    if _is_eager(graph) and is_plain(x):
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
        keep = dropout_factor(edge_ids, tensors[0].shape[1], dropout_p, _draw_seed(device))
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
    signature = _signature(graph, "dot", (scale, dropout_p), (query, key, value, edge))
    kernels = _recall(graph, signature)
    if kernels is None:
        graph, device = _check_graph(graph)
        _check("value", value, device, N_src=graph.num_src, H=None, C=None)
        _, heads, channels = value.shape
        _check("key", key, device, N_src=graph.num_src, H=heads, C=channels)
        _check("query", query, device, N_dst=graph.num_dst, H=heads, C=channels)
        if edge is not None:
            _check("edge", edge, device, E=_num_edges(graph), H=heads, C=channels)
        check_range("dropout_p", dropout_p, 0.0, 1.0)
        scale = 1.0 / math.sqrt(max(1, channels)) if scale is None else scale
        check_range("scale", scale)
        dtype = _common_dtype(query, key, value, edge)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        edge = None if edge is None else edge.to(dtype)
        if not _fusable("dot", value, edge, dropout_p):
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
    signature = _signature(graph, "cosine", (dropout_p,), (x_src, x_dst), (beta,)) if isinstance(beta, Tensor) else None
    kernels = _recall(graph, signature)
    if kernels is None:
        graph, device = _check_graph(graph)
    same = x_dst is x_src or (x_dst is None and graph.num_dst == graph.num_src)
    target: Any = x_src if same else x_dst
    if kernels is None:
        _check("x_src", x_src, device, N_src=graph.num_src, H=None, C=None)
        _, heads, channels = x_src.shape
        _check("x_dst", target, device, N_dst=graph.num_dst, H=heads, C=channels)
        check_range("dropout_p", dropout_p, 0.0, 1.0)
        if isinstance(beta, Tensor):
            check_dtype("beta", beta, _FEATURE_DTYPES)
            check_device("beta", beta, device)
            if beta.numel() != 1:
                raise ValueError(f"'beta' needs one element (got shape {list(beta.shape)})")
        else:
            check_range("beta", beta)
            beta = torch.full((1,), float(beta), dtype=torch.float32, device=device)
        dtype = _common_dtype(x_src, target)
        x_src, target = x_src.to(dtype), target.to(dtype)
        if not _fusable("cosine", x_src, None, dropout_p):
            tensors, options = (x_src, target), {"beta": beta.to(dtype).reshape(1)}
            return _by_reference(reference.cosine_attention, graph, tensors, options, dropout_p, return_weights, concat)
    # A first call does not know its kernels yet: those that find norms write these once more.
    finds_norms = kernels is not None and kernels.forward.finds_norms
    source_norms = room_for_norms(x_src) if finds_norms else _inverse_norm(graph, x_src)
    target_norms = source_norms if same else _inverse_norm(graph, target)
    beta = _fp32(beta)  # type: ignore[arg-type]
    if beta.dim() != 1:
        # A view would cost a node of autograd.
        beta = beta.reshape(1)
    inputs = Inputs(target, None, x_src, target_norms, source_norms, beta, None, None, 1.0, 0.0, float(dropout_p))
    return _run(graph, "cosine", inputs, same, return_weights, concat, signature, kernels)


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
    signature = _signature(graph, "add", (negative_slope, dropout_p), (value,), (alpha_src, alpha_dst, alpha_edge))
    kernels = _recall(graph, signature)
    if kernels is None:
        graph, device = _check_graph(graph)
        _check("value", value, device, N_src=graph.num_src, H=None, C=None)
        heads = value.shape[1]
        _check("alpha_src", alpha_src, device, N_src=graph.num_src, H=heads)
        if alpha_dst is not None:
            _check("alpha_dst", alpha_dst, device, N_dst=graph.num_dst, H=heads)
        if alpha_edge is not None:
            _check("alpha_edge", alpha_edge, device, E=_num_edges(graph), H=heads)
        check_range("dropout_p", dropout_p, 0.0, 1.0)
        check_range("negative_slope", negative_slope)
        if not _fusable("add", value, alpha_edge, dropout_p):
            tensors = (value, alpha_src, alpha_dst)
            options = {"alpha_edge": alpha_edge, "negative_slope": negative_slope}
            return _by_reference(reference.add_attention, graph, tensors, options, dropout_p, return_weights, concat)
    if alpha_dst is None:
        alpha_dst = torch.zeros((graph.num_dst, alpha_src.shape[1]), dtype=torch.float32, device=alpha_src.device)
    edge = None if alpha_edge is None else _fp32(alpha_edge)
    slope, p = float(negative_slope), float(dropout_p)
    inputs = Inputs(None, None, value, _fp32(alpha_dst), _fp32(alpha_src), None, edge, None, 1.0, slope, p)
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
    signature = _signature(graph, "gatv2", (negative_slope, dropout_p), (x_src, x_dst, edge), (att,))
    kernels = _recall(graph, signature)
    if kernels is None:
        graph, device = _check_graph(graph)
        _check("x_src", x_src, device, N_src=graph.num_src, H=None, C=None)
        _, heads, channels = x_src.shape
        _check("x_dst", x_dst, device, N_dst=graph.num_dst, H=heads, C=channels)
        vector = att.squeeze(0) if isinstance(att, Tensor) and att.dim() == 3 else att
        _check("att", vector, device, H=heads, C=channels)
        if edge is not None:
            _check("edge", edge, device, E=_num_edges(graph), H=heads, C=channels)
        check_range("dropout_p", dropout_p, 0.0, 1.0)
        check_range("negative_slope", negative_slope)
        dtype = _common_dtype(x_src, x_dst, edge)
        x_src, x_dst = x_src.to(dtype), x_dst.to(dtype)
        edge = None if edge is None else edge.to(dtype)
        if not _fusable("gatv2", x_src, edge, dropout_p):
            tensors, options = (x_src, x_dst, att.to(dtype)), {"edge": edge, "negative_slope": negative_slope}
            return _by_reference(reference.gatv2_attention, graph, tensors, options, dropout_p, return_weights, concat)
    slope, p = float(negative_slope), float(dropout_p)
    inputs = Inputs(x_dst, None, x_src, None, None, _fp32(att), edge, None, 1.0, slope, p)
    return _run(graph, "gatv2", inputs, False, return_weights, concat, signature, kernels)


def projected_attention(
    graph: Edges,
    score: str,
    x: Tensor,
    layers: Sequence[tuple[Tensor, Tensor | None]],
    heads: int,
    *,
    parameter: Tensor | None = None,
    scale: float = 1.0,
    negative_slope: float = 0.0,
    dropout_p: float = 0.0,
    concat: bool = False,
) -> tuple[Tensor, ...] | None:
    r"""Attention among linear projections of one node set, under one node of autograd.

    With :math:`Y_l = X W_l^T + b_l`: for "dot" the first three are query, key and value of :func:`dot_attention`, for
    "gatv2" the first two are source and target rows of :func:`gatv2_attention`. One product makes them side by side,
    and kernels read them and write their gradients there, so that a small graph takes few launches.

    Args:
        graph: The edges, among N nodes.
        score: "dot" or "gatv2".
        x: Shape [N, F].
        layers: Weights [H * C, F] and biases [H * C] (all or none) of one shape and the dtype of ``x``.
        heads: The number H of heads.
        parameter: The vector of "gatv2", as there.
        scale: The factor of "dot".
        negative_slope: As in :func:`gatv2_attention`.
        dropout_p: Probability that an attention weight becomes 0.
        concat: Return the heads side by side.

    Returns:
        The attention [N, H, C], with ``concat`` [N, H * C], then of each further layer [N, H * C]. None where the
        projections are better made apart: rows are many, a tensor is traced or a subclass, a pass is none of `rows`.

    Raises:
        TypeError: ``parameter`` has the wrong dtype.
        ValueError: A range, or the shape or device of ``parameter``, does not fit.
    """
    weights = [weight for weight, _ in layers]
    biases = [bias for _, bias in layers if bias is not None]
    vectors = () if parameter is None else (parameter,)
    if x.shape[0] > products.MAX_ROWS:
        return None
    numbers = scale, negative_slope, dropout_p
    trained = needs_grad((x, *vectors, *weights, *biases))
    plan = score, numbers, heads, len(weights), trained
    signature = _signature(graph, "projected", plan, (x, weights[0]), vectors)
    if signature is None:
        return None
    assert isinstance(graph, Graph)
    kernels = _recall(graph, signature)
    if kernels is None:
        found = _projected_kernels(graph, score, x, weights, parameter, heads, numbers, trained)
        if found is None:
            return None
        kernels, final = found
        if final and len(graph.plans) < _MAX_PLANS:
            graph.plans[signature] = kernels
    count = len(weights)
    if kernels.projections != count:
        return None
    seed = _draw_seed(x.device) if dropout_p > 0.0 else None
    vector = None if parameter is None else aligned(_fp32(parameter))
    rest = kernels, graph, count, concat, (float(scale), float(negative_slope), float(dropout_p))
    if trained:
        results: tuple[Tensor, ...] = apply_projected_attention(rest, seed, x, vector, *weights, *biases)
        return results
    out, others, _ = attend_projections(rest, seed, x, vector, weights, biases, saved=False)
    return out[0], *others


def _projected_kernels(
    graph: Graph,
    score: str,
    x: Tensor,
    weights: Sequence[Tensor],
    parameter: Tensor | None,
    heads: int,
    numbers: tuple[float, float, float],
    trained: bool,
) -> tuple[Kernels, bool] | None:
    """The kernels of checked arguments of :func:`projected_attention`, and whether they are final."""
    graph.on_this_stream()
    scale, slope, p = numbers
    check_range("scale", scale)
    check_range("negative_slope", slope)
    check_range("dropout_p", p, 0.0, 1.0)
    channels, rest = divmod(weights[0].shape[0], heads)
    if parameter is not None:
        vector = parameter.squeeze(0) if parameter.dim() == 3 else parameter
        _check("att", vector, graph.device, H=heads, C=channels)
    tf32 = tf32_allowed(x.dtype)
    problem = AttentionProblem(score, heads, channels, x.dtype, x.device, False, p > 0.0, False, tf32)
    if rest or unsupported_reasons(problem) or not graph.num_src == graph.num_dst == x.shape[0] > 0:
        return None
    return Kernels.of(problem, graph).side_by_side(len(weights), graph, trained)
