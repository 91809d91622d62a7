"""The rows of each domain of one graph: how many there are and which row of a lower domain each determines."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.errors import as_integer, check_dtype, check_shape, check_tensor, check_type
from pyg_dfgnn.graph import Adjacency, Graph, compact_rows
from pyg_dfgnn.graph.adjacency import longest, order_rows, pull
from pyg_dfgnn.graph.derived import Derived
from pyg_dfgnn.graph.forms import INDEX_DTYPES
from pyg_dfgnn.ir.domains import D, Domain, E, One, R, S, Td, Ts, U, V

_PAIRS = {U: "source_relations", V: "target_relations"}
_NODE = {U: S, V: D}
_TYPED = {Ts: S, Td: D}
_ADJACENT = {
    (D, E): ("targets", "sources"),
    (S, E): ("sources", "targets"),
    (U, E): ("source_relations", "targets"),
    (V, E): ("target_relations", "sources"),
}
"""Domains of the rows and of what is joined -> the adjacency of the graph that lists it as its edges."""
_PLAIN = "rows", (), 0
"""Key of the lists of a graph without types of nodes."""


class RowLists(Derived):
    """Lists of the rows of a graph, which the graph may keep: they do not keep the graph.

    Args:
        graph: As for :class:`IndexSpace`.
        types: Domain Ts or Td -> name and type of each node, where a program has the domain.
        num_types: Number of node types.

    Attributes:
        sizes: Number of rows of each domain that the graph has.
        types: Node domain and domain of its types -> type of each node, int64.
    """

    def __init__(self, graph: Graph, types: Mapping[Domain, tuple[str, Tensor]], num_types: int) -> None:
        super().__init__(graph.device)
        known: dict[tuple[Domain, Domain], Tensor] = {}
        sizes = {One: 1, S: graph.num_src, D: graph.num_dst, E: graph.num_edges}
        for domain, (name, type_of) in types.items():
            rows = sizes[_TYPED[domain]]
            check_shape(name, type_of, (rows,), f"[{rows}]")
            check_dtype(name, type_of, INDEX_DTYPES)
            low, high = pull(type_of.min(), type_of.max()) if rows else (0, -1)
            if low < 0 or high >= num_types:
                raise ValueError(f"'{name}' needs values in [0, num_types={num_types}) (got {low} to {high})")
            sizes[domain] = num_types
            known[_TYPED[domain], domain] = type_of.to(torch.int64, copy=True)
        if graph.relation is not None:
            sizes[R] = graph.num_relations
            sizes |= {domain: compact_rows(graph, pairs).node.numel() for domain, pairs in _PAIRS.items()}
        self.sizes: Mapping[Domain, int] = sizes
        self.types = known
        self._derived["types",] = known
        self._reset_streams()


class IndexSpace:
    """The domains of a graph, which they keep.

    Args:
        graph: The edges; made with `edge_type` where a program has the domains R, U or V.
        source_type: Type of each source, int64 or int32 [N_src], where a program has the domain Ts.
        target_type: Type of each target, int64 or int32 [N_dst], where a program has the domain Td.
        num_types: Number of node types.
        kept: Whether the graph keeps the lists, for as long as the types stay as they are.

    Attributes:
        graph: The edges.
        lists: What is derived from them.
        sizes: Number of rows of each domain that the graph has.
        device: Where the arrays live.
        derived: :meth:`~pyg_dfgnn.graph.derived.Derived.derived` of the lists.

    Raises:
        TypeError: The types are no integer tensors, or `num_types` is no integer.
        ValueError: The types have another shape or are out of range.
    """

    __slots__ = ("derived", "device", "graph", "lists", "sizes")

    def __init__(
        self,
        graph: Graph,
        *,
        source_type: Tensor | None = None,
        target_type: Tensor | None = None,
        num_types: int = 0,
        kept: bool = False,
    ) -> None:
        if type(graph) is not Graph:
            check_type("graph", graph, Graph, "a pyg_dfgnn.Graph")
        types: dict[Domain, tuple[str, Tensor]] = {}
        lists = None
        if source_type is not None or target_type is not None or num_types != 0:
            num_types = as_integer("num_types", num_types)
            for domain, name, type_of in ((Ts, "source_type", source_type), (Td, "target_type", target_type)):
                if type_of is not None:
                    check_tensor(name, type_of)
                    types[domain] = name, type_of
        elif kept:
            # The streams of the graph are its own.
            lists = graph.get(_PLAIN)
        if kept and lists is None:
            anchors = [type_of for _, type_of in types.values()]
            key = "rows", tuple(types), num_types
            lists = graph.derived(key, lambda: RowLists(graph, types, num_types), anchors)
        self.lists = lists or RowLists(graph, types, num_types)
        self.graph, self.sizes, self.device, self.derived = graph, self.lists.sizes, graph.device, self.lists.derived

    def __reduce__(self) -> tuple[Any, ...]:
        names = {S: "source_type", D: "target_type"}
        types: dict[str, Any] = {names[row]: type_of for (row, _), type_of in self.lists.types.items()}
        num_types = max((self.sizes[domain] for _, domain in self.lists.types), default=0)
        return partial(IndexSpace, **types, num_types=num_types), (self.graph,)

    def index(self, row: Domain, other: Domain) -> Tensor:
        """Return the row of `other` that each row of `row` determines, int64 [rows].

        Raises:
            ValueError: The graph lacks a domain.
        """
        for domain in (row, other):
            if domain not in self.sizes:
                what = "node types" if domain in _TYPED else "relations"
                raise ValueError(f"'rows' needs a graph with {what} for the domain {domain} (got one without)")
        if row is E and other in (S, D):
            # Not kept: a part of the caller's edges would keep them alive, and with them their graph.
            return self._make(row, other)
        known = self.lists.types.get((row, other))
        return self.derived(("index", row, other), lambda: self._make(row, other)) if known is None else known

    def adjacency(self, row: Domain, over: Domain) -> Adjacency:
        """Return the rows of `over` that belong to each row of `row`: `perm` holds their numbers."""
        if (row, over) in _ADJACENT:
            return self.graph.adjacency(*_ADJACENT[row, over])

        def build() -> Adjacency:
            rowptr, order = order_rows(self.index(over, row), self.sizes[row])
            perm = order.to(torch.int32)
            return Adjacency(rowptr, perm, perm, self.sizes[over], pull(longest(rowptr))[0], str(row), str(over))

        return self.derived(("adjacency", row, over), build)

    def pieces(self, length: int) -> Adjacency:
        """Return pieces of so many edges as rows, over the positions of the edges by target."""

        def build() -> Adjacency:
            perm = self.adjacency(D, E).perm
            count = max(1, -(-self.sizes[E] // length))
            rowptr = (torch.arange(count + 1, device=self.device, dtype=torch.int64) * length).clamp(max=self.sizes[E])
            longest = min(length, self.sizes[E])
            return Adjacency(rowptr.to(torch.int32), perm, perm, self.sizes[E], longest, "pieces", str(E))

        return self.derived(("pieces", length), build)

    def at_positions(self, row: Domain, over: Domain, other: Domain) -> Tensor:
        """Return the row of `other` that each position of :meth:`adjacency` determines, int32 [rows of over]."""
        perm = self.adjacency(row, over).perm
        if other is over:
            return perm
        return self.derived(
            ("at_positions", row, over, other), lambda: self.index(over, other).to(torch.int32).index_select(0, perm)
        )

    def at_rows(self, row: Domain, other: Domain) -> Tensor:
        """Return the row of `other` that each row of a domain determines, int32 [rows]."""
        return self.derived(("at_rows", row, other), lambda: self.index(row, other).to(torch.int32, copy=True))

    def _make(self, row: Domain, other: Domain) -> Tensor:
        graph, size = self.graph, self.sizes[row]
        if other is One:
            return torch.zeros(size, dtype=torch.int64, device=self.device)
        if other is row:
            return torch.arange(size, device=self.device)
        if row is E and other in (S, D):
            return graph.edge_index[0 if other is S else 1]
        if row is E and other is R and graph.relation is not None:
            return graph.relation.long()
        if row is E and other in _PAIRS:
            return compact_rows(graph, _PAIRS[other]).of_edge.long()
        if row in _PAIRS and other in (R, _NODE[row]):
            compact = compact_rows(graph, _PAIRS[row])
            return (compact.relation if other is R else compact.node).long()
        # A node type, through the node.
        node = _TYPED[other]
        return self.index(node, other)[self.index(row, node)]
