"""Compact rows: the distinct (node, relation) pairs of a graph's edges, and the adjacencies that they are part of.

A compact row is numbered by (relation, node), so that those of one relation are consecutive: the rows of one matrix
product. All arrays are int32 on the graph's device, built by one stable sort of the edges that are already grouped by
node, and by scans. Beside the result, the build holds three arrays as long as the edges, and the sort's.

Source: Hector's compact materialisation, which has the source side (https://arxiv.org/abs/2301.06284).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_dfgnn.graph.adjacency import (
    Adjacency,
    expand,
    from_degree,
    in_spans,
    longest,
    numbers,
    order_rows,
    outside_capture,
    pull,
    rows_at,
    spans,
    take,
)
from pyg_dfgnn.graph.graph import Graph, builds

SIDES = {"source_relations": ("sources", "targets"), "target_relations": ("targets", "sources")}
"""Domain of compact rows -> the nodes that they are made of, and the other ends of their edges."""


class CompactRows(NamedTuple):
    """The distinct (node, relation) pairs of one side.

    Attributes:
        edges: Rows are the pairs, columns the other ends of their edges, ordered inside a pair as inside the node.
        node: Node of each pair, int32 [P], ascending within a relation.
        rowptr: Range of the pairs of each relation, int32 [R + 1].
        of_edge: Pair of each edge in the input order, int32 [E].
        ends: Numbers of `rowptr` on the host.
    """

    edges: Adjacency
    node: Tensor
    rowptr: Tensor
    of_edge: Tensor
    ends: list[int]

    @property
    def relation(self) -> Tensor:
        """Relation of each pair, int32 [P]."""
        return expand(self.rowptr, self.node.numel())


def compact_rows(graph: Graph, rows: str) -> CompactRows:
    """Return the compact rows of one side of a graph with relations, built on first use with two host syncs.

    Args:
        graph: A graph made with `edge_type`.
        rows: "source_relations" or "target_relations".

    Raises:
        ValueError: The graph has no relations.
    """
    if graph.relation is None:
        raise ValueError("'graph' needs the relation of each edge: make it with 'edge_type' (got a graph without)")
    relation = graph.relation
    return graph.derived(("compact_rows", rows), lambda: _compact(graph, relation, rows))


def one_relation(graph: Graph) -> Graph:
    """Return the graph of the same edges with one relation for all of them, kept while the edges live unchanged."""
    zeros = graph.derived("one_relation", lambda: graph.csr.col.new_zeros(graph.num_edges))
    return Graph.of(graph.edge_index, graph.num_src, graph.num_dst, edge_type=zeros, num_relations=1)


def ratio(graph: Graph, rows: str) -> float:
    """Return compact rows per edge: what compact materialisation leaves of a value per edge; 1 without edges."""
    return compact_rows(graph, rows).node.numel() / graph.num_edges if graph.num_edges else 1.0


def _compact(graph: Graph, edge_type: Tensor, rows: str) -> CompactRows:
    side, other = SIDES[rows]
    by_node, num_edges, device = graph.adjacency(side, other), graph.num_edges, graph.device
    relation_ptr, order = order_rows(take(edge_type, by_node.perm), graph.num_relations)
    node, perm = take(expand(by_node.rowptr, num_edges), order), take(by_node.perm, order)
    # The number of pairs up to each edge, which is one more than the edge's own pair.
    after = torch.zeros(num_edges + 1, dtype=torch.int32, device=device)
    for span in spans(num_edges):
        here = slice(max(span.start - 1, 0), span.stop)
        relation = rows_at(relation_ptr, numbers(here, relation_ptr))
        first = (node[here].diff() != 0) | (relation.diff() != 0)
        first = first if span.start else torch.cat([first.new_ones(1), first])
        part = after[span.start + 1 : span.stop + 1]
        torch.cumsum(first, 0, dtype=torch.int32, out=part)
        part += after[span.start]
    (num_pairs,) = pull(after[-1])
    pair_node = torch.empty(num_pairs, dtype=torch.int32, device=device)
    degree = torch.zeros(num_pairs, dtype=torch.int32, device=device)
    of_edge = torch.empty(num_edges, dtype=torch.int32, device=device)
    one = torch.ones((), dtype=torch.int32, device=device)
    for span in spans(num_edges):
        pair = after[span.start + 1 : span.stop + 1] - 1
        of_edge[perm[span].long()] = pair
        # The edges of a pair all write one number.
        pair_node[pair.long()] = node[span]
        degree.index_add_(0, pair, one.expand(pair.numel()))
    rowptr, relation_pairs = from_degree(degree), after.index_select(0, relation_ptr)
    most, *ends = torch.cat([longest(rowptr).view(1), relation_pairs]).tolist()
    edges = Adjacency(rowptr, take(by_node.col, order), perm, by_node.num_cols, most, rows, other)
    return CompactRows(edges, pair_node, relation_pairs, of_edge, ends)


def _edges_of(rows: str) -> Callable[[Graph], Adjacency]:
    """Rows are compact rows, columns the other ends of their edges."""
    return lambda graph: compact_rows(graph, rows).edges


def _pairs_of_relations(pairs: str) -> Callable[[Graph], Adjacency]:
    """Rows are relations, columns their compact rows, which are consecutive."""

    def build(graph: Graph) -> Adjacency:
        compact = compact_rows(graph, pairs)
        place = numbers(slice(0, compact.node.numel()), compact.node)
        return Adjacency(
            compact.rowptr, place, place, place.numel(), pull(longest(compact.rowptr))[0], "relations", pairs
        )

    return build


def _pairs_of_nodes(pairs: str) -> Callable[[Graph], Adjacency]:
    """Rows are the nodes of one side, columns their compact rows by relation."""
    side = SIDES[pairs][0]

    def build(graph: Graph) -> Adjacency:
        node = compact_rows(graph, pairs).node
        rowptr, order = order_rows(node, graph.num_src if side == "sources" else graph.num_dst)
        place = order.to(torch.int32)
        return Adjacency(rowptr, place, place, node.numel(), pull(longest(rowptr))[0], side, pairs)

    return build


def _pairs_of_edges(pairs: str) -> Callable[[Graph], Adjacency]:
    """Rows are the nodes of the other side, columns the compact rows of their edges."""
    side, other = SIDES[pairs]

    def build(graph: Graph) -> Adjacency:
        by_other, compact = graph.adjacency(other, side), compact_rows(graph, pairs)
        col = in_spans(graph.num_edges, graph.device, lambda span: compact.of_edge.index_select(0, by_other.perm[span]))
        size = compact.node.numel()
        return Adjacency(by_other.rowptr, outside_capture(col), by_other.perm, size, by_other.max_degree, other, pairs)

    return build


for _pairs, (_side, _other) in SIDES.items():
    builds(_pairs, _other)(_edges_of(_pairs))
    builds("relations", _pairs)(_pairs_of_relations(_pairs))
    builds(_side, _pairs)(_pairs_of_nodes(_pairs))
    builds(_other, _pairs)(_pairs_of_edges(_pairs))
