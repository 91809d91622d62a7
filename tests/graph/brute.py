"""The obvious version: what a graph must hold, checked edge by edge."""

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import add_self_loops, remove_self_loops

from pyg_dfgnn.graph import Adjacency, Graph
from pyg_dfgnn.graph.chunks import row_index
from pyg_dfgnn.reference.zoo import random, zoo


def with_loops(edge_index: Tensor, num_src: int, num_dst: int) -> Tensor:
    """Self-loops replaced by PyG's own functions."""
    return add_self_loops(remove_self_loops(edge_index)[0], num_nodes=min(num_src, num_dst))[0]


def check_side(graph: Graph, side: Adjacency, rows: Tensor, ends: Tensor, num_rows: int) -> None:
    """Check one side against rows [E] and their other ends [E] in input order."""
    assert side.rowptr.dtype == side.col.dtype == side.perm.dtype == torch.int32
    assert all(tensor.is_contiguous() for tensor in side.arrays)
    assert (side.num_rows, side.num_edges) == (num_rows, rows.numel())
    members: list[list[int]] = [[] for _ in range(num_rows)]
    for edge, row in enumerate(rows.tolist()):
        members[row].append(edge)
    rowptr, col, perm, end = side.rowptr.tolist(), side.col.tolist(), side.perm.tolist(), ends.tolist()
    assert rowptr[0] == 0 and len(rowptr) == num_rows + 1 and rowptr[-1] == len(col) == len(perm)
    for row in range(num_rows):
        here = perm[rowptr[row] : rowptr[row + 1]]
        assert sorted(here) == members[row]
        assert col[rowptr[row] : rowptr[row + 1]] == [end[edge] for edge in here]
    assert side.max_degree == max(map(len, members), default=0)
    assert row_index(graph, side).tolist() == [row for row in range(num_rows) for _ in members[row]]


def check_graph(graph: Graph, edge_index: Tensor, num_src: int, num_dst: int) -> None:
    """Check all of a graph against its edges [2, E], row 0 sources, row 1 targets."""
    source, target = edge_index.long()
    assert (graph.num_src, graph.num_dst, graph.num_edges) == (num_src, num_dst, source.numel())
    assert torch.equal(graph.edge_index, edge_index.long())
    check_side(graph, graph.csr, target, source, num_dst)
    check_side(graph, graph.csc, source, target, num_src)
    assert Graph.resolve(*graph.key) is graph


def members(num=6):
    """Graphs of all sizes, empty ones among them, with features that name each edge."""
    found = [case for case in zoo() if case.num_src == case.num_dst and case.num_src > 0][:9]
    found += [random(4 + seed, 4 + seed, 5 * seed, seed=seed) for seed in range(num)]
    return [
        Data(
            x=torch.randn(case.num_src, 3),
            edge_index=case.edge_index,
            edge_attr=(case.edge_index[0] * 100 + case.edge_index[1]).float().view(-1, 1),
            y=torch.zeros(1),
            num_nodes=case.num_src,
        )
        for case in found
    ]
