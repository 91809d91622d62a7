"""Laplacian encodings against closed forms and against the definition."""

import math
import sys

import pytest
import torch
from torch_geometric.data import Data

from pyg_dfgnn.datasets import LaplacianEncoding, encoding
from pyg_dfgnn.datasets.encoding import laplacian_eigenvectors


def ring(num_nodes):
    nodes = torch.arange(num_nodes)
    edge_index = torch.stack([nodes, (nodes + 1) % num_nodes])
    return torch.cat([edge_index, edge_index.flip(0)], dim=1)


def laplacian(edge_index, num_nodes):
    adjacency = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    adjacency[edge_index[0], edge_index[1]] = 1
    scale = adjacency.sum(dim=1).rsqrt()
    return torch.eye(num_nodes) - scale[:, None] * adjacency * scale


@pytest.mark.parametrize("dense_nodes", [1024, 8], ids=["dense", "sparse"])
def test_eigenvectors_of_a_ring(monkeypatch, dense_nodes):
    monkeypatch.setattr(encoding, "_DENSE_NODES", dense_nodes)
    num_nodes, edge_index = 30, ring(30)
    vectors = laplacian_eigenvectors(edge_index, num_nodes, 2)
    # The first non-trivial eigenvalue of a ring is double.
    expected = (1 - math.cos(2 * math.pi / num_nodes)) * vectors
    torch.testing.assert_close(laplacian(edge_index, num_nodes) @ vectors, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(vectors.t() @ vectors, torch.eye(2, dtype=torch.float64), atol=1e-6, rtol=0)


def test_direction_duplicates_and_loops_do_not_count():
    edge_index = torch.tensor([[0, 1, 2, 3, 0, 1, 4], [1, 2, 3, 4, 2, 3, 1]])
    dressed = torch.cat([edge_index, edge_index[:, :3], torch.tensor([[2, 4], [2, 4]])], dim=1)
    symmetric = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    for other in (dressed, symmetric):
        torch.testing.assert_close(
            laplacian_eigenvectors(other, 5, 3).abs(), laplacian_eigenvectors(edge_index, 5, 3).abs()
        )


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_small_graphs_are_filled_up(num_nodes):
    data = Data(x=torch.ones(num_nodes, 2), edge_index=torch.empty(2, 0, dtype=torch.long))
    encoded = LaplacianEncoding(5)(data)
    assert encoded.pe.shape == (num_nodes, 5) and encoded.pe.dtype == torch.float32
    assert not encoded.pe[:, num_nodes - 1 :].any()
    assert "pe" not in data


def test_size_is_checked():
    with pytest.raises(ValueError, match=r"'size' needs a value >= 1 \(got 0\)"):
        LaplacianEncoding(0)
    with pytest.raises(TypeError, match=r"'size' needs an integer \(got float 2.5\)"):
        LaplacianEncoding(2.5)


def test_large_graphs_need_scipy(monkeypatch):
    monkeypatch.setattr(encoding, "_DENSE_NODES", 8)
    monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
    with pytest.raises(ModuleNotFoundError, match=r'need scipy: pip install "\.\[data\]"'):
        laplacian_eigenvectors(ring(30), 30, 2)
