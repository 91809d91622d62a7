"""Batches of small graphs: which nodes belong to which graph, and that no edge leaves its graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_dfgnn.graph import forms
from pyg_dfgnn.graph.adjacency import longest, pull
from pyg_dfgnn.graph.build import Built, build


def batch_edge_index(batch: Any) -> Tensor:
    """Return the plain `edge_index` tensor of a homogeneous batch, the one that convs will be given.

    Args:
        batch: The batch, or one graph.

    Raises:
        TypeError: There is none.
    """
    edge_index = None if hasattr(batch, "edge_types") else getattr(batch, "edge_index", None)
    if not isinstance(edge_index, Tensor):
        raise TypeError(f"'batch' needs one edge type with a tensor 'edge_index' (got {type(batch).__name__})")
    edge_index = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
    forms.check_edge_index(edge_index)
    return edge_index


def build_batch(batch: Any, edge_index: Tensor) -> Built:
    """Build a batch with its node offsets.

    Raises:
        ValueError: An id is out of range, or an edge crosses graphs.
    """
    graph_ptr = _graph_ptr(batch, edge_index.device)
    source_graph, target_graph = (
        torch.bucketize(nodes.to(graph_ptr.dtype), graph_ptr[1:], right=True, out_int32=True) for nodes in edge_index
    )
    built = build(forms.read_tensor(edge_index, False), batch.num_nodes, batch.num_nodes)
    inside, max_graph_nodes = pull((source_graph == target_graph).all(), longest(graph_ptr))
    if not inside:
        raise ValueError("'batch' needs edges inside its graphs (got an edge between two graphs)")
    return replace(built, graph_ptr=graph_ptr, max_graph_nodes=max_graph_nodes)


def _graph_ptr(batch: Any, device: torch.device) -> Tensor:
    """Node offsets of the graphs of a batch, int32 [G + 1]; a single graph has none."""
    ptr = batch.get("ptr")
    return (torch.tensor([0, batch.num_nodes], device=device) if ptr is None else ptr).to(torch.int32, copy=True)
