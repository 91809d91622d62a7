"""Base classes of the convs on a normalised adjacency: the factors of their messages."""

import weakref
from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import Adj, OptTensor

from pyg_dfgnn.dispatch.segment import max_channels
from pyg_dfgnn.fallback import FEW, NO_DEVICE, SMALL, report_fallback
from pyg_dfgnn.frontend.derived import EdgeDerived
from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.graph.build import bounds_of, pull, refuse_ids
from pyg_dfgnn.graph.derived import version_of
from pyg_dfgnn.graph.ends import Part
from pyg_dfgnn.nn import conv_call
from pyg_dfgnn.nn.conv.aggregation import NEW_NUMBERS, AggregationConv, MessageInputs, ProblemFields, is_matrix
from pyg_dfgnn.nn.conv_call import ConvCall
from pyg_dfgnn.nn.gate import NO_MATRIX, edges_lack_kernels, statistics_of
from pyg_dfgnn.nn.on_cpu import call_on_cpu
from pyg_dfgnn.nn.registry import is_described
from pyg_dfgnn.ops.segment import aggregate, inverse_root_degree, symmetric_norm
from pyg_dfgnn.ops.visits import (
    is_new,
    is_new_outside_captures,
    is_refilled,
    may_be_left,
    may_not_wait,
)
from pyg_dfgnn.torch_private import cuda_stream

_SCALED = {"sum", "mean"}
_FEW_HOPS = 3
"""Sums over new edges of a call up to which PyG's code takes less of the host than kernels."""
_NEW, _KNOWN = "new edges", "known edges"
"""Forms of edges whose messages operators of torch sum: PyG's norm of the last ones is kept, or of all that stay."""
_BATCHED = (NO_MATRIX,)
"""Reasons where nothing but a dimension before that of the nodes is against kernels."""
_KNOWN_NUMBERS, _WEIGHTED_NUMBERS = 1 << 23, 1 << 24
"""Numbers in rows of known edges below which operators of torch sum them in less time than the host takes for kernels,
without weights and with; the latter also of new edges whose rows are wide."""


def _norm(
    edge_index: Tensor, weight: Tensor | None, num_nodes: int, improved: bool, self_loops: bool, dtype: torch.dtype
) -> list[Tensor | None]:
    """Return PyG's normalised edges, None where they are the given ones, and their weights."""
    if may_not_wait(edge_index):
        edges, weight = _norm_at_once(edge_index, weight, num_nodes, 2.0 if improved else 1.0, self_loops, dtype)
    else:
        edges, weight = gcn_norm(edge_index, weight, num_nodes, improved, self_loops, dtype=dtype)
    # What kept the edges alive would be kept for ever.
    return [None if edges is edge_index else edges, weight]


def _checked_norm(edge_index: Tensor, weight: Tensor | None, num_nodes: int, *options: Any) -> list[Tensor | None]:
    """Return what :func:`_norm` does.

    Raises:
        IdRangeError: An id is out of range; what is captured is not told.
    """
    if not (edge_index.is_cuda and torch.cuda.is_current_stream_capturing()):
        refuse_ids(pull(*bounds_of(*edge_index.unbind(0))), num_nodes, num_nodes, edge_index.size(1))
    return _norm(edge_index, weight, num_nodes, *options)


_kept_norm = EdgeDerived(_checked_norm, most=32, are_fixed=True)
_last: tuple[Any, ...] | None = None
"""Weak references to the last new edges and weights, what else their norm depends on, and the norm."""


def _forget(edges: weakref.ref) -> None:
    """Drop the last norm where its edges are gone."""
    global _last
    if _last is not None and _last[0] is edges:
        _last = None


def _shared_norm(edge_index: Tensor, weight: Tensor | None, *options: Any) -> list[Tensor | None]:
    """Return what :func:`_norm` does, once for all layers of a model."""
    global _last
    if edge_index.is_cuda and torch.cuda.is_current_stream_capturing():
        # Between replays weights may be written anew, and what a capture computes is there after the first one.
        return _norm(edge_index, weight, *options)
    stream = cuda_stream(edge_index.get_device()) if edge_index.is_cuda else None
    key = edge_index._version, None if weight is None else weight._version, stream, *options
    # Another thread may replace it at any time.
    last = _last
    if last is not None and last[0]() is edge_index and last[1]() is weight and last[2] == key:
        return last[3]  # type: ignore[no-any-return]
    norm = _norm(edge_index, weight, *options)
    _last = weakref.ref(edge_index, _forget), _no_weight if weight is None else weakref.ref(weight), key, norm
    return norm


def _no_weight() -> None:
    """Stand in for a reference to weights."""


def _may_keep(edge_index: Tensor, weight: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether the norm of edges is a function of them, and of weights that no gradient is asked of."""
    # The dtype of other norms depends on autocast.
    if dtype is not torch.float32 or is_refilled() or torch.is_inference_mode_enabled() or edge_index.is_inference():
        return False
    if weight is None:
        return True
    # Optimizers with a fused kernel edit what they train without a trace.
    return not weight.requires_grad and not weight.is_inference() and weight.dtype is torch.float32


def _norm_at_once(
    edge_index: Tensor, weight: Tensor | None, num_nodes: int, fill: float, self_loops: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the normalised edges and their weights, for which the host does not wait.

    A self-loop per node is behind the edges, and own ones stay but weigh nothing: only sums do not see them.
    """
    row, col = edge_index.unbind(0)
    if weight is None:
        weight, fill = torch.ones(row.size(0), dtype=dtype, device=row.device), 1.0
    if self_loops:
        is_loop, nodes = row == col, torch.arange(num_nodes, device=row.device)
        # All other edges write behind the last node.
        places = torch.where(is_loop, row, num_nodes)
        loops = weight.new_full((num_nodes + 1,), fill).index_put((places,), weight)[:-1]
        weight = torch.cat([torch.where(is_loop, 0, weight), loops])
        edge_index = torch.cat([edge_index, nodes.expand(2, -1)], dim=1)
        row, col = edge_index.unbind(0)
    degree = weight.new_zeros(num_nodes).index_add(0, col, weight)
    # Padding has nodes of no degree, at which the gradient of a root is none.
    is_none = degree == 0
    root = degree.masked_fill(is_none, 1.0).pow(-0.5).to(weight.dtype).masked_fill(is_none, 0.0)
    return edge_index, root.index_select(0, row) * weight * root.index_select(0, col)


class NormalizedConv(AggregationConv):
    r"""A conv on `\hat{D}^{-1/2} \hat{A} \hat{D}^{-1/2}`, with or without self-loops in `\hat{A}`.

    Without edge weights both factors belong to nodes and are kept with the graph; no weight of an edge is made.
    """

    normalize = True
    """Default of convs without this argument."""
    add_self_loops = False
    improved = False
    cached = False
    _drops = False
    """Whether weights of edges are dropped in this call."""
    _cached_edge_index: tuple[Tensor, Tensor] | None
    _follows_pyg = True
    """Whether the forward is PyG's but for its sums, so that it takes the same features at no further cost."""
    _hop_count = "K"
    """The attribute with the number of sums over the edges, one where there is none."""
    _keeps_edges = False
    """Whether `cached` is about the normalised edges."""

    def _problem_fields(self, x: Any = None, edge: Tensor | None = None) -> ProblemFields:
        message, names, channels, *_ = super()._problem_fields(x, edge)
        by_node = self.normalize and self._is_by_node(edge)
        return "weight" if self.normalize and not by_node else message, names, channels, by_node, 0

    @property
    def _takes_cache(self) -> bool:
        """Whether a call takes the normalised edges of an earlier one, or leaves its own to later ones."""
        return self._keeps_edges and (self.cached or self._cached_edge_index is not None)

    def _is_by_node(self, edge: Tensor | None) -> bool:
        """Return whether factors of nodes will do for a normalisation, so that no weights are made."""
        return edge is None and not self._drops and _SCALED.issuperset(statistics_of(self.aggr_module))

    def _call(self, x: Tensor, edge_index: Adj | Graph, edge_weight: Tensor | None = None) -> ConvCall:
        return self._ask_normalized(x, edge_index, edge_weight)

    def _is_few(self, x: Any, edge_index: Any, edge: Tensor | None) -> bool:
        return self._is_small(x, edge_index, edge) and self._takes_operators(edge_index, x, x)

    def _is_small(self, x: Any, edge_index: Any, edge: Tensor | None) -> bool:
        """Return whether operators of torch sum the numbers of known edges in less time than kernels."""
        if not self.normalize or not self._follows_pyg or self._takes_cache or not may_be_left(edge_index):
            return False
        if not isinstance(x, Tensor) or not _may_keep(edge_index, edge, x.dtype):
            return False
        if edge is None and self._count_hops() > 1:
            return False
        return self._is_below(x, edge_index, _KNOWN_NUMBERS if edge is None else _WEIGHTED_NUMBERS)

    def _count_hops(self) -> int:
        return self.__dict__.get(self._hop_count, 1)  # type: ignore[no-any-return]

    def _form_of_few(self, x: Tensor, edge_index: Any, edge_weight: Tensor | None) -> str | None:
        """Return the form of edges that PyG's code or its operators take in less time than kernels; None of others."""
        # With a cache the first edges are those of all calls.
        if not self.normalize or self._takes_cache:
            return None
        if edge_weight is not None and is_new(self, edge_index):
            return _NEW
        if edge_weight is None:
            # Without self-loops PyG's norm is a few launches, which kernels save from some hops on.
            is_plain, most, is_asked = not self.add_self_loops, NEW_NUMBERS, is_new_outside_captures
            if not is_plain and self._is_cut(x):
                # A capture may follow calls none of which has sorted the edges.
                is_plain, most, is_asked = True, _WEIGHTED_NUMBERS, is_new
            is_plain = is_plain and self._count_hops() <= _FEW_HOPS
            if not is_plain and not self._is_small(x, edge_index, None):
                return None
            if is_asked(self, edge_index):
                return _NEW if is_plain and self._is_below(x, edge_index, most) else None
        is_small = self._is_small(x, edge_index, edge_weight)
        return _KNOWN if is_small and self._takes_operators(edge_index, x, x) else None

    def _is_cut(self, x: Tensor) -> bool:
        """Return whether kernels cut the wide rows of a sum, which operators of torch take whole."""
        if not self._follows_pyg or self._row_width(x) <= max_channels(("sum",)) or is_refilled():
            return False
        return statistics_of(self._modules["aggr_module"]) == ("sum",)

    def _takes_operators(self, edge_index: Any, source: Any, target: Any) -> bool:
        if not self._follows_pyg or self._takes_cache or not super()._takes_operators(edge_index, source, target):
            return False
        # Self-loops that weigh nothing are seen by other statistics.
        is_sum = statistics_of(self._modules["aggr_module"]) == ("sum",)
        return is_sum or not self.add_self_loops or not may_not_wait(edge_index)

    def _ask_normalized(self, x: Any, edge_index: Any, edge_weight: Tensor | None, *reasons: str) -> ConvCall:
        """Ask the gate about a call whose edges are to be normalised, if the conv does so."""
        if type(edge_index) is Tensor and not edge_index.is_cuda and (call := call_on_cpu(edge_index)) is not None:
            return call
        is_rows = isinstance(x, Tensor) and x.dim() == 2
        loops = self.normalize and self.add_self_loops
        is_plain = is_rows and type(edge_index) is Tensor
        if is_plain and not loops and self._is_compiled_few(edge_index, self._row_width(x)):
            return ConvCall(FEW, (), edge_index, "tensor")
        is_batch = type(edge_index) is Tensor and edge_index.is_cuda and isinstance(x, Tensor) and not is_rows
        few = self._form_of_few(x, edge_index, edge_weight) if is_rows else None
        if (few is not None or is_batch) and not reasons and not is_described():
            why = _BATCHED if is_batch else FEW
            if few is _KNOWN or self._takes_operators(edge_index, x, x):
                report_fallback(type(self).__name__, why)
                if few is None:
                    few = _NEW if is_new(self, edge_index) else _KNOWN
                return ConvCall((), (), edge_index, few, edge_weight)
            if is_batch or edge_weight is not None or not loops or not self._is_cut(x):
                return ConvCall(why, (), edge_index, "tensor")
            few = None
        if edges_lack_kernels(edge_index):
            return ConvCall([NO_DEVICE, *conv_call.id_reasons(edge_index)], (), edge_index, "tensor")
        against = list(reasons)
        form = conv_call.form_of(edge_index)
        if isinstance(x, Tensor) and x.dim() != 2:
            return ConvCall([*against, NO_MATRIX], (), edge_index, form)
        if not isinstance(x, Tensor):
            against.append("x is no tensor")
            x = None
        if self._is_part(edge_index) and self.normalize and self._is_by_node(edge_weight) and not self._takes_cache:
            return self._ask_part(
                self._problem_fields(x), x, edge_index, self_loops=self.add_self_loops, reasons=against
            )
        is_bare = form == "SparseTensor" and not edge_index.has_value() and not self.improved
        if is_matrix(form) and loops and not (is_bare and self._is_by_node(None)):
            against.append("self-loops added to the values of a sparse adjacency")
        if few is not None:
            against.append(SMALL)
        if self.normalize and self._takes_cache:
            kept: Any = self._cached_edge_index
            if torch.compiler.is_compiling():
                against.append("cached=True while compiling")
            if is_matrix(form) or (kept is not None and is_matrix(conv_call.form_of(kept[0]))):
                against.append("cached=True with a sparse adjacency")
        return self._check_support((x, x), edge_index, edge_weight, self_loops=loops, reasons=tuple(against))

    def _normalized(self, call: ConvCall, x: Tensor) -> MessageInputs:
        """Return what a call without reasons sends.

        Args:
            call: The call.
            x: The features as the user passed them.

        Raises:
            ValueError: There are other numbers of weights and edges.
        """
        if call.form in (_NEW, _KNOWN):
            edges, weight = call.edge_index, call.edge_attr
            if self.normalize:
                options = x.size(-2), self.improved, self.add_self_loops, x.dtype
                norm: Any = _kept_norm if call.form == _KNOWN else _shared_norm
                norm = norm if _may_keep(edges, weight, x.dtype) else _norm
                kept, weight = norm(edges, weight, *options)
                edges = edges if kept is None else kept
            return MessageInputs(edges, weight)
        if not self.normalize:
            return self._message_inputs(call)
        by_node = self._is_by_node(call.edge_attr)
        if call.part is not None:
            return self._of_part(call, call.part, x)
        if self._takes_cache:
            return self._from_cache(call, x, by_node)
        new = self._new_edges(call) if by_node else None
        if new is not None:
            return MessageInputs(new, scale=inverse_root_degree(new), dtype=x.dtype)
        plain = self._without_self_loops(call)
        if plain is not None:
            return MessageInputs(
                plain, scale=inverse_root_degree(plain, self_loops=True), dtype=x.dtype, self_loops=True
            )
        graph, _, _ = self._edges(call, measured=True)
        if by_node:
            return MessageInputs(graph, scale=inverse_root_degree(graph), dtype=x.dtype)
        weight = self._normalized_weight(call, graph, x)
        return MessageInputs(graph, weight, dtype=weight.dtype)

    def _of_part(self, call: ConvCall, part: Part, x: Tensor) -> MessageInputs:
        """Return what a call with a part of a graph sends: degrees are those of the whole graph, one exchange each."""
        graph, _, _ = self._edges(call, measured=True)
        scale, key = inverse_root_degree(graph), ("inverse_root_degree", bool(call.self_loops))
        if key not in part.kept:
            # Later calls may record gradients.
            with torch.inference_mode(False), torch.no_grad():
                part.kept[key] = part.exchange(scale.clone().view(-1, 1)).view(-1)
        return MessageInputs(graph, scale=scale, dtype=x.dtype, part=part, source_scale=part.kept[key])

    def _without_self_loops(self, call: ConvCall) -> Graph | None:
        """Return the edges where each node gets a self-loop and none has one, so that no array need hold them."""
        is_sum = self._is_by_node(call.edge_attr) and statistics_of(self.aggr_module) == ("sum",)
        if not call.self_loops or not is_sum or torch.compiler.is_compiling():
            return None
        graph, _, _ = self._edges(call.replace(self_loops=False), measured=True)
        return None if isinstance(graph, EdgeSet) or graph.has_loops else graph

    def _as_run(self, problem: Any, call: ConvCall, x: Tensor, *_: Any, **__: Any) -> tuple[Any, ConvCall]:
        # A description leaves nothing to later calls.
        if self._takes_cache and self._cached_edge_index is None:
            return problem, call
        return self._as_sent(problem, call, self._normalized(call, x))

    def _normalized_weight(self, call: ConvCall, graph: Graph | EdgeSet, x: Tensor) -> Tensor:
        """Return the normalised weights of a graph's edges, [E]; the host waits for no device."""
        ends = graph.edge_index
        if isinstance(graph, Graph) and graph.is_bare:
            # An id out of range leaves its edge out, and only a later call is told.
            ends = ends.clamp(0, x.size(0) - 1)
        if call.edge_attr is None:
            weight = x.new_ones(ends.size(1))
        else:
            weight = self._weight(call)
            if graph is not call.edge_index and graph.self_loops:
                weight = self._with_loops(call, cast(Graph, graph), weight)
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        degree = aggregate(graph, wide.new_ones(graph.num_src, 1), message="weight", edge=wide).view(-1)
        return symmetric_norm(ends, wide, degree).to(weight.dtype)

    def _with_loops(self, call: ConvCall, graph: Graph, weight: Tensor) -> Tensor:
        """Return the weights in the order of a graph with replaced self-loops, which keep the weights they had."""
        kept = graph.kept
        assert kept is not None

        def build() -> tuple[Tensor, Tensor]:
            is_loop = torch.ones(weight.size(0), dtype=torch.bool, device=weight.device).index_fill(0, kept, False)
            places = is_loop.nonzero().view(-1)
            return places, self._plain(call)[0].index_select(0, places)

        places, nodes = graph.derived("own_loops", build)
        loops = weight.new_full((min(graph.num_src, graph.num_dst),), 2.0 if self.improved else 1.0)
        loops = loops.index_put((nodes,), weight.index_select(0, places))
        return torch.cat([weight.index_select(0, kept), loops])

    def _from_cache(self, call: ConvCall, x: Tensor, by_node: bool) -> MessageInputs:
        """Return what the edges of the first call send, which stay until `reset_parameters`, as in PyG."""
        is_first = self._cached_edge_index is None
        if is_first:
            users = None if call.edge_attr is None else self._weight(call)
            options = x.size(0), self.improved, self.add_self_loops, self.flow, x.dtype
            self._cached_edge_index = gcn_norm(self._plain(call), users, *options)
        edge_index, weight = cast(tuple[Tensor, Tensor], self._cached_edge_index)
        graph = Graph.of(edge_index, x.size(0), flow=self.flow)
        # An edit of the weights ends that they are factors of nodes.
        key = "unit_weights", id(weight), version_of(weight)
        if is_first and call.edge_attr is None and not weight.is_inference():
            graph.derived(key, lambda: weight)
        if by_node and graph.get(key) is weight:
            return MessageInputs(graph, scale=inverse_root_degree(graph), dtype=weight.dtype)
        return MessageInputs(graph, weight, dtype=weight.dtype)


class LinearHopsConv(NormalizedConv):
    """A conv whose one linear map follows what it makes of several hops, which it keeps on demand."""

    propagate_type = {"x": Tensor, "edge_weight": OptTensor}
    lin: Any
    _kept: str
    """The attribute in which PyG keeps the rows before the map."""

    def forward(self, x: Tensor, edge_index: Adj | Graph, edge_weight: OptTensor = None) -> Tensor:
        """PyG's forward, also on a `Graph`; see the class of the same name in `torch_geometric.nn`."""
        kept: Tensor | None = getattr(self, self._kept)
        if kept is not None:
            return cast(Tensor, self.lin(kept.detach()))
        call = self._call(x, edge_index, edge_weight)
        if call.reasons:
            return cast(Tensor, self._fall_back(call, x, edge_weight))
        return cast(Tensor, self.lin(self._hops(self._normalized(call, x), x)))

    def _hops(self, sent: MessageInputs, x: Tensor) -> Tensor:
        """Return the rows before the map, having kept them if asked to."""
        raise NotImplementedError
