"""Ranges of nodes that no edge leaves: the diagonal blocks of a graph, and several of them joined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pyg_dfgnn.graph.adjacency import Adjacency, numbers, push, rows_at, spans
from pyg_dfgnn.graph.graph import Graph

TILE_ROWS = 16
"""Unit in which the histogram of :class:`DiagonalBlocks` counts nodes: rows of a warp."""


@dataclass(frozen=True)
class DiagonalBlocks:
    """Ranges of nodes that no edge leaves, as short as the order of the nodes allows.

    Attributes:
        ptr: Node offsets, int32 [blocks + 1].
        longest: Nodes of the longest one.
        histogram: Number of blocks by size, (size in units of 16 nodes rounded up, count), ascending.
    """

    ptr: Tensor
    longest: int
    histogram: tuple[tuple[int, int], ...]


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


Count = TypeVar("Count", int, Tensor)


def ceil_div(sizes: Count, unit: int) -> Count:
    """Units that hold each size, the last one perhaps in part."""
    return (sizes + unit - 1) // unit


def diagonal_blocks(graph: Graph) -> DiagonalBlocks | None:
    """Return the diagonal blocks of a graph; None if sources and targets are not the same nodes."""
    return graph.derived("diagonal_blocks", lambda: find_blocks(graph))


def find_blocks(graph: Graph) -> DiagonalBlocks | None:
    """The blocks of a square graph; None if sources and targets are not the same nodes."""
    if graph.num_src != graph.num_dst or graph.num_src == 0:
        return None
    csr, nodes = graph.csr, graph.num_dst
    # An edge lies across every boundary between its two ends: counting where edges begin less where they end.
    across = torch.zeros(nodes + 1, dtype=torch.int32, device=csr.rowptr.device)
    for span in spans(csr.num_edges):
        row, col = rows_at(csr.rowptr, numbers(span, csr.rowptr)), csr.col[span]
        one = torch.ones_like(row)
        across.index_add_(0, torch.minimum(row, col), one)
        across.index_add_(0, torch.maximum(row, col), one, alpha=-1)
    # The boundary before node b, b = 1 ... nodes.
    free = across.cumsum(0)[:nodes] == 0
    ptr = torch.cat([free.new_zeros(1, dtype=torch.int64), free.nonzero().view(-1) + 1]).to(torch.int32)
    size = ptr.diff()
    counts = torch.bincount(ceil_div(size, TILE_ROWS))
    longest, *counted = torch.cat([size.max().view(1), counts]).tolist()
    histogram = tuple((units, count) for units, count in enumerate(counted) if count)
    return DiagonalBlocks(ptr, longest, histogram)


def node_ranges(graph: Graph, most: int) -> NodeRanges | None:
    """Return ranges of at most `most` nodes that no edge leaves; None if there is a longer diagonal block."""
    blocks = diagonal_blocks(graph)
    if blocks is None or blocks.longest > most:
        return None
    return graph.derived(("node_ranges", most), lambda: pack_blocks(graph.csr, blocks, most))


def pack_blocks(side: Adjacency, blocks: DiagonalBlocks, most: int) -> NodeRanges:
    """Join neighbouring blocks to ranges of at most `most` nodes, which no block may exceed.

    A range holds the blocks that begin in the same interval of `most - blocks.longest + 1` nodes.

    Args:
        side: Either side of the graph: no edge leaves a block, so that both have the same edges in each.
        blocks: What to join.
        most: Nodes of a range.
    """
    ptr, edge_ptr = torch.stack([blocks.ptr, side.rowptr[blocks.ptr.long()]]).cpu()
    # On arrays as short as these, torch takes several times as long.
    nodes, edges = ptr.numpy(), edge_ptr.numpy()
    interval = nodes[:-1] // (most - blocks.longest + 1)
    ends = np.concatenate([[0], np.flatnonzero(np.diff(interval)) + 1, [len(interval)]])
    range_ptr = nodes[ends]
    most_nodes, most_edges = (int(np.diff(offsets).max()) for offsets in (range_ptr, edges[ends]))
    return NodeRanges(
        push(torch.from_numpy(range_ptr), side.rowptr.device), len(ends) - 1, most_nodes, most_edges, most
    )
