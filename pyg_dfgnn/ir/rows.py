"""The rows of each domain of one graph: how many there are and which row of a lower domain each determines."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pyg_dfgnn.errors import check_shape
from pyg_dfgnn.graph import Graph, compact_rows
from pyg_dfgnn.graph.adjacency import pull
from pyg_dfgnn.ir.domains import D, Domain, E, One, R, S, Td, Ts, U, V

_PAIRS = {U: "source_relations", V: "target_relations"}
_NODE = {U: S, V: D}
_TYPED = {Ts: S, Td: D}


class Rows:
    """The domains of a graph.

    Args:
        graph: The edges; made with `edge_type` where a program has the domains R, U or V.
        source_type: Type of each source, int64 [N_src], where a program has the domain Ts.
        target_type: Type of each target, int64 [N_dst], where a program has the domain Td.
        num_types: Number of node types.

    Attributes:
        sizes: Number of rows of each domain that the graph has.

    Raises:
        ValueError: The types have another shape or are out of range.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        source_type: Tensor | None = None,
        target_type: Tensor | None = None,
        num_types: int = 0,
    ) -> None:
        self.graph, self.device = graph, graph.device
        self._index: dict[tuple[Domain, Domain], Tensor] = {}
        sizes = {One: 1, S: graph.num_src, D: graph.num_dst, E: graph.num_edges}
        for domain, name, types in ((Ts, "source_type", source_type), (Td, "target_type", target_type)):
            if types is not None:
                rows = sizes[_TYPED[domain]]
                check_shape(name, types, (rows,), f"[{rows}]")
                low, high = pull(types.min(), types.max()) if rows else (0, -1)
                if low < 0 or high >= num_types:
                    raise ValueError(f"'{name}' needs values in [0, num_types={num_types}) (got {low} to {high})")
                sizes[domain] = num_types
                self._index[_TYPED[domain], domain] = types.long()
        if graph.relation is not None:
            sizes[R] = graph.num_relations
            sizes |= {domain: compact_rows(graph, pairs).node.numel() for domain, pairs in _PAIRS.items()}
        self.sizes: Mapping[Domain, int] = sizes

    def index(self, row: Domain, other: Domain) -> Tensor:
        """Return the row of `other` that each row of `row` determines, int64 [rows].

        Raises:
            ValueError: The graph lacks a domain.
        """
        for domain in (row, other):
            if domain not in self.sizes:
                what = "node types" if domain in _TYPED else "relations"
                raise ValueError(f"'rows' needs a graph with {what} for the domain {domain} (got one without)")
        if (row, other) not in self._index:
            self._index[row, other] = self._make(row, other)
        return self._index[row, other]

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
