"""Positional encodings of nodes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_dfgnn.errors import check_integer, need_extra

# Above this number of nodes, the whole spectrum costs more than a sparse solver of a few eigenvectors.
_DENSE_NODES = 1024


class LaplacianEncoding:
    """Add the Laplacian eigenvectors of the smallest non-trivial eigenvalues as `pe [N, size]`.

    The matrix `L = I - D^-1/2 A D^-1/2` has the symmetrised adjacency. The first eigenvector is left out, and a graph
    with too few nodes is filled up with zeros. Models flip the arbitrary sign of each vector at random in training.

    Args:
        size: Number of eigenvectors.

    Raises:
        ValueError: `size` is below 1.

    Source: Dwivedi and Bresson, A Generalization of Transformer Networks to Graphs, 2021, section 2.3.
    """

    def __init__(self, size: int) -> None:
        check_integer("size", size, 1)
        self.size = size

    def __call__(self, data: Data) -> Data:
        data = data.clone()
        data.pe = laplacian_eigenvectors(data.edge_index, data.num_nodes, self.size).to(data.x.dtype)
        return data


def laplacian_eigenvectors(edge_index: Tensor, num_nodes: int, size: int) -> Tensor:
    """Return the eigenvectors `[N, size]` after the first, in float64.

    Raises:
        ModuleNotFoundError: The graph is large and scipy is missing.
    """
    solve = _dense_eigenvectors if num_nodes <= max(_DENSE_NODES, size + 2) else _sparse_eigenvectors
    vectors = torch.zeros(num_nodes, size, dtype=torch.float64)
    smallest = solve(edge_index, num_nodes, size + 1)[:, 1:]
    vectors[:, : smallest.size(1)] = smallest
    return vectors


def _dense_eigenvectors(edge_index: Tensor, num_nodes: int, count: int) -> Tensor:
    adjacency = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    adjacency[edge_index[0], edge_index[1]] = 1
    adjacency[edge_index[1], edge_index[0]] = 1
    adjacency.fill_diagonal_(0)
    scale = adjacency.sum(dim=1).clamp(min=1).rsqrt()
    laplacian = torch.eye(num_nodes, dtype=torch.float64) - scale[:, None] * adjacency * scale
    return torch.linalg.eigh(laplacian)[1][:, :count]


def _sparse_eigenvectors(edge_index: Tensor, num_nodes: int, count: int) -> Tensor:
    need_extra("scipy.sparse.linalg", "the encodings of large graphs", "data")
    import numpy as np
    from scipy.sparse import coo_matrix, diags
    from scipy.sparse.linalg import eigsh

    row, col = edge_index.cpu().numpy()
    row, col = row[row != col], col[row != col]
    adjacency = coo_matrix((np.ones(len(row)), (row, col)), shape=(num_nodes, num_nodes)).tocsr()
    adjacency = ((adjacency + adjacency.T) > 0).astype(float)
    scale = diags(np.maximum(adjacency.sum(axis=1).A1, 1) ** -0.5)
    # The largest eigenvalues of I - L are the smallest of L and need no factorisation. A start without symmetry, a wide
    # basis and full accuracy find both vectors of a double eigenvalue.
    start = np.random.default_rng(0).standard_normal(num_nodes)
    basis = min(num_nodes, max(2 * count + 1, 40))
    values, vectors = eigsh(scale @ adjacency @ scale, k=count, which="LA", v0=start, tol=0, ncv=basis)
    return torch.from_numpy(vectors[:, np.argsort(-values)].copy())
