"""Segments of nodes packed into ranges of limited length, one for each thread block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dfgnn.graph.adjacency import Adjacency, pull
from pyg_dfgnn.graph.tiles import Segments


@dataclass(frozen=True)
class NodeRanges:
    """Ranges of consecutive nodes that no edge leaves and that together are all nodes.

    Attributes:
        ptr: Node offsets, int32 [num_ranges + 1].
        num_ranges: Their number.
        most_nodes: Nodes of the longest one.
        most_edges: Most edges of the rows of any one.
        bound: What they were packed for; packed for it again they are the same, for `most_nodes` they may not be.
    """

    ptr: Tensor
    num_ranges: int
    most_nodes: int
    most_edges: int
    bound: int


def pack_segments(side: Adjacency, segments: Segments, most: int) -> NodeRanges:
    """Join neighbouring segments to ranges of at most `most` nodes, which no segment may exceed.

    A range holds the segments that begin in the same interval of `most - segments.longest + 1` nodes.
    """
    begin = segments.ptr[:-1]
    interval = begin // (most - segments.longest + 1)
    starts = torch.ones_like(interval, dtype=torch.bool)
    starts[1:] = interval[1:] != interval[:-1]
    ptr = torch.cat([begin[starts], segments.ptr[-1:]])
    most_nodes, most_edges = pull(ptr.diff().max(), side.ptr[ptr.long()].diff().max())
    return NodeRanges(ptr, ptr.numel() - 1, most_nodes, most_edges, most)
