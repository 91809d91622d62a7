r"""Attention over the edges of a graph: scores, softmax over the in-edges of a target, dropout, weighted sum.

.. math::
    O_i = \sum_{j \in N(i)} D_{ij} \, \mathrm{softmax}_j(S_{ij}) \, v_j

Four scores share one set of kernels. Nothing of length E is saved for the backward pass: it recomputes the weights from
the log-sum-exp of each row. All functions run on CPU tensors and in float64 through the reference implementation.
"""

import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_dfgnn.dispatch.attention import (
    AttentionProblem,
    LaunchPlan,
    Pass,
    norm_constants,
    plan,
    unsupported_reasons,
)
from pyg_dfgnn.errors import check_device, check_dtype, check_range, check_shape
from pyg_dfgnn.graph import Adjacency, Chunks, EdgeSet, Graph
from pyg_dfgnn.graph.forms import check_edge_index
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.reference.philox import dropout_factor
from pyg_dfgnn.runtime.compiler import Spec
from pyg_dfgnn.runtime.launcher import Argument, Kernel, addresses, launch
from pyg_dfgnn.settings import current

Edges = Graph | EdgeSet


class Operands(NamedTuple):
    """Arguments of the registered operators, in schema order.

    ``target`` [N_dst, H, C], ``key`` [N_src, H, C] (dot only) and ``value`` [N_src, H, C] share a dtype; node scalars
    [N, H], ``parameter`` (beta [1] or the attention vector [H, C]) and scalar ``edge`` [E, H] are float32; a vector
    ``edge`` is [E, H, C]; ``seed`` is int64 [1] and present when ``dropout`` > 0.
    """

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


_OPERANDS = (
    "Tensor edge_index, SymInt num_src, SymInt num_dst, bool self_loops, bool transposed, str score, Tensor? target, "
    "Tensor? key, Tensor value, Tensor? target_scalars, Tensor? source_scalars, Tensor? parameter, Tensor? edge, "
    "Tensor? seed, float scale, float slope, float dropout"
)
_library = torch.library.Library("pyg_dfgnn", "DEF")
_library.define(f"attention_forward({_OPERANDS}, bool exact) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"attention_backward({_OPERANDS}, Tensor out, Tensor lse, Tensor grad_out, bool same, bool edge_grad) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(f"attention_weights({_OPERANDS}, Tensor lse) -> Tensor")
_library.define("attention_inverse_norm(Tensor x) -> Tensor")


class _Walk:
    """The kernels of one pass over one side of a graph, with the arguments that all its launches share."""

    def __init__(self, source: str, entry: str, chosen: Pass, side: Adjacency, num_columns: int) -> None:
        self.chosen = chosen
        self.num_rows = side.num_rows
        constants = chosen.constants
        spec = Spec(source, tuple(constants.items()))
        self.kernel = Kernel(spec, entry)
        self.merge = Kernel(spec, f"{entry}_merge")
        self.items_per_block = constants["WARPS"] * constants["WARP_ROWS"]
        self.head_groups = -(-constants["HEADS"] // (constants["HEAD_SLOTS"] * constants["LANE_HEADS"]))
        self.threads = (32 * constants["WARPS"], 1, 1)
        self.chunks: list[Chunks | None]
        if chosen.blocks == 1:
            self.chunks = [side.chunks(chosen.max_edges)]
            self.arrays = (side.ptr, side.index, side.edge_id)
        else:
            swept = side.column_blocks(chosen.blocks, chosen.max_edges, num_columns)
            self.chunks = swept.chunks
            self.arrays = (swept.ptr, swept.index, swept.edge_id)
        self.max_chunks = max((c.num_chunks for c in self.chunks if c is not None), default=0)
        self.sweeps = [self._arguments(block, chunks) for block, chunks in enumerate(self.chunks)]
        # Thread blocks of one sweep, the same for all so that per-block results have a fixed place.
        self.grid = (-(-(self.num_rows + self.max_chunks) // self.items_per_block), self.head_groups, 1)

    def _arguments(self, block: int, chunks: Chunks | None) -> tuple[Argument, ...]:
        listed = (None, None, None) if chunks is None else (chunks.row, chunks.begin, chunks.end)
        count = 0 if chunks is None else chunks.num_chunks
        sizes = (self.num_rows, count, self.chosen.max_edges, block, self.chosen.blocks)
        return addresses((*self.arrays, *listed, *sizes))

    def run(
        self,
        device: torch.device,
        elements: int,
        shared: tuple[Argument, ...],
        outputs: tuple[Argument, ...],
        merge_inputs: tuple[Argument, ...],
        merge_outputs: tuple[Argument, ...],
    ) -> None:
        """Sweep all column blocks; heavy rows are merged after each.

        Args:
            device: Where to run.
            elements: fp32 numbers of the state of one row or chunk.
            shared: Inputs of the kernel, after the adjacency.
            outputs: Its outputs, before the two state buffers.
            merge_inputs: Inputs of the merge kernel, after the chunks' states.
            merge_outputs: Its outputs, before the rows' states.
        """
        partial = _states(self.max_chunks, elements, device)
        carry = _states(self.num_rows, elements, device) if self.chosen.blocks > 1 else None
        for block, (sweep, chunks) in enumerate(zip(self.sweeps, self.chunks, strict=True)):
            launch(self.kernel, self.grid, self.threads, (*sweep, *shared, *outputs, partial, carry), device)
            if chunks is None:
                continue
            grid = (-(-chunks.num_heavy // self.items_per_block), self.head_groups, 1)
            sizes = (chunks.num_heavy, chunks.num_chunks, self.num_rows, block, self.chosen.blocks)
            merge = (chunks.heavy_row, chunks.heavy_ptr, *sizes, partial, *merge_inputs, *merge_outputs, carry)
            launch(self.merge, grid, self.threads, merge, device)


def _states(count: int, elements: int, device: torch.device) -> Tensor | None:
    return torch.empty(count * elements, dtype=torch.float32, device=device) if count else None


class _Prepared:
    """A launch plan with its kernels and their shared arguments; kept with the graph."""

    def __init__(self, launch_plan: LaunchPlan, graph: Graph) -> None:
        self.plan = launch_plan
        csr = (launch_plan.forward, graph.csr, graph.num_src)
        self.forward = _Walk("attention/forward.cu", "attention_forward", *csr)
        if launch_plan.forward.blocks == 1:
            self.weights = _Walk("attention/weights.cu", "attention_weights", *csr)
        else:
            whole = replace(launch_plan.forward, blocks=1)
            self.weights = _Walk("attention/weights.cu", "attention_weights", whole, graph.csr, graph.num_src)
        if launch_plan.targets is not None and launch_plan.sources is not None:
            self.targets = _Walk(
                "attention/backward_targets.cu",
                "attention_backward_targets",
                launch_plan.targets,
                graph.csr,
                graph.num_src,
            )
            self.sources = _Walk(
                "attention/backward_sources.cu",
                "attention_backward_sources",
                launch_plan.sources,
                graph.csc,
                graph.num_dst,
            )


class _Call:
    """One operator call, ready to launch: the graph, its plan and the arguments every kernel takes."""

    def __init__(self, operands: Operands, needs_grad: bool) -> None:
        self.operands = o = operands
        self.graph = graph = Graph.resolve(o.edge_index, o.num_src, o.num_dst, o.self_loops, o.transposed)
        _, self.heads, self.channels = o.value.shape
        self.device = o.value.device
        key = (
            o.score,
            self.heads,
            self.channels,
            o.value.dtype,
            o.edge is None,
            o.dropout > 0.0,
            needs_grad,
            current(),
        )
        found = graph.plans.get(key)
        if found is None:
            problem = AttentionProblem(
                o.score,
                self.heads,
                self.channels,
                o.value.dtype,
                self.device,
                o.edge is not None,
                o.dropout > 0.0,
                needs_grad,
            )
            found = graph.plans[key] = _Prepared(plan(problem, graph), graph)
        self.prepared: _Prepared = found
        self.target, self.key, self.value = _aligned(o.target), _aligned(o.key), _aligned(o.value)
        self.target_scalars, self.source_scalars = _aligned(o.target_scalars), _aligned(o.source_scalars)
        self.parameter = _aligned(o.parameter)
        self.shared = (
            self.target,
            self.key,
            self.value,
            self.target_scalars,
            self.source_scalars,
            self.parameter,
            _aligned(o.edge),
            o.seed,
            o.scale,
            o.slope,
            o.dropout,
        )

    def empty(self, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(
            (rows, self.heads, self.channels), dtype=dtype or self.operands.value.dtype, device=self.device
        )

    def empty_heads(self, rows: int) -> Tensor:
        return torch.empty((rows, self.heads), dtype=torch.float32, device=self.device)


def _aligned(tensor: Tensor | None) -> Tensor | None:
    """A contiguous tensor whose address allows 16-byte loads."""
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _empty_as(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and with ``exact`` the output in float32 (else empty)."""
    *operands, exact = arguments
    call = _Call(Operands(*operands), needs_grad=False)
    rows = call.operands.num_dst
    out, lse = call.empty(rows), call.empty_heads(rows)
    copy = call.empty(rows if exact else 0, torch.float32)
    results = (out, lse, copy if exact else None)
    elements = call.heads * (call.channels + 2)
    call.prepared.forward.run(call.device, elements, call.shared, results, (), results)
    return out, lse, copy


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *operands, exact = arguments
    o = Operands(*operands)
    _, heads, channels = o.value.shape
    return (
        o.value.new_empty((o.num_dst, heads, channels)),
        o.value.new_empty((o.num_dst, heads), dtype=torch.float32),
        o.value.new_empty((o.num_dst if exact else 0, heads, channels), dtype=torch.float32),
    )


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of (target or its scalars, key, value, source scalars, parameter, edge); empty where there is none."""
    count = len(Operands._fields)
    same, edge_grad = arguments[count + 3 :]
    call = _Call(Operands(*arguments[:count]), needs_grad=True)
    o, device, heads, channels = call.operands, call.device, call.heads, call.channels
    out, lse, grad_out = (_aligned(tensor) for tensor in arguments[count : count + 3])
    nothing = torch.empty(0, dtype=o.value.dtype, device=device)

    targets = call.prepared.targets
    delta = call.empty_heads(o.num_dst)
    grad_target = call.empty_heads(o.num_dst) if o.score == "add" else call.empty(o.num_dst)
    grad_edge = _empty_as(o.edge) if edge_grad else None
    grad_beta = call.empty_heads(o.num_dst) if o.score == "cosine" else None
    parameter_sums = None
    if o.score == "gatv2":
        parameter_sums = call.empty(targets.grid[0] * targets.chosen.blocks, torch.float32)
    targets.run(
        device,
        heads * (1 if o.score == "add" else channels),
        call.shared,
        (out, lse, grad_out, delta, grad_target, grad_beta, grad_edge, parameter_sums),
        (call.target, call.target_scalars, call.parameter, o.scale),
        (grad_target, grad_beta),
    )

    grad_value = call.empty(o.num_src)
    grad_key = call.empty(o.num_src) if o.score == "dot" else None
    grad_source = call.empty_heads(o.num_src) if o.score == "add" else None
    results = (grad_key, grad_value, grad_source, grad_target if same else None)
    call.prepared.sources.run(
        device,
        heads * {"dot": 2 * channels, "cosine": 2 * channels, "add": channels + 1, "gatv2": channels}[o.score],
        call.shared,
        (lse, grad_out, delta, *results),
        (call.value, call.source_scalars, call.parameter, o.scale),
        results,
    )

    grad_parameter = None
    if grad_beta is not None:
        grad_parameter = grad_beta.sum().reshape(1)
    elif parameter_sums is not None:
        grad_parameter = parameter_sums.sum(0)
    found = (None if same else grad_target, grad_key, grad_value, grad_source, grad_parameter, grad_edge)
    return tuple(nothing if grad is None else grad for grad in found)  # type: ignore[return-value]


def _backward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    count = len(Operands._fields)
    o = Operands(*arguments[:count])
    _, _, _, same, edge_grad = arguments[count:]
    value = o.value
    _, heads, channels = value.shape
    nothing = value.new_empty(0)

    def scalars(rows: int) -> Tensor:
        return value.new_empty((rows, heads), dtype=torch.float32)

    grad_target = scalars(o.num_dst) if o.score == "add" else value.new_empty((o.num_dst, heads, channels))
    return (
        nothing if same else grad_target,
        value.new_empty((o.num_src, heads, channels)) if o.score == "dot" else nothing,
        value.new_empty((o.num_src, heads, channels)),
        scalars(o.num_src) if o.score == "add" else nothing,
        nothing if o.parameter is None else _empty_as(o.parameter),
        _empty_as(o.edge) if edge_grad else nothing,
    )


def _weights(*arguments: Any) -> Tensor:
    *operands, lse = arguments
    call = _Call(Operands(*operands), needs_grad=False)
    walk = call.prepared.weights
    weights = call.empty_heads(call.graph.num_edges)
    launch(walk.kernel, walk.grid, walk.threads, (*walk.sweeps[0], *call.shared, lse, weights), call.device)
    return weights


def _weights_fake(*arguments: Any) -> Tensor:
    o = Operands(*arguments[:-1])
    edges = torch.library.get_ctx().new_dynamic_size() if o.self_loops else o.edge_index.shape[1]
    return o.value.new_empty((edges, o.value.shape[1]), dtype=torch.float32)


def _inverse_norm(x: Tensor) -> Tensor:
    rows, heads, channels = x.shape
    constants = norm_constants(heads, channels, x.dtype)
    norms = torch.empty((rows, heads), dtype=torch.float32, device=x.device)
    grid = (
        -(-rows // (constants["WARPS"] * constants["WARP_ROWS"])),
        -(-heads // (constants["HEAD_SLOTS"] * constants["LANE_HEADS"])),
        1,
    )
    threads = (32 * constants["WARPS"], 1, 1)
    launch(_norm_kernel(heads, channels, x.dtype), grid, threads, (_aligned(x), rows, norms), x.device)
    return norms


@cache
def _norm_kernel(heads: int, channels: int, dtype: torch.dtype) -> Kernel:
    return Kernel(
        Spec("attention/norm.cu", tuple(norm_constants(heads, channels, dtype).items())), "attention_inverse_norm"
    )


def _inverse_norm_fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:2], dtype=torch.float32)


for _name, _implementation, _fake in (
    ("attention_forward", _forward, _forward_fake),
    ("attention_backward", _backward, _backward_fake),
    ("attention_weights", _weights, _weights_fake),
    ("attention_inverse_norm", _inverse_norm, _inverse_norm_fake),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pyg_dfgnn::{_name}", _fake, lib=_library)


class _Attention(torch.autograd.Function):
    """Fused attention; ``value`` doubles as target where both are one tensor (``same``)."""

    @staticmethod
    def forward(ctx: Any, same: bool, *arguments: Any) -> tuple[Tensor, Tensor]:
        o = Operands(*arguments)
        # Where the gradient of a row is a sum of terms that cancel, backward needs more than a 16-bit output.
        exact = any(ctx.needs_input_grad) and o.score in ("add", "gatv2") and o.value.dtype.itemsize == 2
        out, lse, copy = torch.ops.pyg_dfgnn.attention_forward(*arguments, exact)
        saved_out = copy if exact else out
        ctx.save_for_backward(*(a for a in arguments if isinstance(a, Tensor)), saved_out, lse)
        ctx.layout = tuple(None if isinstance(a, Tensor) else (a,) for a in arguments)
        ctx.same = same
        ctx.edge_grad = o.edge is not None and ctx.needs_input_grad[1 + Operands._fields.index("edge")]
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Any, ...]:
        *saved, out, lse = ctx.saved_tensors
        tensors = iter(saved)
        arguments = [next(tensors) if entry is None else entry[0] for entry in ctx.layout]
        o = Operands(*arguments)
        target, key, value, source, parameter, edge = torch.ops.pyg_dfgnn.attention_backward(
            *arguments, out, lse, grad_out, ctx.same, ctx.edge_grad
        )
        grads: dict[str, Tensor] = {"value": value}
        if o.score == "add":
            grads["source_scalars"] = source
            grads["target_scalars"] = target
        elif not ctx.same:
            grads["target"] = target
        if o.score == "dot":
            grads["key"] = key
        if o.parameter is not None:
            grads["parameter"] = parameter
        if ctx.edge_grad:
            grads["edge"] = edge
        return (None, *(grads.get(name) for name in Operands._fields))


_FEATURE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _check_graph(graph: Edges) -> torch.device:
    """The device of the edges."""
    if isinstance(graph, Graph):
        return graph.device
    if not isinstance(graph, EdgeSet):
        raise TypeError(f"'graph' needs a Graph or an EdgeSet (got {type(graph).__name__})")
    check_edge_index(graph.edge_index)
    return graph.edge_index.device


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
    same: bool = False,
    return_weights: bool = False,
) -> Any:
    seed = _draw_seed(value.device) if dropout_p > 0.0 else None
    arguments = Operands(
        *graph.key,
        score,
        target,
        key,
        value,
        target_scalars,
        source_scalars,
        parameter,
        edge,
        seed,
        scale,
        slope,
        dropout_p,
    )
    if torch.compiler.is_compiling():
        arguments = _without_repeats(arguments)
    out, lse = _Attention.apply(same, *arguments)
    if not return_weights:
        return out
    with torch.no_grad():
        detached = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
        return out, torch.ops.pyg_dfgnn.attention_weights(*detached, lse)


def _reference_keep(graph: Edges, heads: int, dropout_p: float, device: torch.device) -> Tensor | None:
    if dropout_p == 0.0:
        return None
    edges = graph.edge_index.shape[1]
    return dropout_factor(torch.arange(edges, device=device), heads, dropout_p, _draw_seed(device))


def _as_graph(graph: Edges) -> Graph:
    return graph if isinstance(graph, Graph) else Graph.resolve(*graph.key)


def _reference_result(result: tuple[Tensor, Tensor], return_weights: bool) -> Any:
    return (result[0], result[1].detach()) if return_weights else result[0]


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
        Shape [N_dst, H, C]; with ``return_weights`` also the weights after dropout [E, H], detached, in the order of
        ``graph.edge_index``.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, device or range does not fit.

    Source: Vaswani et al., "Attention Is All You Need" (2017); Shi et al., arXiv 2009.03509 (edge features).
    """
    device = _check_graph(graph)
    _check("value", value, device, N_src=graph.num_src, H=None, C=None)
    _, heads, channels = value.shape
    _check("key", key, device, N_src=graph.num_src, H=heads, C=channels)
    _check("query", query, device, N_dst=graph.num_dst, H=heads, C=channels)
    if edge is not None:
        _check("edge", edge, device, E=_num_edges(graph), H=heads, C=channels)
    check_range("dropout_p", dropout_p, 0.0, 1.0)
    if scale is None:
        scale = 1.0 / math.sqrt(max(1, channels))
    check_range("scale", scale)
    dtype = _common_dtype(query, key, value, edge)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    edge = None if edge is None else edge.to(dtype)
    if not _fusable("dot", value, dtype, edge is not None, dropout_p):
        plain = _as_graph(graph)
        keep = _reference_keep(plain, value.shape[1], dropout_p, value.device)
        result = reference.dot_attention(
            plain.edge_index, plain.num_dst, query, key, value, edge=edge, scale=scale, keep=keep
        )
        return _reference_result(result, return_weights)
    return _run(
        graph,
        "dot",
        target=query,
        key=key,
        value=value,
        edge=edge,
        scale=scale,
        dropout_p=dropout_p,
        return_weights=return_weights,
    )


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
    device = _check_graph(graph)
    _check("x_src", x_src, device, N_src=graph.num_src, H=None, C=None)
    _, heads, channels = x_src.shape
    same = x_dst is x_src or (x_dst is None and graph.num_dst == graph.num_src)
    target: Any = x_src if same else x_dst
    _check("x_dst", target, device, N_dst=graph.num_dst, H=heads, C=channels)
    check_range("dropout_p", dropout_p, 0.0, 1.0)
    if isinstance(beta, Tensor):
        check_dtype("beta", beta, _FEATURE_DTYPES)
        check_device("beta", beta, device)
        if beta.numel() != 1:
            raise ValueError(f"'beta' needs one element (got shape {list(beta.shape)})")
        beta = beta.reshape(1)
    else:
        check_range("beta", beta)
        beta = torch.full((1,), float(beta), dtype=torch.float32, device=device)
    dtype = _common_dtype(x_src, target)
    x_src, target = x_src.to(dtype), target.to(dtype)
    if not _fusable("cosine", x_src, dtype, False, dropout_p):
        plain = _as_graph(graph)
        keep = _reference_keep(plain, x_src.shape[1], dropout_p, x_src.device)
        result = reference.cosine_attention(
            plain.edge_index, plain.num_dst, x_src, target, beta=beta.to(dtype), keep=keep
        )
        return _reference_result(result, return_weights)
    with torch.no_grad():
        source_norms = torch.ops.pyg_dfgnn.attention_inverse_norm(x_src.detach())
        target_norms = source_norms if same else torch.ops.pyg_dfgnn.attention_inverse_norm(target.detach())
    return _run(
        graph,
        "cosine",
        target=target.detach() if same else target,
        value=x_src,
        target_scalars=target_norms,
        source_scalars=source_norms,
        parameter=beta.float(),
        dropout_p=dropout_p,
        same=same,
        return_weights=return_weights,
    )


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
    device = _check_graph(graph)
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
        plain = _as_graph(graph)
        keep = _reference_keep(plain, value.shape[1], dropout_p, value.device)
        result = reference.add_attention(
            plain.edge_index,
            plain.num_dst,
            value,
            alpha_src,
            alpha_dst,
            alpha_edge=alpha_edge,
            negative_slope=negative_slope,
            keep=keep,
        )
        return _reference_result(result, return_weights)
    return _run(
        graph,
        "add",
        value=value,
        source_scalars=alpha_src.float(),
        target_scalars=alpha_src.new_zeros(graph.num_dst, heads).float() if alpha_dst is None else alpha_dst.float(),
        edge=None if alpha_edge is None else alpha_edge.float(),
        slope=negative_slope,
        dropout_p=dropout_p,
        return_weights=return_weights,
    )


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
    device = _check_graph(graph)
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
        plain = _as_graph(graph)
        keep = _reference_keep(plain, x_src.shape[1], dropout_p, x_src.device)
        result = reference.gatv2_attention(
            plain.edge_index,
            plain.num_dst,
            x_src,
            x_dst,
            att.to(dtype),
            edge=edge,
            negative_slope=negative_slope,
            keep=keep,
        )
        return _reference_result(result, return_weights)
    return _run(
        graph,
        "gatv2",
        target=x_dst,
        value=x_src,
        parameter=att.float(),
        edge=edge,
        slope=negative_slope,
        dropout_p=dropout_p,
        return_weights=return_weights,
    )
