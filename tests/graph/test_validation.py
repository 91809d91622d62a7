"""Wrong edges give one clear error."""

import pytest
import torch
from torch_geometric.data import HeteroData

from pyg_dfgnn.graph import Graph, SortEdges


@pytest.mark.parametrize("self_loops", [False, True], ids=["plain", "loops"])
@pytest.mark.parametrize(
    "edges, message",
    [
        ([[0, 5], [0, 0]], r"needs source ids in \[0, num_src=5\) \(got 0 to 5\)"),
        ([[-1, 4], [0, 0]], r"needs source ids in \[0, num_src=5\) \(got -1 to 4\)"),
        ([[0, 4], [2, 3]], r"needs target ids in \[0, num_dst=3\) \(got 2 to 3\)"),
        ([[0, 4], [-7, 2]], r"needs target ids in \[0, num_dst=3\) \(got -7 to 2\)"),
        ([[0, 4], [0, 2**16]], r"needs target ids in \[0, num_dst=3\) \(got 0 to 65536\)"),
        ([[0, 2**32], [0, 0]], r"needs source ids in \[0, num_src=5\) \(got 0 to 4294967296\)"),
    ],
)
def test_id_out_of_range(edges, message, self_loops):
    with pytest.raises(ValueError, match="'edge_index' " + message):
        Graph.of(torch.tensor(edges), 5, 3, self_loops=self_loops)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (4, 2), (2, 2, 2), ()])
def test_shape(shape):
    with pytest.raises(ValueError, match=r"'edge_index' needs shape \[2, E\]"):
        Graph.of(torch.zeros(shape, dtype=torch.int64), 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool], ids=str)
def test_dtype(dtype):
    with pytest.raises(TypeError, match="'edge_index' needs dtype torch.int64 or torch.int32"):
        Graph.of(torch.zeros(2, 3, dtype=dtype), 5)


def test_not_a_tensor():
    with pytest.raises(TypeError, match="'edge_index' needs a torch.Tensor"):
        Graph.of([[0], [1]], 2)


@pytest.mark.parametrize("sizes, name", [((-1, 2), "num_src"), ((2, -1), "num_dst"), ((2**31, 2), "num_src")])
def test_sizes(sizes, name):
    with pytest.raises(ValueError, match=f"'{name}' needs a value in"):
        Graph.of(torch.zeros(2, 0, dtype=torch.int64), *sizes)


def test_flow():
    with pytest.raises(ValueError, match="'flow' needs one of"):
        Graph.of(torch.zeros(2, 0, dtype=torch.int64), 2, flow="upstream")


def test_more_edges_than_int32_counts():
    edge_index = torch.zeros(1, 1, dtype=torch.int64).expand(2, 2**31)
    with pytest.raises(ValueError, match="at most 2147479551 edges"):
        Graph.of(edge_index, 1)


def test_loops_count_as_edges():
    edge_index = torch.zeros(1, 1, dtype=torch.int64).expand(2, 2**31 - 4097)
    with pytest.raises(ValueError, match="self-loops included"):
        Graph.of(edge_index, 1, self_loops=True)


def test_failed_build_leaves_nothing_behind():
    edge_index = torch.tensor([[0, 9], [0, 0]])
    for _ in range(2):
        with pytest.raises(ValueError, match="source ids"):
            Graph.of(edge_index, 5)


def test_heterogeneous_batch():
    with pytest.raises(TypeError, match="'batch' needs one edge type"):
        Graph.of_batch(HeteroData())
    with pytest.raises(TypeError, match="'batch' needs one edge type"):
        SortEdges()(HeteroData())
