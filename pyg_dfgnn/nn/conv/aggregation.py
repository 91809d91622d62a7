"""Base of the convs that aggregate messages: the question to the gate, what travels along the edges, the op."""

import inspect
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.typing import OptTensor, SparseTensor
from torch_geometric.utils import scatter

from pyg_dfgnn.dispatch.core import explain
from pyg_dfgnn.dispatch.segment import FAMILY, SegmentProblem, max_channels, unsupported_reasons
from pyg_dfgnn.errors import check_shape
from pyg_dfgnn.fallback import CPU, SMALL, report_fallback
from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.graph.ends import Part, PartitionedEdges
from pyg_dfgnn.nn import conv_call
from pyg_dfgnn.nn.conv_call import ConvCall
from pyg_dfgnn.nn.gate import FusedConv, finalize_dtype, is_multiple, lacks_kernels, only_reduces, statistics_of
from pyg_dfgnn.nn.registry import Description
from pyg_dfgnn.ops import visits
from pyg_dfgnn.ops.eager import PLAIN
from pyg_dfgnn.ops.segment import aggregate, inverse_degree
from pyg_dfgnn.statements.segment import AVERAGES, STATS

_BY_TORCH = ("sum",), ("mean",), ("max",)
"""Statistics of an aggregation that few operators of torch compute."""
_SUMS = ("sum", "add", "mean")
_FEW_OPERATORS = ("copy", "relu_add")
"""Messages that few operators of torch make."""
NEW_NUMBERS = 40_000_000
"""Numbers in rows of new edges below which PyG's code sums them in less time than the edges take to be sorted too."""
_KNOWN_NUMBERS = 1 << 25
"""Numbers in rows of edges below which PyG's code sums them in less time than the host takes for kernels; with a factor
per edge a quarter."""
ProblemFields = tuple[str, tuple[str, ...], int, bool, int]
"""The message, statistics, channels, whether nodes have scales, and numbers per edge that a linear layer maps."""


class MessageInputs(NamedTuple):
    """Edges of a call, and the factors of its messages.

    Attributes:
        graph: The edges; an `edge_index` where operators of torch sum the messages.
        weight: A factor of each message, [E]; None for 1.
        scale: A factor of each message at either end of its edge, float32 [N], that no gradient is asked of.
        dtype: Dtype that PyG's weights would have; None without.
        self_loops: Whether each node sends to itself too, on an edge that the graph does not hold.
        part: The part of a partitioned graph, whose halo is fetched of what is sent; None of a whole graph.
        source_scale: Scale of own nodes and halo; None of a whole graph.
        message: Message without a weight, of those of :func:`pyg_dfgnn.ops.segment.aggregate`.
        vectors: Inputs of that message by name; None without.
    """

    graph: Graph | EdgeSet | Tensor
    weight: Tensor | None = None
    scale: Tensor | None = None
    dtype: torch.dtype | None = None
    self_loops: bool = False
    part: Part | None = None
    source_scale: Tensor | None = None
    message: str = "copy"
    vectors: dict[str, Tensor] | None = None


def _problem(
    message: str,
    names: tuple[str, ...],
    channels: int,
    scaled: bool,
    edge_channels: int,
    dtype: torch.dtype,
    device: torch.device,
    *_: bool,
) -> SegmentProblem:
    """Return what dispatch is asked of one launch; the op cuts wider features."""
    distinct = tuple(dict.fromkeys(names))
    launches = max(1, -(-channels // max_channels(distinct)))
    scales = scaled, scaled, False
    return SegmentProblem(message, distinct, -(-channels // launches), dtype, device, *scales, edge_channels)


def _width(x: Any) -> int:
    """Return the features of the rows that send."""
    x = x if isinstance(x, Tensor) else x[0] if isinstance(x, (tuple, list)) else None
    return x.size(-1) if x is not None and x.dim() > 0 else 1


MATRICES = ("torch.sparse", "SparseTensor")
"""Forms of edges that are a sparse adjacency, whose values may weigh messages."""


def is_matrix(form: str) -> bool:
    """Return whether edges of a form are a sparse adjacency."""
    return form in MATRICES


def values_of(adjacency: Any) -> Tensor | None:
    """Return the values of a sparse adjacency, in the order of its edges; None of a `SparseTensor` without."""
    if isinstance(adjacency, SparseTensor):
        values: Tensor | None = adjacency.coo()[2]
        return values
    return adjacency._values() if adjacency.layout == torch.sparse_coo else adjacency.values()  # type: ignore[no-any-return]


class AggregationConv(FusedConv):
    """A drop-in conv whose messages need no softmax: what it aggregates, in one gather, is all its statistics."""

    _problem_type = staticmethod(_problem)
    _numbers_per_edge_of = staticmethod(lambda question: question[2])
    _reasons_against = staticmethod(unsupported_reasons)
    _node_dim = -2
    _fused_statistics = frozenset(STATS)
    _message = "copy"
    """Message without a factor per edge, of those of :func:`pyg_dfgnn.ops.segment.aggregate`."""
    _is_projected = False
    """Whether a linear layer comes before the aggregation."""
    _channels: str | None = None
    """Attribute with the width of what is aggregated; None for that of `x`."""
    _writes = 1
    """Times that PyG's code takes for a row of that width per edge, in those of a sum."""
    _factor = "edge_weight"
    """Name of the factor per edge in PyG's message."""
    project = False
    """Whether a linear layer and a ReLU come before the aggregation: an attribute of PyG's SAGEConv."""
    _makes_edges = False
    """Whether PyG's code makes the edges of its sum in each call, for which it waits for the device."""

    def _problem_fields(self, x: Any = None, edge: Tensor | None = None) -> ProblemFields:
        message = "weight" if edge is not None and self._message == "copy" else self._message
        # The length of a range is a constant to torch.compile, as the width has to be, also after other widths.
        channels = len(range(x.size(-1))) if isinstance(x, Tensor) and x.dim() > 0 else 1
        if self._channels is not None:
            channels = getattr(self, self._channels)
        return message, statistics_of(self._modules["aggr_module"]), channels, False, 0

    def _plan(self, problem: SegmentProblem, graph: Graph) -> Any:
        if not set(problem.stats).isdisjoint(AVERAGES):
            inverse_degree(graph)
        return explain(FAMILY, problem, graph, torch.is_grad_enabled())

    def _check_support(
        self,
        x: Any,
        edge_index: Any,
        edge: Tensor | None = None,
        *,
        size: Any = None,
        self_loops: bool = False,
        weighted: bool | None = True,
        by_role: bool = False,
        reasons: tuple[str, ...] = (),
    ) -> ConvCall:
        """Ask the gate about a call.

        Args:
            x: Features of the nodes, or a pair whose first sends.
            edge_index: Any form that PyG takes, or a `Graph`.
            edge: Factors [E] or features [E, F] of the edges.
            size: Declared numbers of nodes.
            self_loops: Whether the edges have one self-loop per node in place of their own.
            weighted: Whether values of a sparse adjacency weigh messages; None: as in PyG's convs without edge weights.
            by_role: Whether the first of a pair belongs to the row of the sources, which is row 1 in the other flow;
                if not, to row 0, as PyG's `propagate` has it for pairs.
            reasons: What the conv has against the fused forward.

        Returns:
            The call, with its reasons; `edge_attr` holds what the messages read of the edges.
        """
        against = list(reasons)
        nodes = (x, x) if isinstance(x, Tensor) else tuple(x) if isinstance(x, (tuple, list)) else (None, None)
        source = nodes[0]
        if by_role and self.flow != "source_to_target":
            nodes = nodes[::-1]
        if source is None:
            against.append("x is missing on the side that sends")
        form = conv_call.form_of(edge_index)
        if form in MATRICES:
            if edge is not None:
                against.append("edge weights or features beside a sparse adjacency")
            elif weighted if weighted is not None else form == "torch.sparse" and self.fuse:
                edge = values_of(edge_index)
            if edge is not None and (edge.dim() > 1 or edge.requires_grad or edge_index.requires_grad is True):
                against.append("a sparse adjacency with gradients or edge features")
        if edge is not None and isinstance(source, Tensor):
            is_wide = edge.dtype is torch.float64 and source.dtype is not torch.float64
            if is_wide or not edge.is_floating_point():
                against.append(f"edge weights or features in {edge.dtype}")
        question = self._problem_fields(source, edge)
        if question[0] == "weight":
            if edge is not None and edge.numel() == 1 != conv_call.num_edges(edge_index):
                against.append("the edge weight is to be broadcast")
            if self_loops and torch.compiler.is_compiling():
                against.append("edge weights and self-loops while compiling")
        call = self._gate(
            question, nodes, edge_index, size=size, self_loops=self_loops, one_way=not by_role, reasons=against
        )
        return call if edge is None else call.replace(edge_attr=edge)

    def _is_part(self, edge_index: Any) -> bool:
        """Return whether kernels may take the edges of a part of a graph."""
        if not isinstance(edge_index, PartitionedEdges) or torch.compiler.is_compiling():
            return False
        return self.flow == "source_to_target" and edge_index.is_whole

    def _ask_part(self, question: ProblemFields, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> ConvCall:
        """Ask the gate about a call with a part of a graph, whose sources are own nodes and halo; the rest as there."""
        part, sources = edge_index.part, None
        if isinstance(x, Tensor) and x.dim() == 2:
            sources = x.new_empty(1, 1).expand(part.num_sources, x.size(1))
        call = self._gate(question, (sources, x), part.edge_index, *args, **kwargs)
        # PyG's code fetches what it gathers.
        return call.replace(edge_index=edge_index, form="PartitionedEdges") if call.reasons else call.replace(part=part)

    def _is_left(self, x: Any, edge_index: Any, edge: Tensor | None = None) -> bool:
        """Return whether PyG's code takes a call in less time: its edges are few, and new or summed by two launches."""
        if type(edge_index) is not Tensor or visits.step.is_refilled:
            return False
        if torch.compiler.is_compiling():
            # What is new is not known then, and torch.compile fuses what PyG launches.
            return visits.may_be_few(edge_index) and self._is_below(x, edge_index, visits.MEASURED_NUMBERS)
        if visits.is_last(self, edge_index):
            return self._is_below(x, edge_index, NEW_NUMBERS)
        if lacks_kernels(edge_index):
            report_fallback(type(self).__name__, CPU)
            return True
        kind = type(self), self.aggr, _width(x), edge is None
        if visits.is_known_few(edge_index, kind):
            return True
        if self._is_few(x, edge_index, edge):
            visits.know_few(edge_index, kind)
            return True
        return visits.is_new(self, edge_index) and self._is_below(x, edge_index, NEW_NUMBERS)

    def _is_below(self, x: Any, edge_index: Tensor, numbers: int) -> bool:
        """Return whether PyG's code takes new edges in less time than kernels, the time to sort them included."""
        writes = self._writes if self.aggr in _SUMS else max(self._writes, 2)
        return edge_index.size(-1) * writes * self._row_width(x) < numbers

    def _row_width(self, x: Any) -> int:
        """Return the numbers in the row of an edge."""
        return _width(x) if self._channels is None else getattr(self, self._channels)

    def _is_few(self, x: Any, edge_index: Any, edge: Tensor | None) -> bool:
        """Return whether a call is a sum of so few features that PyG's code takes it in less time."""
        if self._message not in _FEW_OPERATORS or self._makes_edges:
            return False
        if statistics_of(self._modules["aggr_module"]) != ("sum",) or not visits.may_be_left(edge_index):
            return False
        is_weighted = edge is not None and self._message == "copy"
        return edge_index.size(-1) * _width(x) < (_KNOWN_NUMBERS // 4 if is_weighted else _KNOWN_NUMBERS)

    def _reduced(self, x: Any, edge_index: Any, size: Any = None, **edges: OptTensor) -> tuple[Any, bool]:
        """Return the messages of a call, reduced, or PyG's output of it where neither kernels nor few operators run.

        One function holds all of it, because each further call takes time of the host in every forward.

        Args:
            x: Features of the nodes, or a pair whose first sends.
            edge_index: Edges.
            size: Declared numbers of nodes.
            edges: What PyG's message reads of the edges.

        Returns:
            Reduced messages, [N_dst, F], or the output; and whether it is the output.
        """
        source, target = (x, x) if isinstance(x, Tensor) else x
        values = edges.values()
        if not self._is_left(x, edge_index, *values):
            call = self._call(x, edge_index, *values, size=size)
            if call.reasons:
                return self._fall_back(call, x, *values, size=size), True
            if self.project:
                source = self.lin(source).relu()
            return self._aggregate(self._message_inputs(call), source), False
        if self.project or size is not None or not self._takes_operators(edge_index, source, target):
            return visits.run_left(super().forward, x, edge_index, *values, size=size), True
        try:
            return self._reduce(edge_index, source, target.size(-2), **edges), False
        except (IndexError, RuntimeError, ValueError):
            # PyG's propagate tells what is wrong.
            return visits.run_left(super().forward, x, edge_index, *values, size=size), True

    def _takes_operators(self, edge_index: Any, source: Any, target: Any) -> bool:
        """Return whether PyG's propagation of a call gathers, makes messages and reduces them, and does no more."""
        return (
            statistics_of(self._modules["aggr_module"]) in _BY_TORCH
            and edge_index.dtype is torch.int64
            and edge_index.dim() == 2
            and edge_index.size(0) == 2
            and type(source) in PLAIN
            and type(target) in PLAIN
            and source.dim() > 1
            and self.flow == "source_to_target"
            and self.node_dim == self._node_dim
            and only_reduces(self)
        )

    def _reduce(self, edge_index: Tensor, x: Tensor, num_dst: int, **edges: OptTensor) -> Tensor:
        """Return the messages of a call that :meth:`_takes_operators` admits, reduced by operators of torch."""
        senders, receivers = edge_index.unbind(0)
        rows = self.message(x.index_select(-2, senders), **edges)
        # `index_add_` is slower on many edges and keeps the rows for backward.
        return scatter(rows, receivers, rows.dim() - 2, num_dst, statistics_of(self._modules["aggr_module"])[0])

    def _describe(self, device: torch.device | None, *args: Any, **kwargs: Any) -> Description:
        description = super()._describe(device, *args, **kwargs)
        if not description.fused:
            return description
        arguments = inspect.signature(self.forward).bind(*args, **kwargs).arguments
        edge = next((arguments[name] for name in ("edge_attr", "edge_weight") if name in arguments), None)
        if not self._is_few(arguments["x"], arguments["edge_index"], edge):
            return description
        return Description(description.layer, (SMALL,), description.problem)

    def _as_sent(self, problem: SegmentProblem, call: ConvCall, sent: MessageInputs) -> tuple[SegmentProblem, ConvCall]:
        """Return the problem and the call of a description where this travels along the edges."""
        message = problem.message if sent.weight is None else "weight"
        scaled = sent.scale is not None
        problem = replace(
            problem, message=message, source_scaled=scaled, target_scaled=scaled, self_loops=sent.self_loops
        )
        return problem, call.replace(edge_index=sent.graph, form="Graph", edge_attr=None, self_loops=False)

    def _plain(self, call: ConvCall) -> Tensor:
        """Return the edges of a call as PyG's functions take them, int64 [2, E]."""
        edge_index: Any = call.edge_index
        if call.form == "Graph":
            return conv_call.edges_in_flow(edge_index, self.flow)
        # PyG's scatter takes int64 only.
        plain: Tensor = edge_index.as_tensor() if call.form == "EdgeIndex" else edge_index
        return plain.long()

    def _storage_dtype(self, x: Tensor) -> torch.dtype:
        return super()._storage_dtype(x) if self._is_projected else x.dtype

    def _edges(self, call: ConvCall, *_: Any, measured: bool = False) -> tuple[Graph | EdgeSet, Tensor | None, Any]:
        # The messages read the edges as they are: nothing is made of their features for the loops.
        return super()._edges(call if call.edge_attr is None else call.replace(edge_attr=None), measured=measured)

    def _message_inputs(self, call: ConvCall) -> MessageInputs:
        """Return what a call without reasons sends, where nothing is normalised.

        Raises:
            ValueError: There are other numbers of weights and edges.
        """
        graph, _, _ = self._edges(call)
        if call.edge_attr is None:
            return MessageInputs(graph, message=self._message)
        weight = self._weight(call)
        return MessageInputs(graph, weight, dtype=weight.dtype)

    def _weight(self, call: ConvCall) -> Tensor:
        """Return the factors of a call's messages, [E]."""
        assert call.edge_attr is not None
        weight = call.edge_attr.reshape(-1)
        count = conv_call.num_edges(call.edge_index)
        check_shape("edge_weight", weight, (count,), f"[E={count}]")
        return weight

    def _aggregate(self, sent: MessageInputs, x: Tensor, **vectors: Tensor) -> Tensor:
        """Return what the conv's aggregation module makes of all messages.

        Args:
            sent: What travels along the edges.
            x: Features of the sources, [N_src, F].
            vectors: Inputs of the message that `sent` lacks.

        Returns:
            Shape [N_dst, F], wider where several statistics are concatenated.
        """
        module = self._modules["aggr_module"]
        if isinstance(sent.graph, Tensor):
            return self._reduce(sent.graph, x, x.size(-2), **{self._factor: sent.weight})
        names = statistics_of(module)
        several = is_multiple(module)
        if sent.part is not None:
            x = sent.part.exchange(x)
        message = sent.message
        if sent.weight is not None:
            message, vectors["edge"] = "weight", sent.weight
        elif sent.vectors is not None:
            vectors = sent.vectors
        out = aggregate(
            sent.graph,
            x,
            names if several else names[0],
            message=message,
            source_scale=sent.scale if sent.part is None else sent.source_scale,
            target_scale=sent.scale,
            self_loops=sent.self_loops,
            **vectors,
        )
        if sent.dtype is not None:
            out = finalize_dtype(out, torch.promote_types(x.dtype, sent.dtype), False)
        return module.combine(list(out.unbind(1))) if several else out  # type: ignore[union-attr, operator]
