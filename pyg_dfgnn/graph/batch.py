"""Batches of small graphs: sort each graph once, on the host, and never a batch on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from pyg_dfgnn.graph import forms
from pyg_dfgnn.graph.adjacency import Adjacency, Side, expand, from_degree, longest, pull
from pyg_dfgnn.graph.graph import Graph, batch_edge_index, build, check_ids, refuse_ids

IN_DEGREE, OUT_DEGREE, BY_SOURCE = "csr_in_degree", "csr_out_degree", "csr_by_source"


class SortEdges(BaseTransform):
    """Sort the edges of a graph by (target, source) and store what a batch needs to be compressed without a sort.

    Everything on edges (`edge_attr`, ...) is sorted alike. Stored are the in- and out-degree of each node, int32 [N],
    and the positions of the edges in source order, int32 [E]; collation concatenates them as they are, and
    `Graph.of_batch` turns them into the CSR and CSC of the batch. Apply it last: it holds for the edges it saw.

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
        edge_index, num_nodes = batch_edge_index(data), data.num_nodes
        num_edges = edge_index.size(1)
        refuse_ids(pull(*check_ids(*edge_index)), num_nodes, num_nodes, num_edges)
        order = edge_index[0].argsort(stable=True)
        order = order[edge_index[1, order].argsort(stable=True)]
        for store in data.edge_stores:
            for name, value in list(store.items()):
                if name == "edge_index":
                    data.edge_index = edge_index[:, order]
                elif isinstance(value, Tensor) and store.is_edge_attr(name):
                    store[name] = value.index_select(data.__cat_dim__(name, value, store), order)
        source, target = data.edge_index
        data[IN_DEGREE] = target.bincount(minlength=num_nodes).int()
        data[OUT_DEGREE] = source.bincount(minlength=num_nodes).int()
        data[BY_SOURCE] = source.argsort(stable=True).int()
        return data


def build_batch(batch: Any, edge_index: Tensor) -> Graph:
    """Build the graph of a batch with its segments: no sort if its members went through :class:`SortEdges`."""
    num_nodes, num_edges = batch.num_nodes, edge_index.size(1)
    node_ptr = batch.get("ptr")
    if node_ptr is None:
        node_ptr = torch.tensor([0, num_nodes], device=edge_index.device)
    segments = node_ptr.to(torch.int32, copy=True)
    source, target = edge_index
    if BY_SOURCE not in batch:
        graph = build(forms.read_tensor(edge_index, False), num_nodes, num_nodes, anchor=edge_index)
        same_graph = (_owner(segments, source) == _owner(segments, target)).all()
        inside, graph.max_segment = pull(same_graph, longest(segments))
        _refuse_crossing(inside)
        graph.segments = segments
        return graph

    for name, size in ((IN_DEGREE, num_nodes), (OUT_DEGREE, num_nodes), (BY_SOURCE, num_edges)):
        if not isinstance(batch.get(name), Tensor) or list(batch[name].shape) != [size]:
            raise ValueError(f"'{name}' needs the edges that SortEdges saw: they or the nodes were changed after it")
    source, target = source.to(torch.int32, copy=True), target.to(torch.int32)
    ptr, source_ptr = from_degree(batch[IN_DEGREE]), from_degree(batch[OUT_DEGREE])
    # Positions count from the first edge of each graph; edges of a graph are contiguous in both orders.
    edge_ptr = ptr[segments.clamp(0, num_nodes).long()]
    graph_of_edge = expand(edge_ptr, num_edges).clamp(max=max(edge_ptr.numel() - 2, 0)).long()
    by_source = (batch[BY_SOURCE] + edge_ptr[graph_of_edge]).clamp(0, max(num_edges - 1, 0))
    csr = Side(ptr, source, torch.arange(num_edges, dtype=torch.int32, device=ptr.device))
    csc = Side(source_ptr, target[by_source.long()], by_source)
    seen = torch.zeros(num_edges, dtype=torch.bool, device=ptr.device)
    seen[by_source.long()] = True
    unchanged = torch.stack(
        [
            (expand(ptr, num_edges) == target).all(),
            (expand(source_ptr, num_edges) == source[by_source.long()]).all(),
            seen.all(),
            ptr[-1] == num_edges,
            source_ptr[-1] == num_edges,
        ]
    ).all()
    same_graph = (_owner(segments, source) == _owner(segments, target)).all()
    *bounds, unchanged_, inside, max_in, max_out, max_segment = pull(
        *check_ids(*edge_index), unchanged, same_graph, longest(ptr), longest(source_ptr), longest(segments)
    )
    refuse_ids(bounds, num_nodes, num_nodes, num_edges)
    if not unchanged_:
        raise ValueError("'edge_index' needs the edges that SortEdges saw: they were changed after it")
    _refuse_crossing(inside)
    return Graph(
        Adjacency(csr, max_in),
        num_nodes,
        csc=Adjacency(csc, max_out),
        anchor=edge_index,
        segments=segments,
        max_segment=max_segment,
    )


def _owner(segments: Tensor, nodes: Tensor) -> Tensor:
    # The graph of each node.
    return torch.bucketize(nodes.to(segments.dtype), segments[1:], right=True, out_int32=True)


def _refuse_crossing(inside: int) -> None:
    if not inside:
        raise ValueError("'batch' needs edges inside its graphs (got an edge between two graphs)")
