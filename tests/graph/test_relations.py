"""Compact rows and the adjacencies between nodes, relations and compact rows, against brute force."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from pyg_dfgnn.graph import Graph, compact_rows
from pyg_dfgnn.graph.derived import tensors_of
from pyg_dfgnn.graph.relations import SIDES, ratio
from pyg_dfgnn.reference.zoo import EdgeList, many_relations, zoo
from tests.graph.memory import PeakBytes, sorted_in_spans

GRAPHS = {
    graph.name: graph
    if graph.edge_type is not None
    else replace(graph, edge_type=(7 * torch.arange(graph.num_edges)) % 4, num_relations=5)
    for graph in zoo()
}
GRAPHS["one-relation"] = replace(
    GRAPHS["duplicates"], edge_type=torch.zeros(GRAPHS["duplicates"].num_edges, dtype=torch.int64), num_relations=1
)


def graph_of(edges: EdgeList) -> Graph:
    return Graph.of(
        edges.edge_index, edges.num_src, edges.num_dst, edge_type=edges.edge_type, num_relations=edges.num_relations
    )


@pytest.fixture(params=[False, True], ids=["whole", "spans"])
def in_spans(request, monkeypatch):
    """Also as large graphs are built."""
    with sorted_in_spans(monkeypatch) if request.param else nullcontext():
        yield


def rows_as_lists(adjacency) -> list[list[tuple[int, int]]]:
    """(column, position) of the entries of each row, sorted; every array is int32 and the facts hold."""
    assert {array.dtype for array in adjacency.arrays} == {torch.int32}
    ptr, col, perm = (array.tolist() for array in adjacency.arrays)
    assert ptr[0] == 0 and ptr[-1] == len(col) == len(perm) and all(c < adjacency.num_cols for c in col)
    assert adjacency.max_degree == max((end - begin for begin, end in zip(ptr, ptr[1:])), default=0)
    return [sorted(zip(col[begin:end], perm[begin:end])) for begin, end in zip(ptr, ptr[1:])]


@pytest.mark.parametrize("pairs", SIDES)
@pytest.mark.parametrize("name", GRAPHS)
def test_adjacencies_equal_brute_force(name, pairs, in_spans):
    edges = GRAPHS[name]
    graph = graph_of(replace(edges, edge_index=edges.edge_index.clone(), edge_type=edges.edge_type.clone()))
    side, other = SIDES[pairs]
    ends = {"sources": edges.edge_index[0].tolist(), "targets": edges.edge_index[1].tolist()}
    sizes = {"sources": edges.num_src, "targets": edges.num_dst}
    relations = edges.edge_type.tolist()
    known = sorted(set(zip(relations, ends[side])))
    number = {pair: i for i, pair in enumerate(known)}
    of_edge = [number[pair] for pair in zip(relations, ends[side])]

    compact = compact_rows(graph, pairs)
    assert list(zip(compact.relation.tolist(), compact.node.tolist())) == known
    assert compact.of_edge.tolist() == of_edge
    assert ratio(graph, pairs) == (len(known) / edges.num_edges if edges.num_edges else 1.0)

    want: list[list[tuple[int, int]]] = [[] for _ in known]
    for edge, pair in enumerate(of_edge):
        want[pair].append((ends[other][edge], edge))
    assert rows_as_lists(graph.adjacency(pairs, other)) == [sorted(row) for row in want]

    for domain, key in (("relations", 0), (side, 1)):
        want = [[] for _ in range(edges.num_relations if domain == "relations" else sizes[side])]
        for pair, i in number.items():
            want[pair[key]].append((i, i))
        assert rows_as_lists(graph.adjacency(domain, pairs)) == want

    want = [[] for _ in range(sizes[other])]
    for edge, pair in enumerate(of_edge):
        want[ends[other][edge]].append((pair, edge))
    assert rows_as_lists(graph.adjacency(other, pairs)) == [sorted(row) for row in want]


def test_graph_without_relations_is_refused():
    graph = Graph.of(torch.tensor([[0], [1]]), 2)
    with pytest.raises(ValueError, match="'graph' needs the relation of each edge: make it with 'edge_type'"):
        graph.adjacency("source_relations", "targets")


@pytest.mark.parametrize("pairs", SIDES)
def test_memory_is_bounded(pairs, monkeypatch):
    """Beside the result at most 24 bytes per edge are held, as for the other structures of a graph."""
    graph = graph_of(many_relations(300, 40, 40_000))
    adjacencies = graph.csr.arrays, graph.csc.arrays
    with sorted_in_spans(monkeypatch), PeakBytes(graph.relation, *adjacencies) as held:
        compact = compact_rows(graph, pairs)
    result = sum(tensor.nbytes for tensor in tensors_of(compact))
    assert held.peak - result <= 24 * graph.num_edges
