r"""Aggregation over the edges of a graph: every statistic that is asked for in one gather; softmax of segments.

.. math::
    O_{is} = \mathrm{stat}_s \{ m_{ij} : j \in N(i) \}

All functions run on CPU tensors and in float64 through the reference implementation.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_dfgnn.dispatch.segment import FAMILY, CusparsePlan, SegmentProblem, max_channels, reads_no_edge, specs_of
from pyg_dfgnn.errors import check_bool, check_choice
from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.graph.adjacency import outside_capture
from pyg_dfgnn.ir.segment import SUM_OF
from pyg_dfgnn.ops.core import GraphLike, Op, check_graph
from pyg_dfgnn.ops.eager import differentiable
from pyg_dfgnn.ops.function import OpCall, makers
from pyg_dfgnn.ops.prepared import PreparedPass
from pyg_dfgnn.ops.relational.program import gradients
from pyg_dfgnn.ops.traversal import NodeKernel, NodeLaunch, TraversalLaunch
from pyg_dfgnn.runtime.cusparse import SpMM
from pyg_dfgnn.settings import Settings
from pyg_dfgnn.statements.segment import AVERAGES, MESSAGES, MOMENTS, STATS, SUMS, statement_of

_COUNT = {"forward": 16, "args": 16, "targets": 20, "sources": 24}
"""Arguments of the statement's pass that the kernel takes."""
_MERGED = {
    "forward": (2, 4, 5, 6, *range(9, 16)),
    "args": (2, 4, 5, 6, *range(9, 16)),
    "targets": (19,),
    "sources": (4, 5, 16, 19, 20),
}
"""Places of the arguments that the merge kernel takes between its two states."""
_OF_NODES = (6, 9, 14, 16, 17, 18)
"""Places of the arguments that the pass over targets of moments takes."""


class CusparseLaunch(PreparedPass):
    """A sum over the rows of one side by cuSPARSE.

    The matrix with its descriptors, workspace and preprocessing is kept with the graph, once for each stream.
    """

    def __init__(self, problem: SegmentProblem, direction: str, plan: Any, graph: Graph) -> None:
        self.plan, self.device = plan, graph.device
        side = graph.side(direction)
        self._places = (2, 9) if direction == "forward" else (16, 20)

        def ones() -> Tensor:
            return outside_capture(torch.ones(graph.num_edges, dtype=problem.dtype, device=graph.device))

        key = "cusparse", direction, problem.channels, problem.dtype, plan.algorithm
        self._matrices: dict[int, SpMM] = graph.derived(key, dict)
        values = graph.derived(("ones", problem.dtype), ones)
        self._operands = side.rowptr, side.col, values, side.num_cols, problem.channels, plan.algorithm

    def __call__(self, graph: Graph, arguments: Sequence[Any], carry: Any = None) -> None:
        """Launch the product."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        matrix = self._matrices.get(stream)
        if matrix is None:
            # A capture records a product that another stream has prepared: it would not run what prepares one.
            capturing = torch.cuda.is_current_stream_capturing()
            if capturing and not self._matrices:
                raise RuntimeError("a product by cuSPARSE needs a call before the capture of a CUDA graph (got none)")
            matrix = next(iter(self._matrices.values())) if capturing else SpMM(*self._operands)
            self._matrices[stream] = matrix
        matrix(*(arguments[place] for place in self._places))


def prepare(problem: SegmentProblem, direction: str, plan: Any, graph: Graph, flags: frozenset[str]) -> Any:
    """Return the launches of a pass.

    Args:
        problem: What is computed.
        direction: A pass of the statement, or "args" for the forward pass that leaves the keys of extremes.
        plan: How the pass runs.
        graph: The edges.
        flags: Optional values that the forward pass has left.
    """
    if isinstance(plan, CusparsePlan):
        return CusparseLaunch(problem, direction, plan, graph)
    (spec,) = specs_of(problem, direction, plan)
    entry = "segment_" + spec.path.removeprefix("segment/").removesuffix(".cu")
    if reads_no_edge(problem, direction):
        return NodeLaunch(plan, NodeKernel(spec, entry), _OF_NODES)
    counted = direction in ("forward", "args") and problem.has_moments
    elements = problem.fragments(direction) * problem.channels + counted
    return TraversalLaunch(plan, direction, graph, spec, entry, elements, _COUNT[direction], _MERGED[direction])


def _op_of(message: str, stats: tuple[str, ...], self_loops: bool) -> Op:
    """Return the op of a message and some of ``STATS``, with or without self-loops that no array holds."""

    def problem(inputs: Mapping[str, Any], numbers: Mapping[str, float], heads: int, channels: int) -> SegmentProblem:
        value, of_source, of_target = (inputs[name] for name in ("value", "source_scale", "target_scale"))
        scaled = of_source is not None, of_target is not None
        edge_channels = inputs["edge"].shape[1] if MESSAGES[message].edge == "row" else 0
        return SegmentProblem(message, stats, channels, value.dtype, value.device, *scaled, self_loops, edge_channels)

    def optional(problem: SegmentProblem, graph: Graph | None, settings: Settings) -> frozenset[str]:
        return frozenset({"args"}) if set(stats) - set(SUMS) else frozenset()

    again = partial(_again, message, stats, self_loops)
    return Op(
        statement_of(MESSAGES[message], stats, self_loops), FAMILY, problem, prepare, optional=optional, again=again
    )


def _again(
    message: str, stats: tuple[str, ...], self_loops: bool, call: OpCall, inputs: Mapping[str, Any], grad: Tensor
) -> dict[str, Tensor] | None:
    """Return the gradients of sums and means by programs, or None (:attr:`Op.again`)."""
    source_scale, target_scale, inverse_degree = map(inputs.get, ("source_scale", "target_scale", "inverse_degree"))
    if not set(stats) <= set(SUMS) or (source_scale is not None and message not in ("copy", "weight")):
        return None
    program = SUM_OF[message]
    features = {name: tensor.float() for name in program.domains if (tensor := inputs[name]) is not None}
    if source_scale is not None:
        features["value"] = features["value"] * source_scale.unsqueeze(1)
    if message == "weight":
        features["edge"] = features["edge"].unsqueeze(1)
    parts = [grad] if len(stats) == 1 else grad.unbind(1)
    factors = [1.0 if inverse_degree is None or stat == "sum" else inverse_degree.unsqueeze(1) for stat in stats]
    total = reduce(torch.add, [part * factor for part, factor in zip(parts, factors, strict=True)]).float()
    total = total if target_scale is None else total * target_scale.unsqueeze(1)
    grad_inputs = gradients(program, call.graph, features, {"out": total})
    if grad_inputs is None:
        return None
    if "value" in grad_inputs:
        value = grad_inputs["value"] + total if self_loops else grad_inputs["value"]
        grad_inputs["value"] = value if source_scale is None else value * source_scale.unsqueeze(1)
    return {name: grad_inputs[name].view(inputs[name].shape).to(inputs[name].dtype) for name in grad_inputs}


def aggregate(
    graph: GraphLike,
    x: Tensor,
    stats: str | Sequence[str] = "sum",
    *,
    message: str = "copy",
    edge: Tensor | None = None,
    key: Tensor | None = None,
    target: Tensor | None = None,
    lin_weight: Tensor | None = None,
    lin_bias: Tensor | None = None,
    source_scale: Tensor | None = None,
    target_scale: Tensor | None = None,
    self_loops: bool = False,
) -> Tensor:
    r"""Statistics of the messages that each target receives, all from one gather.

    .. math:: O_{is} = \mathrm{stat}_s \{ a_j \, m_{ij} : j \in N(i) \}, \quad O_i = b_i \sum_j a_j \, m_{ij}

    The variance is :math:`E[(m - E[m])^2]` and the standard deviation :math:`\sqrt{\max(var, 10^{-5})}`, or 0 where
    that is at most :math:`\sqrt{10^{-5}}`, as PyG has it. A target without edges gets zeros, and 1 for a product.
    Gradients of a maximum or minimum are shared evenly among its ties, and those of a product of zeros are what torch's
    `scatter_reduce` gives.

    Args:
        graph: The edges; of :meth:`~pyg_dfgnn.graph.Graph.of_index` or :meth:`~pyg_dfgnn.graph.Graph.of_ptr` for a
            reduction of the rows of `x`.
        x: Features :math:`v` of the sources, shape [N_src, F].
        stats: One of ``STATS``, or a sequence of them.
        message: `"copy"` for :math:`v_j`, `"weight"` for :math:`e_{ij} v_j`, `"add"` for :math:`v_j + e_{ij}`,
            `"relu_add"` for :math:`\max(v_j + e_{ij}, 0)`, `"relu_linear"` for :math:`\max(v_j + W e_{ij} + b, 0)`,
            `"gate"` for :math:`\sigma(t_i + k_j) v_j`.
        edge: Shape [E] for `"weight"`, [E, F] for `"add"` and `"relu_add"`, [E, D] for `"relu_linear"`, in the order of
            ``graph.edge_index``.
        key: Features :math:`k` of the sources, shape [N_src, F], for `"gate"`.
        target: Features :math:`t` of the targets, shape [N_dst, F], for `"gate"`.
        lin_weight: :math:`W^T`, shape [D, F], for `"relu_linear"`; kernels hold few numbers per edge, such as 8 for 128
            features in float32.
        lin_bias: :math:`b`, shape [F], for `"relu_linear"`.
        source_scale: Factors :math:`a` of the messages, float32 [N_src]; no gradient of them is computed.
        target_scale: Factors :math:`b` of sums and means, float32 [N_dst]; no gradient of them is computed.
        self_loops: Whether each node has one more edge, to itself, that the graph does not hold: a `"sum"` of `"copy"`
            over as many sources as targets.

    Returns:
        Shape [N_dst, F] for a name, [N_dst, S, F] for a sequence of S names.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape, device or name does not fit, or the message needs an input that is None.
    """
    names = (stats,) if isinstance(stats, str) else tuple(stats)
    distinct, reads, places = _request(names, message, self_loops)
    # Tuples that torch.compile of torch 2.11 cannot compare.
    if (edge is None) is not reads[0] or (key is None) is not reads[1] or (target is None) is not reads[2]:
        _refuse_operands(message, edge=edge, key=key, target=target)
    if (lin_weight is None) is not reads[3] or (lin_bias is None) is not reads[3]:
        _refuse_operands(message, lin_weight=lin_weight, lin_bias=lin_bias)
    graph, _ = check_graph(graph)
    if self_loops and graph.num_src != graph.num_dst:
        sizes = f"{graph.num_src} sources and {graph.num_dst} targets"
        raise ValueError(f"'self_loops' needs as many sources as targets (got {sizes})")
    if target_scale is not None and not set(names).isdisjoint(MOMENTS):
        raise ValueError("'target_scale' needs None for variances and standard deviations (got a tensor)")
    of_degree = None if set(names).isdisjoint(AVERAGES) else inverse_degree(graph)
    op, most = getattr(_ops, _name_of(message, distinct, self_loops)), max_channels(distinct)
    # In the order of the statement.
    inputs = target, key, x, edge, source_scale, target_scale, of_degree, lin_weight, lin_bias
    has_kernels = isinstance(graph, Graph) or not graph.by_torch
    if has_kernels and isinstance(x, Tensor) and x.dim() == 2 and x.size(1) > most:
        out = _in_pieces(op, -(-x.size(1) // most), graph, inputs)
    else:
        out = op(graph, inputs, (), heads=1)
    if isinstance(stats, str):
        return out
    if len(distinct) == 1:
        out = out.unsqueeze(1)
    return out if places is None else out[:, places]


_requests: dict[Any, tuple[tuple[str, ...], tuple[bool, bool, bool, bool], list[int] | None]] = {}
# By attribute: torch.compile reads a dictionary once, before the trace adds to it.
_ops = SimpleNamespace()


@torch.compiler.assume_constant_result
def _name_of(message: str, stats: tuple[str, ...], self_loops: bool) -> str:
    return f"{message} {' '.join(stats)} {self_loops}"


@torch.compiler.assume_constant_result
def _request(
    names: tuple[str, ...], message: str, self_loops: bool
) -> tuple[tuple[str, ...], tuple[bool, bool, bool, bool], list[int] | None]:
    """Return what follows from the names of a call of :func:`aggregate`, worked out once, and make its op.

    Returns:
        The distinct names, whether edge, key, target and a linear layer are absent, and the place of each name where
        one repeats.
    """
    known = _requests.get((names, message, self_loops))
    if known is None:
        if not names:
            raise ValueError(f"'stats' needs at least one of {', '.join(STATS)} (got none)")
        for name in names:
            check_choice("stats", name, STATS)
        check_choice("message", message, tuple(MESSAGES))
        check_bool("self_loops", self_loops)
        if self_loops and (message, *names) != ("copy", "sum"):
            raise ValueError(
                f"'self_loops' needs False for other than the sum of copies (got {', '.join(names)} of {message!r})"
            )
        record = MESSAGES[message]
        distinct = tuple(dict.fromkeys(names))
        places = None if distinct == names else [distinct.index(name) for name in names]
        known = distinct, (record.edge is None, not record.key, not record.target, record.edge != "row"), places
        key = message, distinct, self_loops
        if not hasattr(_ops, _name_of(*key)):
            setattr(_ops, _name_of(*key), _op_of(*key))
        _requests[names, message, self_loops] = known
    return known


def _make(start: str) -> None:
    """Make the op that the name of a statement spells, if it is one of an aggregation."""
    family, *rest = start.split("/")
    if family == "segment" and len(rest) > 1:
        message, stats, *loops = rest
        _request(tuple(stats.split("+")), message, bool(loops))


makers.append(_make)


def _refuse_operands(message: str, **operands: Tensor | None) -> None:
    """Raise the error of an operand that a message does not read, or of one that it misses."""
    for name, tensor in operands.items():
        record = MESSAGES[message]
        is_read = record.edge == "row" if name.startswith("lin_") else bool(getattr(record, name))
        if (tensor is None) == is_read:
            raise ValueError(
                f"{name!r} needs {'a tensor' if is_read else 'None'} for the message {message!r} "
                f"(got {'None' if tensor is None else 'a tensor'})"
            )


def _in_pieces(op: Op, pieces: int, graph: GraphLike, inputs: Sequence[Tensor | None]) -> Tensor:
    """Return what kernels compute of so many pieces of wide features, side by side."""
    columns = [
        tensor.tensor_split(pieces, dim=-1) if tensor is not None and _has_channels(op, name) else [tensor] * pieces
        for name, tensor in zip(op.statement.input_names, inputs, strict=True)
    ]
    return torch.cat([op(graph, column, (), heads=1) for column in zip(*columns, strict=True)], dim=-1)


def _has_channels(op: Op, name: str) -> bool:
    """Return whether the last dimension of an input is that of the features."""
    return op.statement.values[name].shape[-1:] == ("C",)


def inverse_degree(graph: GraphLike) -> Tensor:
    """Return ``1 / max(degree, 1)`` of each target, float32 [N_dst]; a graph keeps it."""
    return of_degrees(graph, "inverse_degree", "targets", lambda degree: degree.clamp(min=1).reciprocal())


def inverse_root_degree(graph: GraphLike, domain: str = "targets", self_loops: bool = False) -> Tensor:
    """Return ``degree ** -0.5``, or 0 without edges, of each "targets" or "sources" node, float32; a graph keeps it.

    With ``self_loops`` each node has one more edge, to itself, that the graph does not hold.
    """
    if self_loops:
        return of_degrees(graph, "inverse_root_degree_with_loops", domain, lambda degree: (degree + 1).rsqrt())
    return of_degrees(
        graph, "inverse_root_degree", domain, lambda degree: degree.pow(-0.5).masked_fill(degree == 0, 0.0)
    )


def symmetric_norm(edge_index: Tensor, weight: Tensor, degree: Tensor) -> Tensor:
    r"""Return :math:`w_{ij} / \sqrt{d_i d_j}`, or 0 where a degree is 0.

    Torch's operators, whose gradients for the degrees are sums by atomics: those of an index in brackets are sorted
    first, on many edges for longer than all else.

    Args:
        edge_index: The ends of the edges, [2, E].
        weight: Their weights :math:`w`, [E].
        degree: The degree :math:`d` of each node, [N].
    """
    # Autocast would leave it in float32.
    root = degree.pow(-0.5).to(degree.dtype)
    root = root.masked_fill(root == torch.inf, 0.0)
    return root.index_select(0, edge_index[0]) * weight * root.index_select(0, edge_index[1])


def of_degrees(graph: GraphLike, name: str, domain: str, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a function of the degrees of a domain; a graph whose edges stay keeps it."""
    if not isinstance(graph, Graph):
        return function(_counted_degrees(graph, domain))

    def build() -> Tensor:
        side = graph.csr if domain == "targets" else graph.csc
        return function(side.rowptr.diff().float())

    return build() if graph.is_static else graph.derived((name, domain), lambda: outside_capture(build()))


def _counted_degrees(edges: EdgeSet, domain: str) -> Tensor:
    """Return the degrees of a domain, float32, where torch.compile traces."""
    rows, size = (edges.edge_index, edges.num_dst) if domain == "targets" else (edges.edge_index.flip(0), edges.num_src)
    ends = rows[0 if edges.transposed else 1]
    counts = (rows[0] != rows[1]).float() if edges.self_loops else torch.ones_like(ends, dtype=torch.float32)
    degrees = counts.new_zeros(size).index_add(0, ends, counts)
    if edges.self_loops:
        degrees = degrees + (torch.arange(size, device=ends.device) < min(edges.num_src, edges.num_dst))
    return degrees


def _at_rows(graph: Graph, values: Tensor) -> Tensor:
    """Return the values [G, F] of the group of each row, [E, F]."""
    return values.index_select(0, graph.csc.col)


def _total(graph: Graph, powers: Tensor) -> Tensor:
    return aggregate(graph, powers, "sum") + 1e-16


def _of_powers(graph: Graph, grad: Tensor, powers: Tensor, total: Tensor) -> Tensor:
    # Float32, in which the difference of two gradients keeps its digits.
    inner = aggregate(graph, powers.float() * grad, "sum") / total
    return ((grad - _at_rows(graph, inner)) / _at_rows(graph, total)).to(powers.dtype)


def _softmax_again(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
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
    @differentiable(_softmax_again)
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
    full. `scatter_reduce`, which :func:`aggregate` follows, divides both, and gives a part of
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
