"""Every form in which PyG takes edges, read as one list of source and target ids."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import torch_geometric.typing
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data.data import BaseData
from torch_geometric.utils import add_self_loops, is_sparse, remove_self_loops

from pyg_dfgnn.errors import check_dtype, check_shape
from pyg_dfgnn.graph.adjacency import MAX_EDGES, expand
from pyg_dfgnn.graph.derived import version_of

INDEX_DTYPES = (torch.int64, torch.int32)


class CooEdges(NamedTuple):
    """Edges as given, before any check of their values.

    Attributes:
        source: Source of each edge, int [E].
        target: Target of each edge, int [E].
        target_sorted: Whether the targets are known to ascend.
    """

    source: Tensor
    target: Tensor
    target_sorted: bool = False


def check_edge_index(edge_index: Any, name: str = "edge_index") -> None:
    """Check type, dtype, shape and number of edges of an `edge_index` tensor, or of a piece of one.

    Raises:
        TypeError: It is not a tensor of int64 or int32.
        ValueError: Its shape is not [2, E] or E exceeds 2^31 - 4097.
    """
    check_shape(name, edge_index, (2, "E"), "[2, E]")
    check_dtype(name, edge_index, INDEX_DTYPES)
    # Kernels check it again; here it would bound the size of an exported program.
    if not torch.compiler.is_compiling() and edge_index.size(1) > MAX_EDGES:
        raise ValueError(f"'{name}' needs at most {MAX_EDGES} edges (got {edge_index.size(1)})")


def with_sizes(edges: Any, num_src: Any, num_dst: Any, transposed: bool) -> tuple[Any, Any, Any]:
    """Return edges with the numbers of nodes that they tell where the user does not: those of `Data` are taken from it.

    Args:
        edges: As for :meth:`pyg_dfgnn.graph.Graph.of`.
        num_src: Number of sources; None if the edges tell it.
        num_dst: Number of targets; None if the edges tell it, or it is `num_src`.
        transposed: Whether row 0 holds the targets.

    Raises:
        TypeError: Data of several edge types or without edges, or no number of nodes.
    """
    if isinstance(edges, BaseData):
        data = edges
        if hasattr(data, "edge_types"):
            kind = type(data).__name__
            raise TypeError(f"'edge_index' needs data with one edge type, or the edges of one (got {kind})")
        edges = getattr(data, "edge_index", None)
        edges = getattr(data, "adj_t", None) if edges is None else edges
        if edges is None:
            raise TypeError(f"'edge_index' needs data with an 'edge_index' or 'adj_t' (got {data})")
        num_src = data.num_nodes if num_src is None else num_src
    if num_src is None and (isinstance(edges, EdgeIndex) or is_adjacency(edges)):
        told = edges.sparse_size() if isinstance(edges, EdgeIndex) else (edges.size(1), edges.size(0))
        num_src, other = told[::-1] if transposed else told
        num_dst = other if num_dst is None else num_dst
    if num_src is None:
        raise TypeError("'num_src' needs the number of nodes, which this 'edge_index' does not tell (got None)")
    return edges, num_src, num_dst


def read_tensor(edge_index: Tensor, transposed: bool, hint: EdgeIndex | None = None) -> CooEdges:
    """Read a tensor [2, E].

    Args:
        edge_index: int64 or int32 [2, E], any strides.
        transposed: Whether row 0 holds the targets (`flow="target_to_source"`).
        hint: The `EdgeIndex` around the tensor, whose sort order may save a sort.
    """
    check_edge_index(edge_index)
    target = 0 if transposed else 1
    is_sorted = hint is not None and hint.sort_order == ("row" if transposed else "col")
    return CooEdges(edge_index[1 - target], edge_index[target], target_sorted=is_sorted)


def is_adjacency(edges: Any) -> bool:
    """Whether `edges` is a sparse matrix: a torch.sparse tensor or a `torch_sparse.SparseTensor`."""
    return isinstance(edges, torch_geometric.typing.SparseTensor) or (isinstance(edges, Tensor) and is_sparse(edges))


def adjacency_anchor(adj: Any) -> tuple[object, Hashable]:
    """Return an object to hold weakly and its indices' versions, which tell whether a sparse matrix is still the same.

    The versions are None if an edit would leave no trace.
    """
    if isinstance(adj, torch_geometric.typing.SparseTensor):
        rowptr, col, _ = adj.csr()
        # Setting values makes a new SparseTensor, changing indices makes a new storage.
        return adj.storage, _versions(rowptr, col)
    if adj.layout == torch.sparse_coo:
        return adj, _versions(adj._indices())
    if adj.layout == torch.sparse_csr:
        return adj, _versions(adj.crow_indices(), adj.col_indices())
    return adj, _versions(adj.ccol_indices(), adj.row_indices())


def _versions(*tensors: Tensor) -> tuple[int, ...] | None:
    versions = [version_of(tensor) for tensor in tensors]
    return None if None in versions else tuple(versions)  # type: ignore[arg-type]


def read_adjacency(adj: Any, num_src: int, num_dst: int, self_loops: bool) -> CooEdges:
    """Read a transposed adjacency matrix `adj_t` [num_dst, num_src], in the order in which PyG lists its entries.

    Args:
        adj: torch.sparse COO, CSR or CSC tensor, or `torch_sparse.SparseTensor`.
        num_src: Number of sources, the columns.
        num_dst: Number of targets, the rows.
        self_loops: Replace the self-loops, with PyG's own functions: they merge duplicates and sort.

    Raises:
        TypeError: The matrix has another layout.
        ValueError: The matrix has another size.
    """
    is_torch_sparse = isinstance(adj, torch_geometric.typing.SparseTensor)
    size = [adj.size(0), adj.size(1)]
    if size != [num_dst, num_src]:
        raise ValueError(f"'edge_index' needs shape [num_dst={num_dst}, num_src={num_src}] as a matrix (got {size})")
    if is_torch_sparse:
        if self_loops:
            adj = torch_geometric.typing.torch_sparse.set_diag(adj)
        row, col, _ = adj.coo()
        return CooEdges(col, row, target_sorted=True)
    if self_loops:
        adj, _ = add_self_loops(remove_self_loops(adj)[0], num_nodes=min(num_src, num_dst))
    if adj.layout == torch.sparse_csr:
        col = adj.col_indices()
        return CooEdges(col, expand(adj.crow_indices(), col.numel()), target_sorted=True)
    if adj.layout == torch.sparse_csc:
        row = adj.row_indices()
        return CooEdges(expand(adj.ccol_indices(), row.numel()), row)
    if adj.layout == torch.sparse_coo:
        row, col = adj._indices()
        # Whether it is coalesced says nothing: PyG marks every matrix that it reads.
        return CooEdges(col, row)
    raise TypeError(
        f"'edge_index' needs layout torch.sparse_coo, torch.sparse_csr or torch.sparse_csc (got {adj.layout})"
    )
