"""One edge set as cached CSR (by target) and CSC (by source)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef
from torch_geometric import EdgeIndex

from pyg_dfgnn.errors import check_choice, check_range, check_tensor
from pyg_dfgnn.graph import forms
from pyg_dfgnn.graph.adjacency import (
    INT32_MAX,
    MAX_EDGES,
    Adjacency,
    Side,
    expand,
    group,
    longest,
    pull,
    replace_self_loops,
    transpose,
)
from pyg_dfgnn.graph.block_sparse import BlockSparse, Segments, area_of, find_segments, make_tiles, sample_fill
from pyg_dfgnn.graph.cache import GraphCache
from pyg_dfgnn.graph.node_ranges import NodeRanges, pack_segments

if TYPE_CHECKING:
    from pyg_dfgnn.graph.batch import BatchFacts

FLOWS = ("source_to_target", "target_to_source")
# Graphs are freed with the tensor they were built from; this bounds what a program holds that keeps them all.
MAX_CACHED_GRAPHS = 1024

Key = tuple[Tensor, int, int, bool, bool]

_cache = GraphCache(MAX_CACHED_GRAPHS)
# Graphs by the id of the edge_index they made themselves: found without keeping either alive.
_by_own_edge_index: weakref.WeakValueDictionary[int, Graph] = weakref.WeakValueDictionary()


class EdgeSet(NamedTuple):
    """What names a graph without building it: the flat arguments of :meth:`Graph.resolve`.

    Args:
        edge_index: int64 or int32 [2, E].
        num_src: Number of sources.
        num_dst: Number of targets.
        self_loops: Whether self-loops are replaced as PyG's GATConv does.
        transposed: Whether row 0 holds the targets.
    """

    edge_index: Tensor
    num_src: int
    num_dst: int
    self_loops: bool = False
    transposed: bool = False

    @property
    def key(self) -> Key:
        """The five fields as a plain tuple."""
        return tuple(self)  # type: ignore[return-value]


class Graph:
    """One edge set, compressed by target and, on first use, by source.

    Made by :meth:`of`, :meth:`resolve` or :meth:`of_batch`.

    All arrays are int32 on the device of the edges and never alias the user's. Each step of a build ends with its only
    host sync, which also checks that all ids are in range.

    Attributes:
        num_src: Number of sources.
        num_dst: Number of targets.
        num_edges: Number of edges E, self-loops included.
        device: Where the arrays live.
        self_loops: Whether self-loops were replaced.
        csr: Rows are targets (the groups of the softmax), `col` holds sources.
        graph_ptr: Node offsets of the graphs of a batch, int32 [num_graphs + 1]; None unless made by :meth:`of_batch`.
        max_graph_nodes: Nodes of the largest graph of the batch; None unless made by :meth:`of_batch`.
        facts: What the host knows of a batch that it trusts; None elsewhere.
        bits: Gives the bits of dense blocks for a side and the rows of a window, where the maker of a batch keeps them
            ready; None elsewhere.
        plans: Launch plans, memoised by dispatch.
        is_static: Whether other edges will be put into the same arrays, so that no list may depend on their degrees.
        pinned: Whether the cache must keep the graph for as long as its tensor lives (see :meth:`pin`).
    """

    is_static = False

    def __init__(
        self,
        csr: Adjacency,
        num_src: int,
        *,
        csc: Adjacency | None = None,
        self_loops: bool = False,
        transposed: bool = False,
        source_sorted: bool = False,
        anchor: Tensor | None = None,
        kept_mask: Tensor | None = None,
        base: Graph | None = None,
        graph_ptr: Tensor | None = None,
        max_graph_nodes: int | None = None,
        node_segments: Segments | None = None,
        facts: BatchFacts | None = None,
        bits: Callable[[str, int], Tensor] | None = None,
    ) -> None:
        self.csr = csr
        self.num_src = num_src
        self.num_dst = csr.num_rows
        self.num_edges = csr.num_edges
        self.device = csr.rowptr.device
        self.self_loops = self_loops
        self.graph_ptr = graph_ptr
        self.max_graph_nodes = max_graph_nodes
        self.facts, self.bits = facts, bits
        if node_segments is not None:
            self.__dict__["node_segments"] = node_segments
        self.plans: dict[Any, Any] = {}
        self.pinned = False
        self._csc = csc
        self._transposed = transposed
        self._source_sorted = source_sorted
        self._kept_mask = kept_mask
        # Weak, so that neither the cache nor autograd keeps the user's tensor, or a graph without loops, alive.
        self._anchor = None if anchor is None or anchor.is_inference() else TensorWeakRef(anchor)
        self._version = None if anchor is None else forms.version_of(anchor)
        self._base = None if base is None else weakref.ref(base)
        self._own_edge_index: Tensor | None = None
        self._own_version: int | None = None
        self._tiles: dict[tuple[str, int, bool], BlockSparse] = {}
        self._ranges: dict[int, NodeRanges] = {}
        # Raw handles of the streams that are known to the allocator; None on a CPU.
        self._streams: set[int] | None = None
        # Where no sync has ended the build: what another stream has to wait for.
        self._made: torch.cuda.Event | None = None
        self.reset_streams()

    def __repr__(self) -> str:
        loops = ", self_loops=True" if self.self_loops else ""
        return f"Graph({self.num_src} -> {self.num_dst} nodes, {self.num_edges} edges{loops}, {self.device})"

    # Making a graph -------------------------------------------------------------------------------------------------

    @staticmethod
    def of(
        edge_index: Any,
        num_src: int,
        num_dst: int | None = None,
        *,
        flow: str = "source_to_target",
        self_loops: bool = False,
    ) -> Graph:
        """The graph of any form of edges that PyG takes; cached for as long as the edges live and stay unchanged.

        Args:
            edge_index: int64 or int32 [2, E]; `EdgeIndex`, whose order is made use of; or an adjacency matrix `adj_t`
                [num_dst, num_src] as `torch.sparse` COO, CSR, CSC or `torch_sparse.SparseTensor`.
            num_src: Number of sources.
            num_dst: Number of targets; `num_src` if None.
            flow: Which row holds the targets: 1 for `"source_to_target"`, 0 for `"target_to_source"`.
            self_loops: Remove all self-loops and append one for each of the first `min(num_src, num_dst)` nodes, as
                PyG's `GATConv` does.

        Raises:
            TypeError: Not one of these forms, or ids of another dtype.
            ValueError: Another shape, an id out of range, more edges or nodes than int32 can count, or a flow that
                the form does not have.
        """
        check_choice("flow", flow, FLOWS)
        num_dst = num_src if num_dst is None else num_dst
        if isinstance(edge_index, EdgeIndex):
            return _resolve(edge_index, num_src, num_dst, self_loops, flow == "target_to_source")
        is_strided = type(edge_index) is Tensor and edge_index.layout is torch.strided
        if is_strided or not forms.is_adjacency(edge_index):
            return Graph.resolve(edge_index, num_src, num_dst, self_loops, flow == "target_to_source")
        if flow == "target_to_source":
            raise ValueError(
                "'flow' needs 'source_to_target' for a sparse matrix: transpose that instead (got 'target_to_source')"
            )
        anchor, version = forms.adjacency_anchor(edge_index)
        key = (id(anchor), num_src, num_dst, self_loops, False)
        graph = _cache.get(key, anchor, version)
        if graph is not None:
            return graph.on_this_stream()
        check_sizes(num_src, num_dst)
        with torch.inference_mode(False), torch.no_grad():
            edges = forms.read_adjacency(edge_index, num_src, num_dst, self_loops)
            graph = build(edges, num_src, num_dst)
        graph.self_loops = self_loops
        if version is not None:
            _cache.put(key, anchor, version, graph)
        return graph

    @staticmethod
    def resolve(edge_index: Tensor, num_src: int, num_dst: int, self_loops: bool, transposed: bool) -> Graph:
        """The graph of a flat key, from the cache if it is there: what an op does with the key it was given.

        Args:
            edge_index: int64 or int32 [2, E].
            num_src: Number of sources.
            num_dst: Number of targets.
            self_loops: Whether self-loops are replaced as PyG's `GATConv` does.
            transposed: Whether row 0 holds the targets.

        Raises:
            TypeError: `edge_index` is not an integer tensor.
            ValueError: As :meth:`of`.
        """
        graph = Graph.known(edge_index, num_src, num_dst, self_loops, transposed)
        return _resolve(edge_index, num_src, num_dst, self_loops, transposed) if graph is None else graph

    @staticmethod
    def known(edge_index: Tensor, num_src: int, num_dst: int, self_loops: bool, transposed: bool) -> Graph | None:
        """What :meth:`resolve` finds in the cache, None if that is nothing."""
        entry = _cache.entries.get((id(edge_index), num_src, num_dst, self_loops, transposed))
        if entry is None or entry.ref() is not edge_index or entry.version != edge_index._version:
            return None
        graph = entry.graph
        return graph if graph._streams is None else graph.on_this_stream()

    @staticmethod
    def of_batch(batch: Any, *, self_loops: bool = False, facts: BatchFacts | None = None) -> Graph:
        """The graph of a PyG batch, with the node offsets of its members; convs find it by `batch.edge_index`.

        If the members went through :class:`~pyg_dfgnn.graph.SortEdges`, CSR and CSC are built on the batch's device by
        scans and gathers; otherwise by the sorts of :meth:`of`.

        Args:
            batch: `Batch` or `Data` with one edge type and a tensor `edge_index`.
            self_loops: As in :meth:`of`.
            facts: What the host knows of a batch whose members are as `SortEdges` has left them: the build then
                launches a few kernels, checks nothing and waits for nothing.

        Raises:
            TypeError: The batch is heterogeneous or its `edge_index` is no integer tensor.
            ValueError: As :meth:`of`; edges were changed after the transform; an edge crosses graphs.
        """
        from pyg_dfgnn.graph.batch import build_batch, trust_batch

        edge_index = batch_edge_index(batch)
        num_nodes = batch.num_nodes
        key = (id(edge_index), num_nodes, num_nodes, False, False)
        graph = _cache.get(key, edge_index, forms.version_of(edge_index))
        if graph is None or graph.graph_ptr is None:
            check_sizes(num_nodes, num_nodes)
            with torch.inference_mode(False), torch.no_grad():
                graph = build_batch(batch, edge_index) if facts is None else trust_batch(batch, edge_index, facts)
            keep(key, edge_index, graph)
            # A variant with loops made before does not know the segments.
            _cache.entries.pop((*key[:3], True, False), None)
        if not self_loops:
            return graph.on_this_stream()
        return Graph.resolve(edge_index, num_nodes, num_nodes, True, False) if graph._anchor else graph.with_loops()

    @staticmethod
    def clear_cache() -> None:
        """Forget all cached graphs."""
        _cache.clear()

    # Using a graph --------------------------------------------------------------------------------------------------

    @property
    def csc(self) -> Adjacency:
        """Rows are sources, `col` holds targets; built on first use."""
        if self._csc is None:
            base = None if self._base is None else self._base()
            with torch.inference_mode(False), torch.no_grad():
                if base is not None:
                    side, _, _ = replace_self_loops(base.csc.side, min(self.num_src, self.num_dst))
                    side = trim(side, self.num_edges)
                else:
                    side = transpose(self.csr.side, self.num_src, self._source_sorted)
                max_degree = pull(longest(side.rowptr))[0] if self.facts is None else self.facts.max_out_degree
            self._csc = type(self.csr)(side, max_degree)
            self.reset_streams()
        return self._csc

    def with_loops(self) -> Graph:
        """A graph of the same edges with self-loops replaced, to be kept by the cache."""
        return add_loops(self)

    @property
    def edge_index(self) -> Tensor:
        """The edges, int64 [2, E]: row 0 sources, row 1 targets, in input order, loops appended.

        The user's own tensor where it says the same and still lives; otherwise made from `csr` and kept until an edit.
        """
        made = self._own_edge_index
        if made is None or made._version != self._own_version:
            anchor = self._live_anchor()
            if anchor is not None and not (self.self_loops or self._transposed) and anchor.dtype == torch.int64:
                return anchor
            with torch.inference_mode(False), torch.no_grad():
                made = torch.empty(2, self.num_edges, dtype=torch.int64, device=self.device)
                order = self.csr.perm.long()
                made[0, order] = self.csr.col.long()
                made[1, order] = expand(self.csr.rowptr, self.num_edges).long()
                pull(made[0, -1:].sum())
            self._own_edge_index, self._own_version = made, made._version
            _by_own_edge_index[id(made)] = self
            self.reset_streams()
        return made

    @property
    def key(self) -> Key:
        """The flat key with which :meth:`resolve` finds this graph again."""
        anchor = self._live_anchor()
        if anchor is not None:
            return anchor, self.num_src, self.num_dst, self.self_loops, self._transposed
        return self.edge_index, self.num_src, self.num_dst, False, False

    @cached_property
    def kept(self) -> Tensor | None:
        """With replaced self-loops the input edges that stay, int64 [num_kept] ascending, else None."""
        if self._kept_mask is None:
            return None
        with torch.inference_mode(False):
            kept = self._kept_mask.nonzero().view(-1)
            pull(kept[-1:].sum())
        self.reset_streams()
        return kept

    @cached_property
    def node_segments(self) -> Segments | None:
        """Ranges of nodes that no edge leaves; None if sources and targets are not the same nodes."""
        with torch.inference_mode(False), torch.no_grad():
            return find_segments(self)

    def tiles(self, rows_are: str, rows: int, compact: bool) -> BlockSparse:
        """Dense blocks of one side, made on first use (see :mod:`pyg_dfgnn.graph.block_sparse`).

        Args:
            rows_are: `"targets"` or `"sources"`.
            rows: Rows of a window.
            compact: List the columns that occur, rather than the nodes of the window's segment.
        """
        found = self._tiles.get((rows_are, rows, compact))
        if found is None:
            side, num_columns = (self.csr, self.num_src) if rows_are == "targets" else (self.csc, self.num_dst)
            with torch.inference_mode(False), torch.no_grad():
                bits = None if compact or self.bits is None else self.bits(rows_are, rows)
                found = make_tiles(side, num_columns, rows, None if compact else self.node_segments, bits)
            self._tiles[rows_are, rows, compact] = found
            self.reset_streams()
        return found

    def node_ranges(self, most: int) -> NodeRanges | None:
        """Ranges of at most `most` nodes that no edge leaves, made on first use; None if there is a longer segment."""
        segments = self.node_segments
        if segments is None or segments.longest > most:
            return None
        found = self._ranges.get(most)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = pack_segments(self.csr, segments, most)
            self._ranges[most] = found
            self.reset_streams()
        return found

    def tile_fill(self, rows: int, compact: bool) -> float:
        """Edges over the area of the dense blocks of the targets; measured on some windows if `compact`."""
        if not compact and self.node_segments is not None:
            return self.num_edges / max(1, area_of(self.node_segments))
        key = "tile fill", rows
        found = self.plans.get(key)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = self.plans[key] = sample_fill(self.csr, rows)
        return found

    def stats(self) -> dict[str, int | float | None]:
        """Sizes and degrees of both sides, and the batch's segments; builds `csc`."""
        return {
            "num_src": self.num_src,
            "num_dst": self.num_dst,
            "num_edges": self.num_edges,
            "mean_in_degree": self.num_edges / max(self.num_dst, 1),
            "max_in_degree": self.csr.max_degree,
            "mean_out_degree": self.num_edges / max(self.num_src, 1),
            "max_out_degree": self.csc.max_degree,
            "num_segments": None if self.graph_ptr is None else self.graph_ptr.numel() - 1,
            "max_graph_nodes": self.max_graph_nodes,
        }

    def pin(self) -> Graph:
        """Keep the graph in the cache for as long as its tensor lives, for captured CUDA graphs that point into it."""
        self.pinned = True
        return self

    def _live_anchor(self) -> Tensor | None:
        anchor = None if self._anchor is None else self._anchor()
        return anchor if anchor is not None and anchor._version == self._version else None

    def _tensors(self) -> list[Tensor]:
        maybe = (self.graph_ptr, self._kept_mask, self._own_edge_index, self.__dict__.get("kept"))
        found = [tensor for tensor in maybe if tensor is not None]
        for tiles in list(self._tiles.values()):
            found.extend(tiles.tensors())
        found.extend(ranges.ptr for ranges in list(self._ranges.values()))
        return [*found, *self.csr.tensors(), *(() if self._csc is None else self._csc.tensors())]

    def reset_streams(self) -> None:
        """Forget which streams the allocator knows to read the arrays; to be called when arrays have been added."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            self._streams = {stream.cuda_stream}
            if not torch.cuda.is_current_stream_capturing():
                self._made = stream.record_event()

    def on_this_stream(self) -> Graph:
        """The graph, once the allocator knows that the current stream reads its arrays; pinned during capture."""
        # Other streams wait for what has been built. Its memory belongs to the stream it was made on, and the allocator
        # must learn of each other one before it hands that memory out again.
        streams = self._streams
        if streams is None:
            return self
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        # The default stream, whose handle is 0, cannot be captured.
        if handle == 0 and 0 in streams:
            return self
        if torch.cuda.is_current_stream_capturing():
            return self.pin()
        if handle not in streams:
            stream = torch.cuda.current_stream(self.device)
            if self._made is not None:
                stream.wait_event(self._made)
            for tensor in self._tensors():
                tensor.record_stream(stream)
            # Not to the set of another thread that has added arrays meanwhile.
            streams.add(handle)
        return self


def check_sizes(num_src: int, num_dst: int) -> None:
    """Check both numbers of nodes.

    Raises:
        ValueError: One is negative or exceeds 2^31 - 1.
    """
    check_range("num_src", num_src, 0, INT32_MAX)
    check_range("num_dst", num_dst, 0, INT32_MAX)


def trim(side: Side, num_edges: int) -> Side:
    """The first `num_edges` edges of a side with room for more."""
    return Side(side.rowptr, side.col[:num_edges], side.perm[:num_edges])


def check_ids(source: Tensor, target: Tensor) -> list[Tensor]:
    """Smallest and largest source and target, to be pulled; read by :func:`refuse_ids`."""
    if source.numel() == 0:
        return [torch.zeros((), dtype=torch.int64, device=source.device)] * 4
    return [*source.aminmax(), *target.aminmax()]


def refuse_ids(bounds: list[int], num_src: int, num_dst: int, num_edges: int) -> None:
    """Raise ValueError if ids are out of range."""
    if num_edges == 0:
        return
    ends = (("source", "num_src", num_src, bounds[0], bounds[1]), ("target", "num_dst", num_dst, bounds[2], bounds[3]))
    for end, name, size, low, high in ends:
        if low < 0 or high >= size:
            raise ValueError(f"'edge_index' needs {end} ids in [0, {name}={size}) (got {low} to {high})")


def build(
    edges: forms.Edges,
    num_src: int,
    num_dst: int,
    *,
    self_loops: bool = False,
    transposed: bool = False,
    anchor: Tensor | None = None,
) -> Graph:
    """Build the CSR side of a graph: at most one sort, one host sync.

    Raises:
        ValueError: An id is out of range, or the order that an `EdgeIndex` claims is false.
    """
    source, target = edges.source, edges.target
    num_edges, num_loops = source.numel(), min(num_src, num_dst)
    check_edges(num_edges + num_loops * self_loops)
    side, in_order = group(target, source, num_dst, edges.by_target, edges.target_sorted)
    kept_mask = None
    num_kept = in_order
    if self_loops:
        side, kept_mask, num_kept = replace_self_loops(side, num_loops)
    source_sorted = (source[1:] >= source[:-1]).all()
    *bounds, ordered, sorted_by_source, kept, max_degree = pull(
        *check_ids(source, target), in_order, source_sorted, num_kept, longest(side.rowptr)
    )
    refuse_ids(bounds, num_src, num_dst, num_edges)
    if not ordered:
        raise ValueError("'edge_index' needs the order it claims: its targets do not ascend")
    if self_loops:
        side = trim(side, kept + num_loops)
    return Graph(
        Adjacency(side, max_degree),
        num_src,
        self_loops=self_loops,
        transposed=transposed,
        source_sorted=bool(sorted_by_source) and not self_loops,
        anchor=anchor,
        kept_mask=kept_mask,
    )


def add_loops(base: Graph) -> Graph:
    """The variant of a graph with self-loops replaced: no sort, one host sync, none for a trusted batch."""
    num_loops = min(base.num_src, base.num_dst)
    check_edges(base.num_edges + num_loops)
    with torch.inference_mode(False), torch.no_grad():
        side, kept_mask, num_kept = replace_self_loops(base.csr.side, num_loops)
        facts = None if base.facts is None else base.facts.with_loops()
        if facts is None:
            kept, max_degree = pull(num_kept, longest(side.rowptr))
        else:
            kept, max_degree = facts.num_edges - num_loops, facts.max_in_degree
    return Graph(
        type(base.csr)(trim(side, kept + num_loops), max_degree),
        base.num_src,
        self_loops=True,
        transposed=base._transposed,
        anchor=base._live_anchor(),
        kept_mask=kept_mask,
        base=base,
        graph_ptr=base.graph_ptr,
        max_graph_nodes=base.max_graph_nodes,
        node_segments=None if facts is None or base.graph_ptr is None else facts.segments(base.graph_ptr),
        facts=facts,
    )


def check_edges(num_edges: int) -> None:
    """Raise ValueError if int32 cannot count the edges."""
    if num_edges > MAX_EDGES:
        raise ValueError(f"'edge_index' needs at most {MAX_EDGES} edges, self-loops included (got {num_edges})")


def batch_edge_index(batch: Any) -> Tensor:
    """The plain `edge_index` tensor of a homogeneous batch, the one that convs will be given.

    Raises:
        TypeError: There is none.
    """
    edge_index = None if hasattr(batch, "edge_types") else getattr(batch, "edge_index", None)
    if not isinstance(edge_index, Tensor):
        raise TypeError(f"'batch' needs one edge type with a tensor 'edge_index' (got {type(batch).__name__})")
    edge_index = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
    forms.check_edge_index(edge_index)
    return edge_index


def keep(key: tuple[Any, ...], edge_index: Tensor, graph: Graph) -> None:
    """Put a graph where :meth:`Graph.resolve` finds it by its key, for as long as `edge_index` lives unchanged."""
    version: Hashable = forms.version_of(edge_index)
    # Edits of an inference tensor leave no trace, so a graph made from one is never taken for granted.
    if version is not None:
        _cache.put(key, edge_index, version, graph)


def _resolve(edge_index: Tensor, num_src: int, num_dst: int, self_loops: bool, transposed: bool) -> Graph:
    hint = None
    if isinstance(edge_index, EdgeIndex):
        hint, edge_index = edge_index, edge_index.as_tensor()
    check_tensor("edge_index", edge_index)
    key = (id(edge_index), num_src, num_dst, self_loops, transposed)
    version = forms.version_of(edge_index)
    graph = _cache.get(key, edge_index, version)
    if graph is None and not self_loops and not transposed:
        own = _by_own_edge_index.get(id(edge_index))
        if own is not None and own._own_edge_index is edge_index and own._own_version == version:
            graph = own if (own.num_src, own.num_dst) == (num_src, num_dst) else None
    if graph is not None:
        return graph.on_this_stream()

    forms.check_edge_index(edge_index)
    check_sizes(num_src, num_dst)
    base = _cache.get((*key[:3], False, transposed), edge_index, version) if self_loops else None
    if base is not None:
        graph = base.on_this_stream().with_loops()
    else:
        with torch.inference_mode(False), torch.no_grad():
            edges = forms.read_tensor(edge_index, transposed, hint)
            graph = build(edges, num_src, num_dst, self_loops=self_loops, transposed=transposed, anchor=edge_index)
    keep(key, edge_index, graph)
    return graph
