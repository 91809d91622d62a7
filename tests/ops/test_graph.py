"""The arrays of new edges by kernels, and which edges are measured at once."""

import pytest
import torch

from pyg_dfgnn.errors import IdRangeError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.equal_edges import graph_of
from pyg_dfgnn.ops.graph import MEASURED_EDGES, reports, unmeasured_graph
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.new_edges import random_edges

LAYER = 1
"""Number of a layer, as calls identify it."""


@pytest.fixture(autouse=True)
def no_reports():
    yield
    reports("cpu").values.zero_()


LENGTHS = torch.tensor([1, 31, 32, 33, 63, 64, 65, 0, 96, 127, 128, 129, 140])
ROWS = torch.arange(len(LENGTHS)).repeat_interleave(LENGTHS)[
    torch.randperm(int(LENGTHS.sum()), generator=torch.Generator().manual_seed(0))
]

GRAPHS = {
    "plain": (random_edges(40, 40, 300), 40, 40),
    "no edges": (random_edges(7, 3, 0), 7, 3),
    "one node": (random_edges(1, 1, 5), 1, 1),
    "bipartite": (random_edges(60, 9, 400), 60, 9),
    "isolated": (random_edges(5, 5, 20), 90, 90),
    "int32": (random_edges(30, 30, 200, dtype=torch.int32), 30, 30),
    "rows of all lengths": (torch.stack([torch.arange(LENGTHS.sum()) % 150, ROWS]), 150, len(LENGTHS)),
    "hub": (torch.stack([torch.arange(1500).flip(0), torch.zeros(1500, dtype=torch.int64)]), 1500, 3),
    "strided": (random_edges(30, 30, 200).t().contiguous().t(), 30, 30),
}


@needs_compiler
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_arrays_are_those_of_a_measured_graph(name, self_loops, transposed):
    edge_index, num_src, num_dst = GRAPHS[name]
    edge_index = edge_index.flip(0) if transposed else edge_index.clone()
    with emulated_device(order="random"):
        new = unmeasured_graph(LAYER, edge_index, num_src, num_dst, self_loops, transposed)
    measured = Graph.resolve(edge_index, num_src, num_dst, self_loops, transposed)
    count, source = measured.num_edges, measured.edge_index[0]
    rowptr, col, perm = new.csr.arrays
    assert torch.equal(rowptr, measured.csr.rowptr) and torch.equal(col[:count], measured.csr.col)
    if not self_loops:
        assert torch.equal(perm[:count], measured.csr.perm)
    rowptr, col, perm = new.csc.arrays
    assert torch.equal(rowptr, measured.csc.rowptr)
    for row in range(num_src):
        places = slice(int(rowptr[row]), int(rowptr[row + 1]))
        assert torch.equal(perm[places], perm[places].sort().values)
        assert torch.equal(col[places].sort().values.long(), measured.edge_index[1, source == row].sort().values)


@needs_compiler
@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([[0, 9], [1, 2]], r"source id 9 of 5 nodes"),
        ([[0, 1], [1, -3]], r"target id -3 of 4 nodes"),
        ([[5, 1], [1, 4]], r"target id 4 of 4 nodes, source id 5 of 5 nodes"),
    ],
)
def test_ids_out_of_range_are_named_and_left_out(edges, message):
    edge_index = torch.tensor(edges)
    with emulated_device(), pytest.raises(IdRangeError, match=message):
        unmeasured_graph(LAYER, edge_index, 5, 4, False, False)
    with emulated_device():
        assert unmeasured_graph(LAYER, edge_index.new_tensor([[0], [0]]), 5, 4, False, False).num_edges == 1


@needs_compiler
def test_after_a_long_row_new_graphs_are_measured():
    edge_index = torch.stack([torch.arange(5000) % 9, torch.zeros(5000, dtype=torch.int64)])
    with emulated_device():
        assert not unmeasured_graph(LAYER, edge_index, 9, 9, False, False).is_measured
        assert unmeasured_graph(LAYER, edge_index.clone(), 9, 9, False, False) is None


def test_large_graphs_are_measured_at_once():
    edge_index = torch.zeros(2, 1, dtype=torch.int64).expand(2, MEASURED_EDGES)
    with emulated_device():
        assert unmeasured_graph(LAYER, edge_index, 3, 3, False, False) is None
        assert unmeasured_graph(LAYER, edge_index[:, :1].clone(), 3, MEASURED_EDGES, False, False) is None


@needs_compiler
def test_programs_get_a_measured_graph():
    edge_index = random_edges(9, 9, 30)
    with emulated_device():
        unmeasured_graph(LAYER, edge_index, 9, 9, False, False)
    assert graph_of({}, edge_index, 9, 9, False).is_measured


@needs_compiler
def test_a_graph_that_a_capture_has_taken_outlives_errors_and_its_successor():
    edge_index, other = random_edges(9, 9, 30), random_edges(9, 9, 30)
    with emulated_device():
        taken = unmeasured_graph(LAYER, edge_index, 9, 9, False, False).pin()
        unmeasured_graph(LAYER, other, 9, 9, False, False)
    Graph.forget_unmeasured()
    assert Graph.known(edge_index, 9, 9, False, False) is taken and Graph.known(other, 9, 9, False, False) is None
    measured = Graph.resolve(edge_index, 9, 9, False, False)
    assert measured.is_measured and measured.pinned and any(value is taken for value in measured._derived.values())
