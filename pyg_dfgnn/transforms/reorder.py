"""Renumber the nodes of a graph so that gathers hit the cache, and put results back in the old order."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_geometric.typing
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from pyg_dfgnn.errors import check_integer, check_range, check_tensor
from pyg_dfgnn.graph.adjacency import sort_rows
from pyg_dfgnn.graph.forms import is_adjacency, read_adjacency
from pyg_dfgnn.graph.reorder import check_method, gather_misses, inverse_of, node_order

NODE_PERM, NODE_INVERSE = "node_perm", "node_inverse"
CACHE_ROWS = 65_536
"""Rows of 128 float32 in 32 MB, which an L2 cache of 50 MB holds beside the other arrays of a kernel."""
_OF_BATCHES = ("batch", "ptr", "input_id", "num_sampled_nodes")


@dataclass(frozen=True)
class ReorderReport:
    """Cost and effect of one reordering.

    Attributes:
        method: Name of the method.
        cost_s: Seconds for the order and for moving everything; the measurement of the locality is left out.
        misses_before: Estimated share of the gathers of a pass over targets that miss the cache, in the old order.
        misses_after: That share in the new order.
    """

    method: str
    cost_s: float
    misses_before: float
    misses_after: float

    def __str__(self) -> str:
        change = f"{100 * self.misses_before:.3g} % to {100 * self.misses_after:.3g} %"
        return f"reordered by {self.method} in {self.cost_s:.3g} s, gathers that miss the cache: {change}"


class Reorder(BaseTransform):
    """Renumber the nodes of a graph so that neighbours have close numbers, together with everything on nodes.

    Node-level attributes, as PyG tells them, move with their nodes. Values of attributes that hold node ids (`face` and
    every name with `index`, which PyG shifts in batches) are renumbered. Edges keep their order, so that edge-level
    attributes stay as they are; the entries of a sparse `adj_t` without an `edge_index` are sorted anew, and edge-level
    attributes with them.

    Stored are `node_perm` [N], the old number of each node (of the first order, if the graph is reordered again), and
    its inverse `node_inverse` [N], the new place of each old node. :func:`restore_order` puts results back.

    Args:
        method: As in :func:`~pyg_dfgnn.graph.reorder.node_order`: "degree", "rcm", "community" or "metis".
        cache_rows: Rows of features that the cache holds for the estimate of misses.

    Attributes:
        report: What the last graph has cost and gained; None before the first one.

    Raises:
        TypeError: `cache_rows` is no integer.
        ValueError: `method` is unknown, or `cache_rows` below 1.
        ModuleNotFoundError: scipy ("rcm") or pymetis ("metis") is missing.

    Example:
        >>> reorder = Reorder("rcm")
        >>> data = reorder(dataset[0])
        >>> print(reorder.report)
        >>> out = restore_order(model(data.x, data.edge_index), data)
    """

    def __init__(self, method: str = "rcm", cache_rows: int = CACHE_ROWS) -> None:
        check_method(method)
        check_integer("cache_rows", cache_rows, 1)
        self.method, self.cache_rows = method, cache_rows
        self.report: ReorderReport | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(method={self.method!r})"

    def forward(self, data: Data) -> Data:
        """Renumber one graph.

        Raises:
            TypeError: `data` is heterogeneous, or has neither an integer tensor `edge_index` nor a sparse `adj_t`.
            ValueError: `data` is a batch or a sample, or holds an id that is out of range.
        """
        _refuse(data)
        num_nodes = int(data.num_nodes)  # type: ignore[arg-type]
        edge_index = _edge_index(data, num_nodes)
        started = time.perf_counter()
        perm = node_order(edge_index, num_nodes, self.method)
        reordered = _reordered(data, perm, inverse_of(perm))
        total = reordered.get(NODE_PERM, perm)
        reordered |= {NODE_PERM: total, NODE_INVERSE: inverse_of(total)}
        if perm.is_cuda:
            torch.cuda.synchronize(perm.device)
        cost_s = time.perf_counter() - started
        before = self._misses(edge_index, num_nodes)
        data.update(reordered)
        self.report = ReorderReport(self.method, cost_s, before, self._misses(_edge_index(data, num_nodes), num_nodes))
        return data

    def _misses(self, edge_index: Tensor, num_nodes: int) -> float:
        source, target = edge_index
        return gather_misses(source[sort_rows(target, num_nodes)[1]], self.cache_rows)


def restore_order(rows: Tensor, data: Data) -> Tensor:
    """Put one row per node back in the order that the nodes had before :class:`Reorder`.

    Args:
        rows: Results of a model on `data`, [N, ...].
        data: A reordered graph, or a batch of whole reordered graphs.

    Returns:
        The rows [N, ...]; in a batch, the nodes of each graph are in their old order.

    Raises:
        TypeError: `rows` is no tensor.
        ValueError: `data` was not reordered or lacks some of its nodes, or `rows` has another number of rows.
    """
    check_tensor("rows", rows)
    perm = data.get(NODE_PERM)
    if perm is None:
        raise ValueError("'data' needs the node_perm that Reorder stores")
    if rows.dim() == 0 or rows.size(0) != perm.numel():
        raise ValueError(f"'rows' needs shape [N={perm.numel()}, ...] (got {list(rows.shape)})")
    ptr = data.get("ptr")
    if ptr is not None:
        perm = perm + ptr[:-1].repeat_interleave(ptr.diff())
    order = perm.argsort()
    if not torch.equal(perm[order], torch.arange(perm.numel(), device=perm.device)):
        raise ValueError("'data' needs every node that Reorder saw: node_perm is no permutation any more")
    return rows.index_select(0, order.to(rows.device))


def break_even_epochs(cost_s: float, before_s: float, after_s: float) -> float:
    """Return after how many epochs a reordering has paid for itself: `ceil(cost / (before - after))`.

    Args:
        cost_s: Seconds of the reordering.
        before_s: Seconds of an epoch (or a step) in the old order.
        after_s: Seconds of an epoch (or a step) in the new order.

    Returns:
        A whole number of epochs (or steps); infinity if the new order is not faster.

    Raises:
        ValueError: A time is negative.
    """
    for name, value in (("cost_s", cost_s), ("before_s", before_s), ("after_s", after_s)):
        check_range(name, value, 0)
    return math.ceil(cost_s / (before_s - after_s)) if after_s < before_s else math.inf


def _refuse(data: Any) -> None:
    """Refuse what holds no single whole graph whose nodes may change places."""
    if not isinstance(data, Data):
        raise TypeError(f"'data' needs to be a homogeneous Data (got {type(data).__name__})")
    if parts := [name for name in _OF_BATCHES if name in data]:
        raise ValueError(
            f"'data' needs to be one whole graph: apply Reorder before batches are made (got {parts[0]!r})"
        )
    if data.num_nodes is None:
        raise ValueError("'data' needs 'num_nodes' or features")


def _edge_index(data: Data, num_nodes: int) -> Tensor:
    """The edges as a plain tensor [2, E], row 0 sources."""
    edges, adj_t = data.get("edge_index"), data.get("adj_t")
    if isinstance(edges, EdgeIndex):
        return edges.as_tensor()
    if edges is None and is_adjacency(adj_t):
        source, target, _ = read_adjacency(adj_t, num_nodes, num_nodes, self_loops=False)
        return torch.stack([source, target])
    if not isinstance(edges, Tensor):
        raise TypeError(f"'data' needs a tensor 'edge_index' or a sparse 'adj_t' (got {sorted(data.keys())})")
    return edges


def _reordered(data: Data, perm: Tensor, inverse: Tensor) -> dict[str, Any]:
    """The attributes that change, by name, in the new order."""
    (store,) = data.stores
    num_nodes, edge_order = perm.numel(), None
    reordered: dict[str, Any] = {}
    for name, value in store.items():
        if name == NODE_INVERSE:
            continue
        if "adj" in name and is_adjacency(value):
            reordered[name], edge_order = _permuted(value, inverse)
        elif "adj" in name and isinstance(value, Tensor) and value.shape[:2] == (num_nodes, num_nodes):
            reordered[name] = value.index_select(0, perm).index_select(1, perm)
        elif _holds_ids(name, value):
            reordered[name] = _renumbered(name, value, inverse)
            if value.dim() == 1 and store.is_node_attr(name):
                reordered[name] = reordered[name].index_select(0, perm)
        elif isinstance(value, torch_geometric.typing.SparseTensor) and value.size(0) == num_nodes:
            reordered[name] = value.index_select(0, perm)
        elif f"{name}_index" not in data and store.is_node_attr(name):
            reordered[name] = _rows(value, perm, data.__cat_dim__(name, value, store))
    if edge_order is not None and "edge_index" not in data:
        for name, value in store.items():
            if name not in reordered and store.is_edge_attr(name):
                reordered[name] = _rows(value, edge_order, data.__cat_dim__(name, value, store))
    return reordered


def _holds_ids(name: str, value: Any) -> bool:
    """Whether an attribute holds ids of nodes: by its name, as PyG has it for batches, and by its dtype."""
    is_named = "index" in name or name == "face"
    return is_named and isinstance(value, Tensor) and not value.is_floating_point() and value.dtype is not torch.bool


def _renumbered(name: str, ids: Tensor, inverse: Tensor) -> Tensor:
    """The new numbers of the nodes in a tensor of any shape."""
    plain = ids.as_tensor() if isinstance(ids, EdgeIndex) else ids
    low, high = (int(bound) for bound in plain.aminmax()) if plain.numel() else (0, -1)
    if low < 0 or high >= inverse.numel():
        raise ValueError(f"'{name}' needs node ids in [0, num_nodes={inverse.numel()}) (got {low} to {high})")
    plain = inverse.to(plain.dtype)[plain.long()]
    if not isinstance(ids, EdgeIndex):
        return plain
    return EdgeIndex(plain, sparse_size=ids.sparse_size(), is_undirected=ids.is_undirected)


def _rows(value: Any, perm: Tensor, dim: int) -> Any:
    """The entries of a node-level or edge-level attribute in another order."""
    if isinstance(value, Tensor):
        perm = perm.to(value.device)
        # A sparse CSR or CSC matrix has no index_select.
        is_compressed = value.layout in (torch.sparse_csr, torch.sparse_csc)
        rows = (value.to_sparse_coo() if is_compressed else value).index_select(dim, perm)
        return rows.to_sparse(layout=value.layout) if is_compressed else rows
    if isinstance(value, np.ndarray):
        return value.take(perm.cpu().numpy(), axis=dim)
    if isinstance(value, (list, tuple)):
        return type(value)([value[i] for i in perm.tolist()])
    return value[perm]


def _permuted(adj: Any, inverse: Tensor) -> tuple[Any, Tensor]:
    """A sparse matrix [N, N] with both sides renumbered, and the order of its old entries in it."""
    num_nodes = inverse.numel()
    col, row, _ = read_adjacency(adj, num_nodes, num_nodes, self_loops=False)
    row, col = inverse[row.long()], inverse[col.long()]
    is_csc = isinstance(adj, Tensor) and adj.layout == torch.sparse_csc
    major, minor = (col, row) if is_csc else (row, col)
    order = minor.argsort(stable=True)
    order = order[major[order].argsort(stable=True)]
    row, col = row[order], col[order]
    if not isinstance(adj, Tensor):
        value = adj.storage.value()
        value = None if value is None else value[order]
        sizes = (num_nodes, num_nodes)
        matrix = type(adj)(row=row, col=col, value=value, sparse_sizes=sizes, is_sorted=True, trust_data=True)
        return matrix, order
    is_coo = adj.layout == torch.sparse_coo
    value = (adj._values() if is_coo else adj.values())[order]
    if is_coo:
        indices = torch.stack([row, col])
        return torch.sparse_coo_tensor(indices, value, adj.shape, is_coalesced=adj.is_coalesced()), order
    ptr = torch.searchsorted(major[order], torch.arange(num_nodes + 1, device=row.device))
    make = torch.sparse_csc_tensor if is_csc else torch.sparse_csr_tensor
    return make(ptr, row if is_csc else col, value, adj.shape), order
