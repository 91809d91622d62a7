"""Batches of small graphs: sort each graph once, on the host, and never a batch on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from pyg_dfgnn.graph import forms
from pyg_dfgnn.graph.adjacency import Adjacency, Arrays, expand, from_degree, longest, pull
from pyg_dfgnn.graph.build import Built, bounds_of, build, check_edges, refuse_ids
from pyg_dfgnn.graph.facts import BY_SOURCE, FACTS, IN_DEGREE, OUT_DEGREE, BatchFacts


class SortEdges(BaseTransform):
    """Sort the edges of a graph by (target, source) and store what a batch needs to be compressed without a sort.

    Everything on edges (`edge_attr`, ...) is sorted alike. Stored are the in- and out-degree of each node, int32 [N],
    the positions of the edges in source order, int32 [E], and facts of the graph, int32 [1, 7]; collation concatenates
    them as they are, and `Graph.of_batch` turns them into the CSR and CSC of the batch. Apply it last: it holds for the
    edges it saw.

    Example:
        >>> dataset = TUDataset(root, "MUTAG", pre_transform=SortEdges())
        >>> for batch in DataLoader(dataset, batch_size=32):
        ...     batch = batch.to(device)
        ...     Graph.of_batch(batch)
        ...     out = model(batch.x, batch.edge_index)
    """

    def forward(self, data: Data) -> Data:
        """Sort the edges of one graph.

        Raises:
            TypeError: `data` is heterogeneous or has no integer tensor `edge_index`.
            ValueError: An id is out of range.
        """
        edge_index, num_nodes = batch_edge_index(data, "data"), data.num_nodes
        num_edges = edge_index.size(1)
        refuse_ids(pull(*bounds_of(*edge_index)), num_nodes, num_nodes, num_edges)
        order = edge_index[0].argsort(stable=True)
        order = order[edge_index[1, order].argsort(stable=True)]
        for store in data.edge_stores:
            for name, value in list(store.items()):
                if name == "edge_index":
                    data.edge_index = edge_index[:, order]
                elif store.is_edge_attr(name):
                    store[name] = _in_order(value, order, data.__cat_dim__(name, value, store))
        source, target = data.edge_index
        data[IN_DEGREE] = target.bincount(minlength=num_nodes).int()
        data[OUT_DEGREE] = source.bincount(minlength=num_nodes).int()
        data[BY_SOURCE] = source.argsort(stable=True).int()
        is_loop = source == target
        loops = source[is_loop].bincount(minlength=num_nodes)
        degrees = (data[IN_DEGREE], data[OUT_DEGREE], data[IN_DEGREE] - loops, data[OUT_DEGREE] - loops)
        most = [int(degree.max()) if num_nodes else 0 for degree in degrees]
        repeated = ((source.diff() == 0) & (target.diff() == 0)).any()
        data[FACTS] = torch.tensor([[num_edges, int(is_loop.sum()), *most, int(repeated)]], dtype=torch.int32)
        return data


def _in_order(value: Any, order: Tensor, dim: Any) -> Any:
    """Return a tensor, array, list or tuple along the edges in another order of these."""
    if isinstance(value, Tensor):
        return value.index_select(dim, order)
    if isinstance(value, np.ndarray):
        return value.take(order.cpu().numpy(), axis=dim)
    return type(value)([value[place] for place in order.tolist()])


def batch_edge_index(batch: Any, name: str = "batch") -> Tensor:
    """Return the plain `edge_index` tensor of a homogeneous batch, the one that convs will be given.

    Args:
        batch: The batch, or one graph.
        name: What the user calls it.

    Raises:
        TypeError: There is none.
    """
    edge_index = None if hasattr(batch, "edge_types") else getattr(batch, "edge_index", None)
    if not isinstance(edge_index, Tensor):
        raise TypeError(f"'{name}' needs one edge type with a tensor 'edge_index' (got {type(batch).__name__})")
    edge_index = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
    forms.check_edge_index(edge_index)
    return edge_index


def trust_batch(batch: Any, edge_index: Tensor, facts: BatchFacts) -> Built:
    """Build a batch as its graphs were stored by :class:`SortEdges`: no sort, no check, no host sync."""
    num_nodes, num_edges = batch.num_nodes, facts.num_edges
    if (edge_index.size(1), num_nodes) != (num_edges, int(facts.nodes.sum())):
        raise _changed("edge_index")
    check_edges(num_edges)
    in_degree, out_degree, by_source = _stored(batch, num_nodes, num_edges)
    graph_ptr = _graph_ptr(batch, edge_index.device)
    rowptr, source_ptr = from_degree(in_degree), from_degree(out_degree)
    source, target = edge_index.to(torch.int32, copy=True)
    edge_ptr = rowptr.index_select(0, graph_ptr)
    by_source = by_source + edge_ptr[:-1].repeat_interleave(edge_ptr.diff(), output_size=num_edges)
    csr = Arrays(rowptr, source, torch.arange(num_edges, dtype=torch.int32, device=rowptr.device))
    csc = Arrays(source_ptr, target.index_select(0, by_source), by_source)
    return trusted(csr, csc, graph_ptr, facts)


def trusted(csr: Arrays, csc: Arrays, graph_ptr: Tensor, facts: BatchFacts) -> Built:
    """Join the finished arrays of a batch, the node offsets of its graphs int32 [G + 1] and its facts."""
    nodes = csr.rowptr.numel() - 1
    return Built(
        Adjacency(*csr, nodes, facts.max_in_degree, is_trusted=True),
        Adjacency(*csc, nodes, facts.max_out_degree, "sources", "targets", is_trusted=True),
        graph_ptr=graph_ptr,
        max_graph_nodes=facts.max_nodes,
        facts=facts,
    )


def build_batch(batch: Any, edge_index: Tensor) -> Built:
    """Build a batch with its node offsets: no sort if its graphs went through :class:`SortEdges`."""
    num_nodes, num_edges = batch.num_nodes, edge_index.size(1)
    graph_ptr = _graph_ptr(batch, edge_index.device)
    source, target = edge_index
    source_graph, target_graph = (
        torch.bucketize(nodes.to(graph_ptr.dtype), graph_ptr[1:], right=True, out_int32=True) for nodes in edge_index
    )
    same_graph = (source_graph == target_graph).all()
    if BY_SOURCE not in batch:
        built = build(forms.read_tensor(edge_index, False), num_nodes, num_nodes)
        inside, max_graph_nodes = pull(same_graph, longest(graph_ptr))
        _refuse_crossing(inside)
        return replace(built, graph_ptr=graph_ptr, max_graph_nodes=max_graph_nodes)

    in_degree, out_degree, by_source = _stored(batch, num_nodes, num_edges)
    source, target = source.to(torch.int32, copy=True), target.to(torch.int32)
    rowptr, source_ptr = from_degree(in_degree), from_degree(out_degree)
    # Positions count from the first edge of each graph; edges of a graph are contiguous in both orders.
    edge_ptr = rowptr[graph_ptr.clamp(0, num_nodes).long()]
    graph_of_edge = expand(edge_ptr, num_edges).clamp(max=max(edge_ptr.numel() - 2, 0)).long()
    by_source = (by_source + edge_ptr[graph_of_edge]).clamp(0, max(num_edges - 1, 0))
    place = by_source.long()
    csr = Arrays(rowptr, source, torch.arange(num_edges, dtype=torch.int32, device=rowptr.device))
    csc = Arrays(source_ptr, target[place], by_source)
    seen = torch.zeros(num_edges, dtype=torch.bool, device=rowptr.device)
    seen[place] = True
    unchanged = torch.stack(
        [
            (expand(rowptr, num_edges) == target).all(),
            (expand(source_ptr, num_edges) == source[place]).all(),
            seen.all(),
            rowptr[-1] == num_edges,
            source_ptr[-1] == num_edges,
        ]
    ).all()
    *bounds, is_unchanged, inside, max_in, max_out, max_graph_nodes = pull(
        *bounds_of(*edge_index), unchanged, same_graph, longest(rowptr), longest(source_ptr), longest(graph_ptr)
    )
    refuse_ids(bounds, num_nodes, num_nodes, num_edges)
    if not is_unchanged:
        raise _changed("edge_index")
    _refuse_crossing(inside)
    return Built(
        Adjacency(*csr, num_nodes, max_in),
        Adjacency(*csc, num_nodes, max_out, "sources", "targets"),
        graph_ptr=graph_ptr,
        max_graph_nodes=max_graph_nodes,
    )


def _graph_ptr(batch: Any, device: torch.device) -> Tensor:
    """Node offsets of the graphs of a batch, int32 [G + 1]; a single graph has none."""
    ptr = batch.get("ptr")
    return (torch.tensor([0, batch.num_nodes], device=device) if ptr is None else ptr).to(torch.int32, copy=True)


def _stored(batch: Any, num_nodes: int, num_edges: int) -> list[Tensor]:
    """In-degrees, out-degrees and edges by source, as :class:`SortEdges` has stored them.

    Raises:
        ValueError: One is missing or of another size.
    """
    stored = []
    for name, size in ((IN_DEGREE, num_nodes), (OUT_DEGREE, num_nodes), (BY_SOURCE, num_edges)):
        tensor = batch.get(name)
        if not isinstance(tensor, Tensor) or list(tensor.shape) != [size]:
            raise _changed(name)
        stored.append(tensor)
    return stored


def _changed(name: str) -> ValueError:
    return ValueError(f"'{name}' needs the edges that SortEdges saw: they or the nodes were changed after it")


def _refuse_crossing(inside: int) -> None:
    if not inside:
        raise ValueError("'batch' needs edges inside its graphs (got an edge between two graphs)")
