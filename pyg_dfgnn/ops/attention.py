r"""Attention over the edges of a graph: scores, softmax over the in-edges of a target, dropout, weighted sum.

.. math::
    O_i = \sum_{j \in N(i)} D_{ij} \, \mathrm{softmax}_j(S_{ij}) \, v_j

Four scores share one set of kernels. Nothing of length E is saved for the backward pass: it recomputes the weights from
the softmax of each row. All functions run on CPU tensors and in float64 through the reference implementation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention import AttentionProblem, fused_device_types, unsupported_reasons
from pyg_dfgnn.dispatch.attention_problem import tf32_allowed
from pyg_dfgnn.dispatch.attention_rows import has_tangent
from pyg_dfgnn.errors import check_device, check_dtype, check_range, check_shape
from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.graph.forms import check_edge_index
from pyg_dfgnn.ops.attention_launch import (
    Inputs,
    Kernels,
    empty_as,
    inverse_norm,
    problem_of,
    run_backward,
    run_forward,
    run_weights,
)
from pyg_dfgnn.ops.eager import apply_of, is_eager, is_plain, needs_grad, once_differentiable
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.reference.philox import dropout_factor
from pyg_dfgnn.settings import current

Edges = Graph | EdgeSet
# Bounds what a graph remembers when a scale or slope is another number in each call.
_MAX_PLANS = 256


class Operands(NamedTuple):
    """Arguments of the registered operators, in schema order: the key of the graph, the score, then its inputs."""

    edge_index: Tensor
    num_src: int
    num_dst: int
    self_loops: bool
    transposed: bool
    score: str
    target: Tensor | None
    key: Tensor | None
    value: Tensor
    target_scalars: Tensor | None
    source_scalars: Tensor | None
    parameter: Tensor | None
    edge: Tensor | None
    seed: Tensor | None
    scale: float
    slope: float
    dropout: float

    def resolve(self) -> tuple[Kernels, Graph, Inputs]:
        """The prepared kernels, the graph, and the inputs."""
        graph = Graph.resolve(*self[:5])
        inputs = Inputs(*self[6:])
        if inputs.edge is not None:
            # Not known while torch.compile traces self-loops.
            sizes = graph.num_edges, *inputs.edge.shape[1:]
            check_shape("edge", inputs.edge, sizes, f"[E={graph.num_edges}, ...]")
        return Kernels.of(problem_of(self.score, inputs), graph), graph, inputs


_OPERANDS = (
    "Tensor edge_index, SymInt num_src, SymInt num_dst, bool self_loops, bool transposed, str score, Tensor? target, "
    "Tensor? key, Tensor value, Tensor? target_scalars, Tensor? source_scalars, Tensor? parameter, Tensor? edge, "
    "Tensor? seed, float scale, float slope, float dropout"
)
_library = torch.library.Library("pyg_dfgnn", "DEF")
for _schema in (
    f"attention_forward({_OPERANDS}, bool exact, bool tangent) -> (Tensor, Tensor, Tensor, Tensor)",
    f"attention_backward({_OPERANDS}, Tensor out, Tensor softmax, Tensor grad_out, bool same, "
    "bool edge_grad, Tensor tangent) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"attention_weights({_OPERANDS}, Tensor softmax) -> Tensor",
):
    # Inductor's CUDA graphs copy edge_index into a buffer of theirs: a replay would launch on the recorded graph.
    _library.define(_schema, tags=(torch.Tag.cudagraph_unsafe,))
_library.define("attention_inverse_norm(Tensor x) -> Tensor")


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *operands, exact, tangent = arguments
    o = Operands(*operands)
    kernels, graph, inputs = o.resolve()
    walk = kernels.tangent(graph) if tangent else None
    out, softmax, *rest = run_forward(kernels, inputs, o.num_dst, exact=exact, tangent=walk)
    assert softmax is not None
    nothing = (0, *out.shape[1:])
    copy, derivative = (out.new_empty(nothing, dtype=torch.float32) if each is None else each for each in rest)
    return out, softmax, copy, derivative


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *operands, exact, tangent = arguments
    o = Operands(*operands)
    _, heads, channels = o.value.shape
    return (
        o.value.new_empty((o.num_dst, heads, channels)),
        o.value.new_empty((o.num_dst, heads, 2), dtype=torch.float32),
        o.value.new_empty((o.num_dst if exact else 0, heads, channels), dtype=torch.float32),
        o.value.new_empty((o.num_dst if tangent else 0, heads, channels), dtype=torch.float32),
    )


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    count = len(Operands._fields)
    kernels, graph, inputs = Operands(*arguments[:count]).resolve()
    grads = run_backward(kernels, graph, inputs, *arguments[count:])
    return tuple(inputs.value.new_empty(0) if grad is None else grad for grad in grads)


def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    count = len(Operands._fields)
    o = Operands(*arguments[:count])
    same, edge_grad = arguments[count + 3 : count + 5]
    value = o.value
    heads, channels = value.shape[1:]

    def rows(present: bool, count: int) -> Tensor:
        return value.new_empty((count, heads, channels)) if present else value.new_empty(0)

    def scalars(count: int) -> Tensor:
        return value.new_empty((count, heads), dtype=torch.float32)

    add, dot = o.score == "add", o.score == "dot"
    return (
        scalars(o.num_dst) if add else rows(not same, o.num_dst),
        rows(dot, o.num_src),
        rows(True, o.num_src),
        scalars(o.num_src) if add else rows(False, 0),
        rows(False, 0) if o.parameter is None else empty_as(o.parameter),
        empty_as(o.edge) if edge_grad and o.edge is not None else rows(False, 0),
    )


def _weights(*arguments: Any) -> Tensor:
    *operands, softmax = arguments
    return run_weights(*Operands(*operands).resolve(), softmax)


def _weights_fake(*arguments: Any) -> Tensor:
    o = Operands(*arguments[:-1])
    edges = torch.library.get_ctx().new_dynamic_size() if o.self_loops else o.edge_index.shape[1]
    return o.value.new_empty((edges, o.value.shape[1]), dtype=torch.float32)


def _inverse_norm_fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:2], dtype=torch.float32)


for _name, _implementation, _fake in (
    ("attention_forward", _forward, _forward_fake),
    ("attention_backward", _backward, _backward_fake),
    ("attention_weights", _weights, _weights_fake),
    ("attention_inverse_norm", inverse_norm, _inverse_norm_fake),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pyg_dfgnn::{_name}", _fake, lib=_library)


def _is_rounded(value: Tensor) -> bool:
    """Whether backward needs the output in float32: the terms of dS cancel, and 16 bits of it would show."""
    return value.dtype.itemsize == 2


def _input_grads(score: str, same: bool, edge_grad: bool, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of the tensors of ``Inputs`` from those of ``run_backward``."""
    target, key, value, source, parameter, edge = grads
    add, dot = score == "add", score == "dot"
    return (
        None if add or same else target,
        key if dot else None,
        value,
        target if add else None,
        source if add else None,
        parameter if score in ("cosine", "gatv2") else None,
        edge if edge_grad else None,
        None,
    )


class _Attention(torch.autograd.Function):
    """Fused attention on a graph at hand; with ``same`` the value doubles as target and takes its gradient.

    Takes the inputs as they are and their tensors once more, which autograd has to see. Returns the output, with
    ``weights`` also the softmax.
    """

    @staticmethod
    def forward(ctx: Any, rest: tuple[Kernels, Graph, bool, bool], inputs: Inputs, *tensors: Any) -> Any:
        kernels, graph, same, weights = rest
        ctx.rest = kernels, graph, same, inputs[8:]
        walk = kernels.tangent(graph) if kernels.wants_tangent(graph) else None
        exact = _is_rounded(inputs.value)
        out, softmax, copy, derivative = run_forward(kernels, inputs, graph.num_dst, exact=exact, tangent=walk)
        ctx.save_for_backward(*tensors, out if copy is None else copy, softmax, derivative)
        ctx.set_materialize_grads(False)
        if not weights:
            return out
        ctx.mark_non_differentiable(softmax)
        return out, softmax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Any, ...]:
        if grad_out is None:
            return (None,) * 10
        kernels, graph, same, numbers = ctx.rest
        *tensors, out, softmax, tangent = ctx.saved_tensors
        inputs = Inputs(*tensors, *numbers)
        edge_grad = ctx.needs_input_grad[8]
        grads = run_backward(kernels, graph, inputs, out, softmax, grad_out, same, edge_grad, tangent)
        return None, None, *_input_grads(kernels.problem.score, same, edge_grad, grads)


_apply_attention = apply_of(_Attention)


class _TracedAttention(torch.autograd.Function):
    """The same through the registered operators, for tracing."""

    @staticmethod
    def forward(ctx: Any, same: bool, exact: bool, tangent: bool, *arguments: Any) -> tuple[Tensor, Tensor]:
        o = Operands(*arguments)
        out, softmax, copy, derivative = torch.ops.pyg_dfgnn.attention_forward(*arguments, exact, tangent)
        given = (a for a in arguments if isinstance(a, Tensor))
        ctx.save_for_backward(*given, copy if exact else out, softmax, derivative)
        ctx.layout = tuple(None if isinstance(a, Tensor) else (a,) for a in arguments)
        ctx.same = same
        ctx.edge_grad = o.edge is not None and ctx.needs_input_grad[3 + Operands._fields.index("edge")]
        ctx.mark_non_differentiable(softmax)
        return out, softmax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Any, ...]:
        *saved, out, softmax, tangent = ctx.saved_tensors
        tensors = iter(saved)
        arguments = [next(tensors) if entry is None else entry[0] for entry in ctx.layout]
        rest = (out, softmax, grad_out, ctx.same, ctx.edge_grad, tangent)
        grads = torch.ops.pyg_dfgnn.attention_backward(*arguments, *rest)
        return (*(None,) * 9, *_input_grads(arguments[5], ctx.same, ctx.edge_grad, grads), None, None, None)


class _Weights(torch.autograd.Function):
    """Attention weights by kernel; a gradient through them, rarely asked for, takes the reference's composite path."""

    @staticmethod
    def forward(ctx: Any, rest: tuple[Kernels, Graph, bool, Any, Tensor], *tensors: Any) -> Tensor:
        kernels, graph, same, numbers, softmax = rest
        ctx.save_for_backward(*tensors)
        ctx.rest = (kernels.problem, graph, same, numbers)
        return run_weights(kernels, graph, Inputs(*tensors, *numbers), softmax)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        problem, graph, same, numbers = ctx.rest
        needed = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            leaves: list[Any] = [
                None if tensor is None else tensor.detach().requires_grad_(need)
                for tensor, need in zip(ctx.saved_tensors, needed, strict=True)
            ]
            wide: list[Any] = [
                leaf.float() if leaf is not None and leaf.is_floating_point() else leaf for leaf in leaves
            ]
            weights = _reference_weights(problem.score, graph, Inputs(*wide, *numbers), same)
        wanted = [leaf for leaf, need in zip(leaves, needed, strict=True) if need]
        grads = iter(torch.autograd.grad(weights, wanted, grad, allow_unused=True))
        return None, *(next(grads) if need else None for need in needed)


def _reference_weights(score: str, graph: Graph, inputs: Inputs, same: bool) -> Tensor:
    """The weights [E, H] of the inputs, in plain torch."""
    given: dict[str, Any] = inputs._asdict()
    value, edge, slope = given["value"], given["edge"], given["slope"]
    keep = None
    if inputs.seed is not None:
        edge_ids = torch.arange(graph.num_edges, device=value.device)
        keep = dropout_factor(edge_ids, value.shape[1], inputs.dropout, inputs.seed).float()
    edges = graph.edge_index, graph.num_dst
    if score == "dot":
        query, key, scale = given["target"], given["key"], given["scale"]
        return reference.dot_attention(*edges, query, key, value, edge=edge, scale=scale, keep=keep)[1]
    if score == "cosine":
        x_dst = None if same else given["target"]
        return reference.cosine_attention(*edges, value, x_dst, beta=given["parameter"], keep=keep)[1]
    if score == "add":
        terms = given["source_scalars"], given["target_scalars"]
        nothing = value[..., :0]
        return reference.add_attention(*edges, nothing, *terms, alpha_edge=edge, negative_slope=slope, keep=keep)[1]
    nodes = value, given["target"], given["parameter"]
    return reference.gatv2_attention(*edges, *nodes, edge=edge, negative_slope=slope, keep=keep)[1]


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
    if kernels is None or graph.device.type not in fused_device_types:
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


def _fusable(score: str, value: Tensor, dtype: torch.dtype, edge: bool, dropout_p: float) -> bool:
    _, heads, channels = value.shape
    problem = AttentionProblem(
        score, heads, channels, dtype, value.device, edge, dropout_p > 0.0, torch.is_grad_enabled()
    )
    return not unsupported_reasons(problem)


def _common_dtype(*tensors: Tensor | None) -> torch.dtype:
    present = [t.dtype for t in tensors if t is not None]
    dtype = present[0]
    for other in present[1:]:
        dtype = torch.promote_types(dtype, other)
    return dtype


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
    *,
    same: bool = False,
    return_weights: bool = False,
    signature: Any = None,
    kernels: Kernels | None = None,
) -> Any:
    """The result of checked inputs; `kernels` are those of an earlier call with this signature."""
    value = inputs.value
    if inputs.dropout > 0.0:
        inputs = inputs._replace(seed=_draw_seed(value.device))
    tracked = needs_grad(inputs[:7])
    if kernels is None and _is_eager(graph) and all(tensor is None or is_plain(tensor) for tensor in inputs[:8]):
        kernels = Kernels.of(problem_of(score, inputs), graph)
        if signature is not None and kernels.final and len(graph.plans) < _MAX_PLANS:
            graph.plans[signature] = kernels
    if kernels is not None:
        if tracked:
            found = _apply_attention((kernels, graph, same, return_weights), inputs, *inputs[:8])
            if not return_weights:
                return found
            out, softmax = found
        else:
            out, softmax, _, _ = run_forward(kernels, inputs, graph.num_dst, saved=return_weights)
            if not return_weights:
                return out
        return out, _Weights.apply((kernels, graph, same, inputs[8:], softmax), *inputs[:8])
    arguments = Operands(*graph.key, score, *inputs)  # type: ignore[arg-type]
    if torch.compiler.is_compiling():
        arguments = _without_repeats(arguments)
    exact = tracked and _is_rounded(value)
    # Backward may run under other settings than these, so what forward leaves is not up to the plan.
    tangent = tracked and has_tangent(score, inputs.edge is not None) and current().schedule in ("auto", "rows")
    out, softmax = _TracedAttention.apply(same, exact, tangent, *arguments)
    if not return_weights:
        return out
    with torch.no_grad():
        return out, torch.ops.pyg_dfgnn.attention_weights(*_detached(arguments), softmax)


def _is_eager(graph: Edges) -> TypeGuard[Graph]:
    return is_eager() and isinstance(graph, Graph)


def _inverse_norm(graph: Edges, x: Tensor) -> Tensor:
    """The norms as the kernels take them: their gradient is part of that of the attention."""
    if _is_eager(graph) and is_plain(x):
        return inverse_norm(x)
    with torch.no_grad():
        return torch.ops.pyg_dfgnn.attention_inverse_norm(x.detach())


def _detached(arguments: Any) -> Any:
    return type(arguments)(*(a.detach() if isinstance(a, Tensor) else a for a in arguments))


def _zeros_like_heads(graph: Edges, alpha_src: Tensor) -> Tensor:
    return torch.zeros((graph.num_dst, alpha_src.shape[1]), dtype=torch.float32, device=alpha_src.device)


def _by_reference(
    attend: Callable[..., tuple[Tensor, Tensor]],
    graph: Edges,
    tensors: Sequence[Any],
    options: Mapping[str, Any],
    dropout_p: float,
    return_weights: bool,
) -> Any:
    """The result of a function of the reference on checked inputs, the first of which has the shape [N, H, C]."""
    graph = graph if isinstance(graph, Graph) else Graph.resolve(*graph.key)
    edge_index, keep = graph.edge_index, None
    if dropout_p > 0.0:
        device = edge_index.device
        edge_ids = torch.arange(edge_index.shape[1], device=device)
        keep = dropout_factor(edge_ids, tensors[0].shape[1], dropout_p, _draw_seed(device))
    result = attend(edge_index, graph.num_dst, *tensors, keep=keep, **options)
    return result if return_weights else result[0]


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

    Returns:
        Shape [N_dst, H, C]; with ``return_weights`` also the weights after dropout [E, H] in the order of
        ``graph.edge_index``; differentiable, except while torch.compile traces.

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
        if not _fusable("dot", value, dtype, edge is not None, dropout_p):
            tensors, options = (query, key, value), {"edge": edge, "scale": scale}
            return _by_reference(reference.dot_attention, graph, tensors, options, dropout_p, return_weights)
    scale = 1.0 / math.sqrt(value.shape[2]) if scale is None else float(scale)
    inputs = Inputs(query, key, value, None, None, None, edge, None, scale, 0.0, float(dropout_p))
    return _run(graph, "dot", inputs, return_weights=return_weights, signature=signature, kernels=kernels)


def cosine_attention(
    graph: Edges,
    x_src: Tensor,
    x_dst: Tensor | None = None,
    *,
    beta: Tensor | float,
    dropout_p: float = 0.0,
    return_weights: bool = False,
) -> Any:
    r"""Cosine attention, :math:`S_{ij} = \beta \cos(x_i, x_j)`, that sums the un-normalised source rows.

    Args:
        graph: The edges.
        x_src: Shape [N_src, H, C].
        x_dst: Shape [N_dst, H, C]; ``x_src`` by default.
        beta: Scalar tensor of one element, or a number.
        dropout_p: Probability that an attention weight becomes 0.
        return_weights: Also return the weights.

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
        if not _fusable("cosine", x_src, dtype, False, dropout_p):
            tensors, options = (x_src, target), {"beta": beta.to(dtype).reshape(1)}
            return _by_reference(reference.cosine_attention, graph, tensors, options, dropout_p, return_weights)
    source_norms = _inverse_norm(graph, x_src)
    target_norms = source_norms if same else _inverse_norm(graph, target)
    beta = beta.float()  # type: ignore[union-attr]
    if beta.dim() != 1:
        # A view would cost a node of autograd.
        beta = beta.reshape(1)
    inputs = Inputs(target, None, x_src, target_norms, source_norms, beta, None, None, 1.0, 0.0, float(dropout_p))
    return _run(graph, "cosine", inputs, same=same, return_weights=return_weights, signature=signature, kernels=kernels)


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
        if not _fusable("add", value, value.dtype, alpha_edge is not None, dropout_p):
            tensors, options = (
                (value, alpha_src, alpha_dst),
                {"alpha_edge": alpha_edge, "negative_slope": negative_slope},
            )
            return _by_reference(reference.add_attention, graph, tensors, options, dropout_p, return_weights)
    target = _zeros_like_heads(graph, alpha_src) if alpha_dst is None else alpha_dst.float()
    edge = None if alpha_edge is None else alpha_edge.float()
    slope, p = float(negative_slope), float(dropout_p)
    inputs = Inputs(None, None, value, target, alpha_src.float(), None, edge, None, 1.0, slope, p)
    return _run(graph, "add", inputs, return_weights=return_weights, signature=signature, kernels=kernels)


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
) -> Any:
    r"""GATv2 attention, :math:`S_{ij} = \langle a, \mathrm{LeakyReLU}(l_i + r_j + e_{ij}) \rangle`.

    Args:
        graph: The edges.
        x_src: The source rows r, shape [N_src, H, C]; they are also the values.
        x_dst: The target rows l, shape [N_dst, H, C].
        att: The vector a, shape [H, C].
        edge: Shape [E, H, C] in the order of ``graph.edge_index``.
        negative_slope: Slope of the LeakyReLU below 0.
        dropout_p: Probability that an attention weight becomes 0.
        return_weights: Also return the weights.

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
        _check("att", att, device, H=heads, C=channels)
        if edge is not None:
            _check("edge", edge, device, E=_num_edges(graph), H=heads, C=channels)
        check_range("dropout_p", dropout_p, 0.0, 1.0)
        check_range("negative_slope", negative_slope)
        dtype = _common_dtype(x_src, x_dst, edge)
        x_src, x_dst = x_src.to(dtype), x_dst.to(dtype)
        edge = None if edge is None else edge.to(dtype)
        if not _fusable("gatv2", x_src, dtype, edge is not None, dropout_p):
            tensors, options = (x_src, x_dst, att.to(dtype)), {"edge": edge, "negative_slope": negative_slope}
            return _by_reference(reference.gatv2_attention, graph, tensors, options, dropout_p, return_weights)
    slope, p = float(negative_slope), float(dropout_p)
    inputs = Inputs(x_dst, None, x_src, None, None, att.float(), edge, None, 1.0, slope, p)
    return _run(graph, "gatv2", inputs, return_weights=return_weights, signature=signature, kernels=kernels)
