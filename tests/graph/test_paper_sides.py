"""What `smmf` and `pmf` read of a graph beyond CSR and CSC: the fullest block, where an edge is in the other side."""

import pytest
import torch

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference.zoo import zoo


@pytest.fixture(params=zoo(), ids=str)
def graph(request):
    case = request.param
    return Graph.of(case.edge_index.clone(), case.num_src, case.num_dst)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_block_edges(graph, rows):
    for side in (graph.csr, graph.csc):
        blocks = torch.bincount(side.row.long() // rows)
        assert side.block_edges(rows) == (int(blocks.max()) if blocks.numel() else 0)


def test_block_edges_are_kept(graph, monkeypatch):
    expected = graph.csr.block_edges(8)
    monkeypatch.setattr("pyg_dfgnn.graph.adjacency.pull", None)
    assert graph.csr.block_edges(8) == expected


def test_positions_lead_to_the_same_edge(graph):
    position = graph.csc.position_in(graph.csr)
    assert position.dtype == torch.int32
    assert torch.equal(graph.csr.perm[position.long()], graph.csc.perm)
    assert torch.equal(graph.csr.row[position.long()], graph.csc.col)
    assert torch.equal(graph.csr.col[position.long()], graph.csc.row)
    assert graph.csc.position_in(graph.csr) is position
    assert any(tensor is position for tensor in graph.csc.tensors())
