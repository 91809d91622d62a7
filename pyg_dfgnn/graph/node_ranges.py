"""Segments of nodes packed into ranges of limited length, one for each thread block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dfgnn.graph.adjacency import Adjacency, pull, push
from pyg_dfgnn.graph.tiles import Segments


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

    A range holds the segments that begin in the same interval of `most - segments.longest + 1` nodes. Nothing is asked
    of the device where the host knows the nodes and edges of the segments.

    Args:
        side: Either side of the graph: no edge leaves a segment, so that both have the same edges in each.
        segments: What to join.
        most: Nodes of a range.
    """
    known = segments.on_host
    ptr, edge_ptr = (segments.ptr, side.ptr[segments.ptr.long()]) if known is None else known
    interval = ptr[:-1] // (most - segments.longest + 1)
    is_end = torch.ones_like(ptr, dtype=torch.bool)
    is_end[1:-1] = interval[1:] != interval[:-1]
    ends = ptr[is_end]
    longest, densest = ends.diff().max(), edge_ptr[is_end].diff().max()
    most_nodes, most_edges = pull(longest, densest) if known is None else (int(longest), int(densest))
    ends = ends if known is None else push(ends, side.ptr.device)
    return NodeRanges(ends, ends.numel() - 1, most_nodes, most_edges, most)
