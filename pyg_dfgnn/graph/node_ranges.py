"""Segments of nodes packed into ranges of limited length, one for each thread block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pyg_dfgnn.graph.adjacency import Adjacency, push
from pyg_dfgnn.graph.block_sparse import Segments


@dataclass(frozen=True)
class NodeRanges:
    """Ranges of consecutive nodes that no edge leaves and that together are all nodes.

    Attributes:
        ptr: Node offsets, int32 [num_ranges + 1].
        num_ranges: Their number.
        most_nodes: Nodes of the longest one.
        most_edges: Most edges in any one.
        bound: What they were packed for; packed for it again they are the same, for `most_nodes` they may not be.
    """

    ptr: Tensor
    num_ranges: int
    most_nodes: int
    most_edges: int
    bound: int


def pack_segments(side: Adjacency, segments: Segments, most: int) -> NodeRanges:
    """Join neighbouring segments to ranges of at most `most` nodes, which no segment may exceed.

    A range holds the segments that begin in the same interval of `most - segments.longest + 1` nodes. The device is
    asked for the sizes of the segments only where the host does not know them.

    Args:
        side: Either side of the graph: no edge leaves a segment, so that both have the same edges in each.
        segments: What to join.
        most: Nodes of a range.
    """
    ptr, edge_ptr = segments.on_host or torch.stack([segments.ptr, side.rowptr[segments.ptr.long()]]).cpu()
    # On arrays as short as these, torch takes several times as long.
    nodes, edges = ptr.numpy(), edge_ptr.numpy()
    interval = nodes[:-1] // (most - segments.longest + 1)
    ends = np.concatenate([[0], np.flatnonzero(np.diff(interval)) + 1, [len(interval)]])
    range_ptr = nodes[ends]
    most_nodes, most_edges = (int(np.diff(offsets).max()) for offsets in (range_ptr, edges[ends]))
    return NodeRanges(
        push(torch.from_numpy(range_ptr), side.rowptr.device), len(ends) - 1, most_nodes, most_edges, most
    )
