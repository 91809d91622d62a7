"""Dense blocks of an adjacency: windows of consecutive rows, the columns each one meets, and one bit per possible edge.

Two ways to list the columns of a window. Where the nodes fall into segments that no edge leaves, as in a batch of
graphs, the columns of a window are the nodes of its segment. Otherwise they are the columns that occur in its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyg_dfgnn.graph.adjacency import Adjacency, expand, from_degree, pull

if TYPE_CHECKING:
    from pyg_dfgnn.graph.graph import Graph

BLOCK = 32
"""Columns of a block: one word of bits per row."""
TILE_ROWS = 16
"""Rows of a warp."""


@dataclass(frozen=True)
class Segments:
    """Ranges of nodes that no edge leaves, as short as the order of the nodes allows or the graphs of a batch.

    Attributes:
        ptr: Node offsets, int32 [num_segments + 1].
        num_segments: Their number.
        longest: Nodes of the longest one.
        histogram: Number of segments by size, (size in units of 16 nodes rounded up, count), ascending.
        sizes: Nodes of each one on the host, int64 [num_segments], where they are known there.
        edges: Edges between the nodes of each one on the host, int64 [num_segments], where they are known there.
        is_simple: Whether no edge occurs twice; None where nobody has looked.
    """

    ptr: Tensor
    num_segments: int
    longest: int
    histogram: tuple[tuple[int, int], ...]
    sizes: Tensor | None = None
    edges: Tensor | None = None
    is_simple: bool | None = None

    @cached_property
    def on_host(self) -> tuple[Tensor, Tensor] | None:
        """Node offsets and edge offsets on the host, int32 [num_segments + 1] each; None where it knows none."""
        if self.sizes is None or self.edges is None:
            return None
        return from_degree(self.sizes), from_degree(self.edges)

    @staticmethod
    def of_sizes(ptr: Tensor, sizes: Tensor, edges: Tensor, is_simple: bool) -> Segments:
        """Segments of known sizes (see the attributes): nothing is asked of the device."""
        units = torch.bincount(_ceil_div(sizes, TILE_ROWS)).tolist()
        histogram = tuple((unit, count) for unit, count in enumerate(units) if unit and count)
        return Segments(ptr, sizes.numel(), int(sizes.max()) if len(sizes) else 0, histogram, sizes, edges, is_simple)


@dataclass(frozen=True)
class BlockSparse:
    """One side of a graph as dense blocks (see the module).

    Attributes:
        windows: First row, one past the last row, first block, number of columns and first column of each window, then
            zeros, int32 [W, 8].
        columns: Columns of each block, int32 [blocks, 32], past a window's last column that one again; None if the
            columns of a window follow each other.
        bits: int32 [blocks, rows per window]: bit c of word r says whether row r of the window has column c.
        num_windows: Their number W.
        num_blocks: Blocks of all windows.
        max_columns: Columns of the window that has most.
        has_duplicates: Whether some edge occurs twice; the bits are then wrong.
    """

    windows: Tensor
    columns: Tensor | None
    bits: Tensor
    num_windows: int
    num_blocks: int
    max_columns: int
    has_duplicates: bool

    def tensors(self) -> list[Tensor]:
        """All arrays."""
        return [t for t in (self.windows, self.columns, self.bits) if t is not None]


def find_segments(graph: Graph) -> Segments | None:
    """The segments of a square graph; None if sources and targets are not the same nodes."""
    if graph.num_src != graph.num_dst or graph.num_src == 0:
        return None
    csr, nodes = graph.csr, graph.num_dst
    row = expand(csr.rowptr, csr.num_edges)
    # An edge lies across every boundary between its two ends: counting where edges begin less where they end.
    across = torch.zeros(nodes + 1, dtype=torch.int32, device=csr.rowptr.device)
    one = torch.ones_like(row)
    across.index_add_(0, torch.minimum(row, csr.col), one)
    across.index_add_(0, torch.maximum(row, csr.col), one, alpha=-1)
    # The boundary before node b, b = 1 ... nodes.
    free = across.cumsum(0)[:nodes] == 0
    ptr = torch.cat([free.new_zeros(1, dtype=torch.int64), free.nonzero().view(-1) + 1]).to(torch.int32)
    size = ptr.diff()
    counts = torch.bincount(_ceil_div(size, TILE_ROWS))
    (longest,) = pull(size.max())
    histogram = tuple((units, count) for units, count in enumerate(counts.tolist()) if count)
    return Segments(ptr, size.numel(), longest, histogram)


def _ceil_div(sizes: Tensor, unit: int) -> Tensor:
    return (sizes + unit - 1) // unit


def area_of(segments: Segments) -> int:
    """Area of the blocks of all segments, in pairs of nodes."""
    return sum(count * (TILE_ROWS * units) ** 2 for units, count in segments.histogram)


def sample_fill(side: Adjacency, rows: int, samples: int = 64) -> float:
    """Edges over the area of windows that list the columns that occur, from some windows spread over the side."""
    windows = -(-side.num_rows // rows)
    step = max(1, windows // samples)
    first = torch.arange(0, windows, step, device=side.rowptr.device) * rows
    begin = side.rowptr[first].long()
    length = side.rowptr[(first + rows).clamp(max=side.num_rows)] - begin
    total, *_ = pull(length.sum())
    ptr = from_degree(length)
    owner = expand(ptr, total).long()
    edge = begin[owner] + torch.arange(total, device=ptr.device) - ptr[owner]
    distinct = torch.unique(owner << 32 | side.col[edge])
    counts = torch.zeros(first.numel(), dtype=torch.int64, device=ptr.device)
    counts.index_add_(0, distinct >> 32, torch.ones_like(distinct))
    (blocks,) = pull(_ceil_div(counts, BLOCK).sum())
    return total / max(1, blocks * BLOCK * rows)


def block_count(sizes: Tensor, rows: int) -> Tensor:
    """Blocks of the windows of each segment, whose columns are its nodes."""
    return _ceil_div(sizes, rows) * _ceil_div(sizes, BLOCK)


def _windows(ptr: Tensor, rows: int, num_windows: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Cut ranges of rows into windows of at most `rows`: first and last row of each, and the range it is from."""
    size = ptr.diff()
    count = _ceil_div(size, rows)
    first_window = from_degree(count)
    if num_windows is None:
        (num_windows,) = pull(first_window[-1])
    of = expand(first_window, num_windows).long()
    # Equal shares, in whole warps.
    share = (size + TILE_ROWS * count - 1) // (TILE_ROWS * count.clamp(min=1)) * TILE_ROWS
    first = ptr[of] + (torch.arange(num_windows, dtype=torch.int32, device=ptr.device) - first_window[of]) * share[of]
    last = torch.minimum(first + share[of], ptr[of + 1])
    return first, torch.maximum(first, last), of


def _place(side: Adjacency, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """The window of each edge, int64, and its row there."""
    row = expand(side.rowptr, side.num_edges)
    window = expand(torch.cat([first, last[-1:]]), side.num_rows).long()[row.long()]
    return window, row - first[window]


def make_tiles(
    side: Adjacency, num_columns: int, rows: int, segments: Segments | None, bits: Tensor | None = None
) -> BlockSparse:
    """The dense blocks of a side; no host sync where the host knows the sizes of the segments.

    Args:
        side: The side.
        num_columns: Number of nodes at the other end.
        rows: Rows of a window.
        segments: The segments whose nodes are the columns; None lists the columns that occur.
        bits: `BlockSparse.bits` of the segments where they are known, for a graph in which no edge occurs twice.
    """
    device = side.rowptr.device
    sizes = None if segments is None else segments.sizes
    if segments is None:
        everything = torch.tensor([0, side.num_rows], dtype=torch.int32, device=device)
        first, last, _ = _windows(everything, rows, -(-side.num_rows // rows))
        num_windows = first.numel()
        window, row = _place(side, first, last)
        distinct, position = torch.unique(window * num_columns + side.col, return_inverse=True)
        count = torch.zeros(num_windows, dtype=torch.int32, device=device)
        count.index_add_(0, distinct // max(num_columns, 1), torch.ones_like(distinct, dtype=torch.int32))
        begin = from_degree(count)[:-1]
        position = (position - begin[window]).to(torch.int32)
    else:
        first, last, of = _windows(segments.ptr, rows, None if sizes is None else int(_ceil_div(sizes, rows).sum()))
        num_windows = first.numel()
        begin = segments.ptr[of]
        count = segments.ptr[of + 1] - begin
        if bits is None:
            window, row = _place(side, first, last)
            position = side.col - begin[window]

    first_block = from_degree(_ceil_div(count, BLOCK))
    if segments is not None and sizes is not None:
        num_blocks, max_columns = int(block_count(sizes, rows).sum()), segments.longest
    else:
        num_blocks, max_columns = pull(first_block[-1], count.max() if num_windows else first_block[-1])
    columns = None
    if segments is None:
        owner = expand(first_block, num_blocks).long()
        block = torch.arange(num_blocks, dtype=torch.int32, device=device) - first_block[owner]
        column = block[:, None] * BLOCK + torch.arange(BLOCK, dtype=torch.int32, device=device)
        place = begin[owner, None] + torch.minimum(column, count[owner, None] - 1)
        columns = (distinct % max(num_columns, 1)).to(torch.int32)[place.long()].contiguous()

    duplicates = False
    if bits is None:
        bits = torch.zeros(num_blocks * rows, dtype=torch.int32, device=device)
        word = (first_block[window] + position // BLOCK).long() * rows + row
        bits.index_add_(0, word, torch.ones_like(position) << position % BLOCK)
        if segments is not None and segments.is_simple is not None:
            duplicates = not segments.is_simple
        else:
            # Adding an edge twice carries into other bits, and every carry lowers their number.
            (set_bits,) = pull(_count_bits(bits).sum())
            duplicates = set_bits != side.num_edges
    zero = torch.zeros_like(first)
    windows = torch.stack([first, last, first_block[:-1], count, begin.to(torch.int32), zero, zero, zero], dim=1)
    return BlockSparse(
        windows.contiguous(), columns, bits.view(num_blocks, rows), num_windows, num_blocks, max_columns, duplicates
    )


def _count_bits(words: Tensor) -> Tensor:
    """Number of set bits of each int32."""
    x = words.to(torch.int64) & 0xFFFFFFFF
    x = x - (x >> 1 & 0x55555555)
    x = (x & 0x33333333) + (x >> 2 & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x * 0x01010101 & 0xFFFFFFFF) >> 24
