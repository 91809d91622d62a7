"""Dense blocks of an adjacency: windows of consecutive rows, the columns each one meets, and one bit per possible edge.

Two ways to list the columns of a window. Where the nodes fall into diagonal blocks, which no edge leaves, as in a
batch of graphs, the columns of a window are the nodes of its diagonal block. Otherwise they are the columns that occur
in its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dfgnn.graph.adjacency import Adjacency, expand, from_degree, pull
from pyg_dfgnn.graph.graph import Graph
from pyg_dfgnn.graph.node_ranges import TILE_ROWS, DiagonalBlocks, ceil_div, diagonal_blocks

BLOCK = 32
"""Columns of a block: one word of bits per row."""
KEY = "block_sparse"
"""Where the first part of a key says so, a derived value is a :class:`BlockSparse`."""


@dataclass(frozen=True)
class BlockSparse:
    """An adjacency as dense blocks (see the module).

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


def side_of(graph: Graph, direction: str) -> Adjacency:
    """Return the adjacency that a pass works on: rows are sources for the pass over sources, else targets."""
    return graph.csc if direction == "sources" else graph.csr


def of(graph: Graph, direction: str, rows: int, compact: bool) -> BlockSparse:
    """Return the dense blocks that a pass works on.

    Args:
        graph: Keeps the blocks.
        direction: Direction of the pass, `"forward"`, `"targets"` or `"sources"`.
        rows: Rows of a window.
        compact: List the columns that occur, rather than the nodes of the window's diagonal block.
    """
    domain = "sources" if direction == "sources" else "targets"

    def build() -> BlockSparse:
        blocks = None if compact else diagonal_blocks(graph)
        stored = None if compact else stored_bits(graph)
        bits = None if stored is None else stored(domain, rows)
        return make_blocks(side_of(graph, direction), rows, blocks, bits)

    return graph.derived((KEY, domain, rows, compact), build)


def stored_bits(graph: Graph, bits: Callable[[str, int], Tensor] | None = None) -> Callable[[str, int], Tensor] | None:
    """Return what gives the bits of the blocks of (domain, rows), where the maker of a batch keeps them ready.

    Args:
        graph: The graph of the batch.
        bits: What the maker of the batch leaves with the graph, before anything else asks.
    """
    return graph.derived("stored_bits", lambda: bits)


def fill(graph: Graph, rows: int, compact: bool) -> float:
    """Return the edges over the area of the dense blocks of the targets, measured on some windows if `compact`."""
    blocks = None if compact else diagonal_blocks(graph)
    if blocks is not None:
        return graph.num_edges / max(1, area_of(blocks))
    return graph.derived(("fill", rows), lambda: sample_fill(graph.csr, rows))


def area_of(blocks: DiagonalBlocks) -> int:
    """Return the area of square blocks over all diagonal blocks, in pairs of nodes."""
    return sum(count * (TILE_ROWS * units) ** 2 for units, count in blocks.histogram)


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
    (blocks,) = pull(ceil_div(counts, BLOCK).sum())
    return total / max(1, blocks * BLOCK * rows)


def block_count(sizes: Tensor, rows: int) -> Tensor:
    """Blocks of the windows of each diagonal block, whose columns are its nodes."""
    return ceil_div(sizes, rows) * ceil_div(sizes, BLOCK)


def _windows(ptr: Tensor, rows: int, num_windows: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Cut ranges of rows into windows of at most `rows`: first and last row of each, and the range it is from."""
    size = ptr.diff()
    count = ceil_div(size, rows)
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


def make_blocks(side: Adjacency, rows: int, diagonal: DiagonalBlocks | None, bits: Tensor | None = None) -> BlockSparse:
    """Return the dense blocks of an adjacency; no host sync where the host knows the sizes of the diagonal blocks.

    Args:
        side: The adjacency.
        rows: Rows of a window.
        diagonal: The diagonal blocks whose nodes are the columns; None lists the columns that occur.
        bits: `BlockSparse.bits` where they are known, for a graph in which no edge occurs twice.
    """
    num_columns = side.num_cols
    device = side.rowptr.device
    sizes = None if diagonal is None else diagonal.sizes
    if diagonal is None:
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
        first, last, of = _windows(diagonal.ptr, rows, None if sizes is None else int(ceil_div(sizes, rows).sum()))
        num_windows = first.numel()
        begin = diagonal.ptr[of]
        count = diagonal.ptr[of + 1] - begin
        if bits is None:
            window, row = _place(side, first, last)
            position = side.col - begin[window]

    first_block = from_degree(ceil_div(count, BLOCK))
    if diagonal is not None and sizes is not None:
        num_blocks, max_columns = int(block_count(sizes, rows).sum()), diagonal.longest
    else:
        num_blocks, max_columns = pull(first_block[-1], count.max() if num_windows else first_block[-1])
    columns = None
    if diagonal is None:
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
        if diagonal is not None and diagonal.is_simple is not None:
            duplicates = not diagonal.is_simple
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
