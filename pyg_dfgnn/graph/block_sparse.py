"""Dense blocks of an adjacency: windows of consecutive rows, the columns each one meets, and one bit per possible edge.

Two ways to list the columns of a window. Where the nodes fall into diagonal blocks, which no edge leaves, as in a
batch of graphs, the columns of a window are the nodes of its diagonal block. Otherwise they are the columns that occur
in its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dfgnn.graph.adjacency import (
    Adjacency,
    Arrays,
    expand,
    from_degree,
    numbers,
    order_rows,
    pull,
    rows_at,
    spans,
    take,
    transpose,
)
from pyg_dfgnn.graph.chunks import order_of_columns, row_begins
from pyg_dfgnn.graph.graph import Graph
from pyg_dfgnn.graph.node_ranges import TILE_ROWS, DiagonalBlocks, ceil_div, diagonal_blocks

BLOCK = 32
"""Columns of a block: one word of bits per row."""
SAMPLED_EDGES = 1 << 22
"""Edges that a sample may have, if they are more than an eighth of all."""


@dataclass(frozen=True)
class BlockCounts:
    """How many dense blocks an adjacency has.

    Attributes:
        num_windows: Number of windows.
        num_blocks: Blocks of all windows.
        max_columns: Columns of the window that has most.
    """

    num_windows: int
    num_blocks: int
    max_columns: int


@dataclass(frozen=True)
class BlockSparse(BlockCounts):
    """An adjacency as dense blocks (see the module).

    Attributes:
        windows: First row, one past the last row, first block, number of columns and first column of each window, then
            zeros, int32 [W, 8].
        columns: Columns of each block, int32 [blocks, 32], past a window's last column that one again; None if the
            columns of a window follow each other.
        bits: int32 [blocks, rows per window]: bit c of word r says whether row r of the window has column c; wrong if
            some edge occurs twice.
    """

    windows: Tensor
    columns: Tensor | None
    bits: Tensor


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
        return make_blocks(graph.side(direction), rows, blocks)

    return graph.derived(("block_sparse", domain, rows, compact), build)


def is_simple(graph: Graph) -> bool:
    """Return whether no edge occurs twice, which a bit cannot tell."""

    def orders() -> Iterator[Arrays]:
        yield graph.csr.arrays
        yield graph.csc.arrays
        yield transpose(graph.csr.arrays, graph.num_src, False)

    def build() -> bool:
        # Copies of an edge are neighbours where the columns of a row ascend, in the last order if in no other.
        answers = (order_of_columns(arrays) for arrays in orders())
        return next(not repeats for ascends, repeats in answers if ascends)

    return graph.derived("is_simple", build)


def counts(graph: Graph, direction: str, rows: int, compact: bool) -> BlockCounts:
    """Return how many dense blocks :func:`of` makes, without making them; estimated if `compact`, from a sample."""
    domain = "sources" if direction == "sources" else "targets"

    def build() -> BlockCounts:
        diagonal = None if compact else diagonal_blocks(graph)
        if diagonal is None:
            side = graph.side(direction)
            area = BLOCK * rows * max(_sampled_fill(graph, domain, rows), 1e-9)
            return BlockCounts(-(-side.num_rows // rows), round(side.num_edges / area), most_columns(side, rows))
        sizes = diagonal.ptr.diff()
        num_windows, num_blocks = pull(ceil_div(sizes, rows).sum(), block_count(sizes, rows).sum())
        return BlockCounts(num_windows, num_blocks, diagonal.longest)

    return graph.derived(("block_counts", domain, rows, compact), build)


def most_columns(side: Adjacency, rows: int) -> int:
    """Return the number of columns that occur in the window with most edges."""
    ptr = torch.cat([side.rowptr[:-1:rows], side.rowptr[-1:]])
    window = ptr.diff().argmax()
    begin, end = pull(ptr[window], ptr[window + 1])
    occurs = torch.zeros(side.num_cols, dtype=torch.bool, device=ptr.device)
    for span in spans(end - begin):
        occurs[side.col[begin:end][span].long()] = True
    return pull(occurs.sum())[0]


def fill(graph: Graph, rows: int, compact: bool) -> float:
    """Return the edges over the area of the dense blocks of the targets, measured on some windows if `compact`."""
    blocks = None if compact else diagonal_blocks(graph)
    if blocks is not None:
        return graph.num_edges / max(1, area_of(blocks))
    return _sampled_fill(graph, "targets", rows)


def _sampled_fill(graph: Graph, domain: str, rows: int) -> float:
    return graph.derived(("fill", domain, rows), lambda: sample_fill(graph.side(domain), rows))


def area_of(blocks: DiagonalBlocks) -> int:
    """Return the area of square blocks over all diagonal blocks, in pairs of nodes."""
    return sum(count * (TILE_ROWS * units) ** 2 for units, count in blocks.histogram)


def sample_fill(side: Adjacency, rows: int, samples: int = 64) -> float:
    """Edges over the area of windows that list the columns that occur, from some windows spread over the side.

    Windows that would make the sample too large are left out, but for edges of one that there always is.
    """
    windows = -(-side.num_rows // rows)
    step = max(1, windows // samples)
    first = torch.arange(0, windows, step, device=side.rowptr.device) * rows
    begin = side.rowptr[first].long()
    length = side.rowptr[(first + rows).clamp(max=side.num_rows)] - begin
    (total,) = pull(length.sum())
    most = max(SAMPLED_EDGES, side.num_edges // 8)
    if total > most:
        length, shortest = length.clamp(max=most).sort(stable=True)
        ends = length.cumsum(0)
        count, total = pull((ends <= most).sum(), torch.where(ends <= most, ends, 0).max())
        first, begin, length = first[shortest[:count]], begin[shortest[:count]], length[:count]
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


def _list_columns(side: Adjacency, window_of: Tensor, num_windows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """List the columns that occur in each window, for windows of rows given as the window of each row, int32 [rows].

    Returns:
        The columns of all windows, ascending in each, int32 [D]; their number in each window, int32 [W]; the row of
        each edge and where its column lies in the list, int32 [E], in an order of their own.
    """
    num_edges = side.num_edges
    column_ptr, order = order_rows(side.col, side.num_cols)
    row = take(expand(side.rowptr, num_edges), order)
    del order
    window_ptr, order = order_rows(take(window_of, row), num_windows)
    row, col = take(row, order), take(expand(column_ptr, num_edges), order)
    del order
    is_new = row_begins(window_ptr, num_edges)
    is_new[1:] |= col[1:] != col[:-1]
    place = torch.cumsum(is_new, 0, dtype=torch.int32).sub_(1)
    columns = col[is_new]
    begin = torch.cat([place, place.new_tensor([columns.numel()])]).index_select(0, window_ptr)
    return columns, begin.diff(), row, place


def make_blocks(side: Adjacency, rows: int, diagonal: DiagonalBlocks | None) -> BlockSparse:
    """Return the dense blocks of an adjacency.

    Args:
        side: The adjacency.
        rows: Rows of a window.
        diagonal: The diagonal blocks whose nodes are the columns; None lists the columns that occur.
    """
    device = side.rowptr.device
    if diagonal is None:
        everything = torch.tensor([0, side.num_rows], dtype=torch.int32, device=device)
        first, last, _ = _windows(everything, rows, -(-side.num_rows // rows))
    else:
        first, last, of = _windows(diagonal.ptr, rows, None)
    num_windows = first.numel()
    window_of = expand(torch.cat([first, last[-1:]]), side.num_rows)
    row_of = None
    if diagonal is None:
        distinct, count, row_of, place = _list_columns(side, window_of, num_windows)
        begin = from_degree(count)[:-1]
    else:
        place, begin = side.col, diagonal.ptr[of]
        count = diagonal.ptr[of + 1] - begin

    first_block = from_degree(ceil_div(count, BLOCK))
    num_blocks, max_columns = pull(first_block[-1], count.max() if num_windows else first_block[-1])
    columns = None
    if diagonal is None:
        owner = expand(first_block, num_blocks).long()
        block = numbers(slice(0, num_blocks), first_block) - first_block[owner]
        column = block[:, None] * BLOCK + torch.arange(BLOCK, dtype=torch.int32, device=device)
        columns = distinct[(begin[owner, None] + torch.minimum(column, count[owner, None] - 1)).long()].contiguous()
        del distinct

    bits = torch.zeros(num_blocks * rows, dtype=torch.int32, device=device)
    for span in spans(side.num_edges):
        row = rows_at(side.rowptr, numbers(span, side.rowptr)) if row_of is None else row_of[span]
        window = window_of.index_select(0, row)
        column = place[span] - begin.index_select(0, window)
        word = (first_block.index_select(0, window) + column // BLOCK).long()
        word.mul_(rows).add_(row).sub_(first.index_select(0, window))
        bits.index_add_(0, word, torch.ones_like(column) << column % BLOCK)
    zero = torch.zeros_like(first)
    windows = torch.stack([first, last, first_block[:-1], count, begin.to(torch.int32), zero, zero, zero], dim=1)
    return BlockSparse(num_windows, num_blocks, max_columns, windows.contiguous(), columns, bits.view(num_blocks, rows))
