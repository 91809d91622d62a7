"""One edge set as cached CSR (by target) and CSC (by source), and the container of all that is derived from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef
from torch_geometric import EdgeIndex
from torch_geometric.data.data import BaseData
from typing_extensions import Self

from pyg_dfgnn.errors import as_integer, check_bool, check_choice, check_tensor
from pyg_dfgnn.graph import forms
from pyg_dfgnn.graph.adjacency import (
    Adjacency,
    count_loops,
    in_input_order,
    longest,
    outside_capture,
    pull,
    replace_self_loops,
    transpose,
)
from pyg_dfgnn.graph.build import (
    Built,
    add_loops,
    build,
    build_index,
    build_pieces,
    build_ptr,
    build_relation,
    check_sizes,
    map_arrays,
)
from pyg_dfgnn.graph.cache import GraphCache
from pyg_dfgnn.graph.derived import Derived, version_of
from pyg_dfgnn.graph.edge_set import GraphKey

FLOWS = ("source_to_target", "target_to_source")
DOMAINS = ("targets", "sources", "relations", "source_relations", "target_relations")
"""Domains of rows and columns of an adjacency; the last two are the distinct (source, relation) and (target, relation)
pairs."""
# Graphs are freed with the tensors they were built from; this bounds what a program holds that keeps these.
MAX_CACHED_GRAPHS = 1024

_cache: GraphCache[Graph] = GraphCache(MAX_CACHED_GRAPHS)
# Graphs by the id of the edge_index they made themselves: found without keeping either alive.
_by_own_edge_index: weakref.WeakValueDictionary[int, Graph] = weakref.WeakValueDictionary()
_builders: dict[tuple[str, str], Callable[[Graph], Adjacency]] = {}


class Graph(Derived):
    """One edge set, compressed by target and, on first use, by any other pair of its domains.

    Made by :meth:`of`, :meth:`of_pieces`, :meth:`of_index`, :meth:`of_ptr` or :meth:`resolve`.

    All arrays are int32 on the device of the edges and never alias the user's. A graph knows no schedule: what one
    needs is kept by :meth:`derived` under a key of its own. Nothing changes a graph, so copies of what holds one
    share it; `pickle` and `torch.save` store its edges by target, and by source if that was asked for, and no more.

    Attributes:
        num_src: Number of sources.
        num_dst: Number of targets.
        num_edges: Number of edges E, self-loops included.
        device: Where the arrays live.
        self_loops: Whether self-loops were replaced.
        csr: Rows are targets (the groups of a reduction), columns are sources.
        relation: Relation of each edge in input order, int32 [E]; None without `edge_type`.
        num_relations: Number of relations; 0 without `edge_type`.
        is_static: Whether other edges will be put into the same arrays, so that no list may depend on their degrees.
        is_measured: Whether the host knows more of the edges than their number.
        is_bare: Whether the sizes are all that is known: self-loops are numbered behind all edges, left out or not.
    """

    is_static, is_measured, is_bare = False, True, False

    def __init__(
        self,
        built: Built,
        anchors: Sequence[Tensor] = (),
        sizes: tuple[Any, ...] = (),
        *,
        self_loops: bool = False,
        base: Graph | None = None,
        relation: Tensor | None = None,
    ) -> None:
        csr = built.csr
        super().__init__(csr.rowptr.device)
        self.csr = csr
        self.num_src, self.num_dst, self.num_edges = csr.num_cols, csr.num_rows, csr.num_edges
        self.self_loops = self_loops
        self.relation, self.num_relations = relation, 0 if relation is None else sizes[-1]
        self._stays, self._source_sorted = built.stays, built.source_sorted
        # Weak, so that neither the cache nor autograd keeps the user's tensors, or a graph without loops, alive.
        tracked = all(not anchor.is_inference() for anchor in anchors)
        self._anchors = tuple(TensorWeakRef(anchor) for anchor in anchors) if tracked else ()
        self._versions = tuple(anchor._version for anchor in anchors) if tracked else ()
        self._sizes = sizes
        self._base = None if base is None else weakref.ref(base)
        self._own_version: int | None = None
        self._derived["input",] = relation, built.stays
        self._derived["adjacency", "targets", "sources"] = csr
        if built.csc is not None:
            self._derived["adjacency", "sources", "targets"] = built.csc
        self._reset_streams()

    def __new__(cls, *args: Any, **_: Any) -> Self:
        if cls is Graph and not (args and isinstance(args[0], Built)):
            need = "to be made by Graph.of(edge_index, num_nodes), Graph.of(data) or another of its methods"
            raise TypeError(f"'Graph' needs {need} (got a call of the class)")
        return super().__new__(cls)

    def __repr__(self) -> str:
        loops = ", self_loops=True" if self.self_loops else ""
        return f"Graph({self.num_src} -> {self.num_dst} nodes, {self.num_edges} edges{loops}, {self.device})"

    def __copy__(self) -> Graph:
        self._check_fixed("copied")
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> Graph:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_fixed("pickled")
        return _unpickled, self._parts()

    def _parts(self) -> tuple[Any, ...]:
        """Return what :func:`_unpickled` makes the graph of: its edges, and no more than that is derived."""
        by_source = self.on_this_stream()._derived.get(("adjacency", "sources", "targets"))
        built = Built(self.csr, by_source, self._source_sorted, self._stays)
        return built, self._sizes, self.self_loops, self.relation

    def _check_fixed(self, done: str) -> None:
        if self.is_static:
            need = f"edges that stay as they are to be {done}"
            raise TypeError(f"'graph' needs {need} (got a {type(self).__name__}, which batches are put into)")

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Graph:
        """Return the graph on a device, as a tensor's `to` does: itself if it is there. `Data.to` moves a graph too.

        Raises:
            TypeError: The edges of the graph change.
        """
        if torch.empty(0, device=device).device == self.device:
            return self
        return self._map_arrays(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def cpu(self) -> Graph:
        """Return the graph on the CPU."""
        return self.to("cpu")

    def cuda(self, device: torch.device | str | int | None = None, *, non_blocking: bool = False) -> Graph:
        """Return the graph on a CUDA device, by default on the current one."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    def pin_memory(self) -> Graph:
        """Return the graph in pinned memory of the host."""
        return self._map_arrays(Tensor.pin_memory)

    def _map_arrays(self, function: Callable[[Tensor], Tensor]) -> Graph:
        self._check_fixed("moved")
        built, sizes, self_loops, relation = self._parts()
        with torch.inference_mode(False), torch.no_grad():
            relation = None if relation is None else function(relation)
            return _unpickled(map_arrays(built, function), sizes, self_loops, relation)

    # Making a graph -------------------------------------------------------------------------------------------------

    @staticmethod
    def of(
        edge_index: Any,
        num_src: int | None = None,
        num_dst: int | None = None,
        *,
        flow: str = "source_to_target",
        self_loops: bool = False,
        edge_type: Tensor | None = None,
        num_relations: int = 0,
    ) -> Graph:
        """The graph of any form of edges that PyG takes; cached for as long as the edges live and stay unchanged.

        Args:
            edge_index: int64 or int32 [2, E]; `EdgeIndex`, whose order is made use of; or an adjacency matrix `adj_t`
                [num_dst, num_src] as `torch.sparse` COO, CSR, CSC or `torch_sparse.SparseTensor`; or `Data` with one.
            num_src: Number of sources; may be left out where `edge_index` is no plain tensor, and tells it.
            num_dst: Number of targets; `num_src` if None.
            flow: Which row holds the targets: 1 for `"source_to_target"`, 0 for `"target_to_source"`.
            self_loops: Remove all self-loops and append one for each of the first `min(num_src, num_dst)` nodes, as
                PyG's `GATConv` does.
            edge_type: Relation of each edge of a tensor `edge_index`, int64 or int32 [E].
            num_relations: Number of relations.

        Raises:
            TypeError: Not one of these forms, ids of another dtype, a size that is no integer or that nothing tells, or
                `self_loops` no bool.
            ValueError: Another shape, an id out of range, more edges or nodes than int32 can count, or a flow that
                the form does not have.
        """
        check_choice("flow", flow, FLOWS)
        check_bool("self_loops", self_loops)
        if num_src is None or isinstance(edge_index, BaseData):
            edge_index, num_src, num_dst = forms.with_sizes(edge_index, num_src, num_dst, flow == "target_to_source")
        num_src = as_integer("num_src", num_src)
        num_dst = num_src if num_dst is None else as_integer("num_dst", num_dst)
        sizes = num_src, num_dst, self_loops, flow == "target_to_source"
        if edge_type is not None:
            edge_index = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
            return Graph.resolve(edge_index, edge_type, *sizes, as_integer("num_relations", num_relations))
        if isinstance(edge_index, EdgeIndex):
            return _resolve((edge_index.as_tensor(),), sizes, edge_index)
        is_strided = type(edge_index) is Tensor and edge_index.layout is torch.strided
        if is_strided or not forms.is_adjacency(edge_index):
            return Graph.resolve(edge_index, *sizes)
        if flow == "target_to_source":
            need = "'source_to_target' for a sparse matrix: transpose that instead"
            raise ValueError(f"'flow' needs {need} (got 'target_to_source')")
        anchor, version = forms.adjacency_anchor(edge_index)
        key = (id(anchor), *sizes)
        graph = _cache.get(key, (anchor,), (version,))
        if graph is not None:
            return graph.on_this_stream()
        check_sizes(num_src, num_dst)
        with torch.inference_mode(False), torch.no_grad():
            edges = forms.read_adjacency(edge_index, num_src, num_dst, self_loops)
            graph = Graph(build(edges, num_src, num_dst), self_loops=self_loops)
        _cache.put(key, (anchor,), (version,), graph)
        return graph

    @staticmethod
    def of_pieces(
        pieces: Iterable[Tensor],
        num_edges: int,
        num_src: int,
        num_dst: int | None = None,
        *,
        flow: str = "source_to_target",
        self_loops: bool = False,
        device: torch.device | str | None = None,
    ) -> Graph:
        """The graph of edges that come in pieces, each of which may be freed once it was read.

        No int64 [2, E] exists unless :attr:`edge_index` is asked for; the build holds 24 bytes per edge at most beside
        the CSR. The graph is not cached: give convs the graph itself.

        Args:
            pieces: The edges in order, int64 or int32 [2, e] each, on any device.
            num_edges: Edges of all pieces, E.
            num_src: Number of sources.
            num_dst: Number of targets; `num_src` if None.
            flow: As in :meth:`of`.
            self_loops: As in :meth:`of`.
            device: Where the graph is to live; by default on the device of the first piece.

        Raises:
            TypeError: A piece is no tensor of int64 or int32, a size no integer, or `self_loops` no bool.
            ValueError: Another shape, other edges than `num_edges`, an id out of range, more edges or nodes than int32
                can count, or no such flow.

        Example:
            >>> pieces = (torch.from_numpy(part) for part in parts)
            >>> graph = Graph.of_pieces(pieces, num_edges, num_nodes, device="cuda")
            >>> out = conv(x, graph)
        """
        check_choice("flow", flow, FLOWS)
        check_bool("self_loops", self_loops)
        num_src, num_edges = as_integer("num_src", num_src), as_integer("num_edges", num_edges)
        num_dst = num_src if num_dst is None else as_integer("num_dst", num_dst)
        check_sizes(num_src, num_dst)
        with torch.inference_mode(False), torch.no_grad():
            transposed = flow == "target_to_source"
            built = build_pieces(pieces, num_edges, num_src, num_dst, transposed, self_loops, device)
        return Graph(built, self_loops=self_loops)

    @staticmethod
    def of_index(index: Tensor, num_groups: int) -> Graph:
        """The graph of a reduction over groups: rows are the groups, columns the positions 0 ... E - 1.

        Args:
            index: Group of each position, int64 or int32 [E], in any order.
            num_groups: Number of groups.

        Raises:
            TypeError: `index` is no integer tensor.
            ValueError: It has another shape, or a group out of range.
        """
        return Graph.resolve(index, as_integer("num_groups", num_groups))

    @staticmethod
    def of_ptr(ptr: Tensor) -> Graph:
        """The graph of a reduction over groups of consecutive positions: row g has the columns ptr[g] ... ptr[g+1] - 1.

        Args:
            ptr: Offsets of the groups, int64 or int32 [num_groups + 1].

        Raises:
            TypeError: `ptr` is no integer tensor.
            ValueError: It has another shape, does not begin at 0, or descends.
        """
        return Graph.resolve(ptr)

    @staticmethod
    def resolve(*key: Any) -> Graph:
        """The graph of a flat key, from the cache if it is there: what an op does with the key it was given.

        Args:
            key: The anchors of the graph, then its sizes (see :data:`GraphKey`).

        Raises:
            TypeError: An anchor is no integer tensor.
            ValueError: As :meth:`of`, :meth:`of_index` and :meth:`of_ptr`.
        """
        graph = Graph.known(*key)
        if graph is not None and graph.is_measured:
            return graph
        count = 2 if len(key) == 7 else 1
        return _resolve(key[:count], key[count:])

    @staticmethod
    def known(*key: Any) -> Graph | None:
        """Return the graph in the cache for the key of :meth:`resolve`, measured or not; None if there is none."""
        ids = (id(key[0]), *key[1:]) if len(key) != 7 else (id(key[0]), id(key[1]), *key[2:])
        entry = _cache.entries.get(ids)
        if entry is None:
            return None
        for anchor, ref, version in zip(key, entry.refs, entry.versions):
            if ref() is not anchor or anchor._version != version:  # type: ignore[union-attr]
                return None
        graph: Graph = entry.value
        return graph if graph._streams is None else graph.on_this_stream()

    @staticmethod
    def cached_of(tensor: Tensor) -> list[Graph]:
        """The cached graphs that a tensor is an anchor of, for those who must keep them: captured CUDA graphs."""
        entries = list(_cache.entries.values())
        return [entry.value for entry in entries if any(ref() is tensor for ref in entry.refs)]

    @staticmethod
    def clear_cache() -> None:
        """Forget all cached graphs."""
        _cache.clear()

    @staticmethod
    def forget_unmeasured() -> None:
        """Forget the cached graphs of which nothing was measured yet."""
        _cache.forget(lambda graph: not graph.is_measured and not graph.pinned)

    # Using a graph --------------------------------------------------------------------------------------------------

    def adjacency(self, rows: str, cols: str) -> Adjacency:
        """The edges grouped by one domain with their ends in another, built on first use.

        Args:
            rows: Domain of the rows, one of :data:`DOMAINS`.
            cols: Domain of the columns, one of :data:`DOMAINS`.

        Raises:
            ValueError: No such domain, or no builder is registered for the pair.
        """
        check_choice("rows", rows, DOMAINS)
        check_choice("cols", cols, DOMAINS)
        key = ("adjacency", rows, cols)

        def build() -> Adjacency:
            if (rows, cols) not in _builders:
                pairs = ", ".join(map(str, [("targets", "sources"), *_builders]))
                raise ValueError(f"'rows' and 'cols' need a pair that has a builder, {pairs} (got {(rows, cols)})")
            return _builders[rows, cols](self)

        return self.derived(key, build)

    @property
    def csc(self) -> Adjacency:
        """Rows are sources, columns are targets; built on first use."""
        return self.adjacency("sources", "targets")

    def side(self, direction: str) -> Adjacency:
        """Return the adjacency that a pass works on: rows are sources for the pass over sources, else targets."""
        return self.csc if direction == "sources" else self.csr

    @property
    def has_loops(self) -> bool:
        """Whether there are self-loops."""
        return self.derived("has_loops", lambda: bool(count_loops(self.csr.arrays)))

    def with_loops(self) -> Graph:
        """A graph of the same edges with self-loops replaced, to be kept by the cache."""
        with torch.inference_mode(False), torch.no_grad():
            built = add_loops(self.csr)
        sizes = self.num_src, self.num_dst, True, *self._sizes[3:4]
        return Graph(built, self._live_anchors()[:1], sizes, self_loops=True, base=self)

    def looped_twin(self) -> Graph:
        """The graph of the same edges with self-loops replaced, found through the edges once and kept with this one."""

        def find() -> Graph:
            anchors = self._live_anchors()
            if not anchors or len(self._sizes) != 4:
                return self.with_loops()
            return Graph.resolve(anchors[0], self.num_src, self.num_dst, True, self._sizes[3])

        return self.derived("looped", find).on_this_stream()

    @property
    def edge_index(self) -> Tensor:
        """The edges, int64 [2, E]: row 0 sources, row 1 targets, in input order, loops appended.

        The user's own tensor where it says the same and still lives; otherwise made from `csr` and kept until an edit.
        """
        own = self._derived.get("edge_index")
        if own is not None and own._version == self._own_version:
            return own  # type: ignore[no-any-return]
        anchors = self._live_anchors()
        if anchors and self._sizes[2:4] == (False, False) and anchors[0].dtype == torch.int64:
            return anchors[0]

        def make() -> Tensor:
            edge_index = in_input_order(self.csr.arrays)
            self._own_version = edge_index._version
            return outside_capture(edge_index)

        if own is not None:
            self._derived.pop("edge_index", None)
        tensor = self.derived("edge_index", make)
        _by_own_edge_index[id(tensor)] = self
        return tensor

    @property
    def key(self) -> GraphKey:
        """The flat key with which :meth:`resolve` finds this graph again (see :data:`GraphKey`)."""
        anchors = self._live_anchors()
        if anchors:
            return *anchors, *self._sizes
        return self.edge_index, self.num_src, self.num_dst, False, False

    @property
    def kept(self) -> Tensor | None:
        """With replaced self-loops the input edges that stay, int64 [num_kept] ascending, else None."""
        stays = self._stays
        return None if stays is None else self.derived("kept", lambda: stays.nonzero().view(-1))

    def _live_anchors(self) -> tuple[Tensor, ...]:
        """The tensors that the graph was made from, or none if one has died or was edited."""
        anchors: tuple[Any, ...] = tuple(ref() for ref in self._anchors)
        if any(a is None or a._version != version for a, version in zip(anchors, self._versions)):
            return ()
        return anchors


def builds(rows: str, cols: str) -> Callable[[Callable[[Graph], Adjacency]], Callable[[Graph], Adjacency]]:
    """Register the function that builds :meth:`Graph.adjacency` for a pair of domains.

    Raises:
        ValueError: No such domain.
    """
    check_choice("rows", rows, DOMAINS)
    check_choice("cols", cols, DOMAINS)

    def register(builder: Callable[[Graph], Adjacency]) -> Callable[[Graph], Adjacency]:
        _builders[rows, cols] = builder
        return builder

    return register


@builds("sources", "targets")
def _build_csc(graph: Graph) -> Adjacency:
    base = None if graph._base is None else graph._base()
    if base is None:
        arrays = transpose(graph.csr.arrays, graph.num_src, graph._source_sorted)
    elif graph.self_loops:
        num_loops = min(graph.num_src, graph.num_dst)
        arrays, _ = replace_self_loops(base.csc.arrays, num_loops, graph.num_edges - num_loops)
    else:
        return base.csc
    return Adjacency(*arrays, graph.num_dst, pull(longest(arrays.rowptr))[0], "sources", "targets")


def keep(graph: Graph, anchors: Sequence[Tensor], sizes: tuple[Any, ...]) -> None:
    """Put a graph where :meth:`Graph.resolve` finds it, for as long as its anchors live unchanged.

    A graph made from an inference tensor, whose edits leave no trace, is not kept.
    """
    _cache.put((*map(id, anchors), *sizes), anchors, [version_of(anchor) for anchor in anchors], graph)


def _measured(key: tuple[Any, ...], anchors: Sequence[Any], versions: Sequence[Any]) -> Graph | None:
    """Return the cached graph of anchors, unless nothing was measured of it yet."""
    graph = _cache.get(key, anchors, versions)
    return graph if graph is not None and graph.is_measured else None


def _unpickled(built: Built, sizes: tuple[Any, ...], self_loops: bool, relation: Tensor | None) -> Graph:
    return Graph(built, sizes=sizes, self_loops=self_loops, relation=relation)


def _resolve(anchors: tuple[Any, ...], sizes: tuple[Any, ...], hint: EdgeIndex | None = None) -> Graph:
    """The graph of anchors that :meth:`Graph.known` does not find, or that an `EdgeIndex` comes with."""
    names = {5: ("edge_index",), 7: ("edge_index", "edge_type"), 2: ("index",), 1: ("ptr",)}[len(anchors) + len(sizes)]
    for name, anchor in zip(names, anchors):
        check_tensor(name, anchor)
    versions = [version_of(anchor) for anchor in anchors]
    graph = _measured((*map(id, anchors), *sizes), anchors, versions)
    if graph is None and sizes[2:] == (False, False):
        own = _by_own_edge_index.get(id(anchors[0]))
        if own is not None and (own.num_src, own.num_dst) == sizes[:2]:
            is_unedited = own._derived.get("edge_index") is anchors[0] and own._own_version == versions[0]
            graph = own if is_unedited else None
    if graph is not None:
        return graph.on_this_stream()
    with torch.inference_mode(False), torch.no_grad():
        if names == ("index",):
            graph = Graph(build_index(*anchors, *sizes), anchors, sizes)
        elif names == ("ptr",):
            graph = Graph(build_ptr(*anchors), anchors, sizes)
        elif names == ("edge_index",):
            graph = _of_edges(anchors[0], sizes, hint)
        else:
            graph = _of_typed_edges(anchors[0], anchors[1], sizes)
    keep(graph, anchors, sizes)
    return graph


def _of_edges(edge_index: Tensor, sizes: tuple[Any, ...], hint: EdgeIndex | None) -> Graph:
    num_src, num_dst, self_loops, transposed = sizes
    forms.check_edge_index(edge_index)
    check_sizes(num_src, num_dst)
    if self_loops:
        version = version_of(edge_index)
        base = _measured((id(edge_index), num_src, num_dst, False, transposed), (edge_index,), (version,))
        if base is not None:
            return base.on_this_stream().with_loops()
    edges = forms.read_tensor(edge_index, transposed, hint)
    return Graph(build(edges, num_src, num_dst, self_loops=self_loops), (edge_index,), sizes, self_loops=self_loops)


def _of_typed_edges(edge_index: Tensor, edge_type: Tensor, sizes: tuple[Any, ...]) -> Graph:
    *edge_sizes, num_relations = sizes
    if edge_sizes[2]:
        raise ValueError("'self_loops' needs False with 'edge_type': a self-loop has no relation (got True)")
    base = Graph.resolve(edge_index, *edge_sizes)
    relation = build_relation(edge_type, base.num_edges, num_relations)
    built = Built(base.csr, source_sorted=base._source_sorted)
    return Graph(built, (edge_index, edge_type), sizes, base=base, relation=relation)
