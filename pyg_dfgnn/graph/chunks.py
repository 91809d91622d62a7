"""Parts of an adjacency that row-parallel schedules need: chunks of heavy rows, column blocks, orders."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyg_dfgnn.graph.adjacency import (
    Adjacency,
    Arrays,
    expand,
    from_degree,
    longest,
    numbers,
    outside_capture,
    pull,
    rows_at,
    spans,
    take,
    transpose,
)
from pyg_dfgnn.graph.derived import Derived


@dataclass(eq=False)
class Chunks:
    """Rows with more than `max_edges` edges (heavy rows), cut into chunks of at most `max_edges`.

    Attributes:
        row: Row of each chunk, int32 [num_chunks].
        begin: First edge of each chunk, a position in `Adjacency.col`, int32 [num_chunks].
        end: One past the last edge of each chunk, int32 [num_chunks].
        heavy_row: Heavy rows in the order of their chunks, int32 [num_heavy].
        heavy_ptr: Chunk range of each heavy row, int32 [num_heavy + 1].
        join: At the first chunk of a row their number, else 0, int32 [num_chunks]; None unless in groups.
        num_chunks: Number of chunks.
        num_heavy: Number of heavy rows.
    """

    row: Tensor
    begin: Tensor
    end: Tensor
    heavy_row: Tensor
    heavy_ptr: Tensor
    join: Tensor | None = None
    num_chunks: int = field(init=False)
    num_heavy: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_chunks, self.num_heavy = self.row.numel(), self.heavy_row.numel()


@dataclass(eq=False)
class ColumnBlocks:
    """The edges of each row grouped by blocks of columns, for sweeps that reuse what lies in a cache.

    Attributes:
        rowptr: Edge range of each row and block, int32 [num_rows * count + 1]; block b of row r is at `r * count + b`.
        col: As `Adjacency.col`, in the order of :func:`ascending`, whatever the count.
        perm: As `Adjacency.perm`, in this order.
        count: Number of blocks.
        chunks: Per block the chunk list of the rows with more than `max_edges` edges in it, or None; rows ascend or
            are in the order of :func:`row_order`.
    """

    rowptr: Tensor
    col: Tensor
    perm: Tensor
    count: int
    chunks: list[Chunks | None]


def row_index(graph: Derived, side: Adjacency) -> Tensor:
    """Return the row of each edge of an adjacency, int32 [E]."""
    return graph.derived(("rows", side.rows, side.cols), lambda: outside_capture(expand(side.rowptr, side.num_edges)))


def row_order(graph: Derived, side: Adjacency) -> Tensor:
    """Return the rows of an adjacency by descending length, int32 [num_rows]."""

    def build() -> Tensor:
        return outside_capture(side.rowptr.diff().argsort(descending=True, stable=True).to(torch.int32))

    return graph.derived(("row_order", side.rows, side.cols), build)


def heavy_rows(graph: Derived, side: Adjacency, max_edges: int, group: int = 0, ordered: bool = False) -> Chunks | None:
    """Return the chunk list of the rows longer than `max_edges`; None if there is none.

    Args:
        graph: Keeps the list.
        side: The adjacency.
        max_edges: Edges of a chunk.
        group: If not 0, the chunks of each row lie in one group of so many (see :func:`group_heavy_rows`).
        ordered: Take rows in the order of :func:`row_order` rather than ascending; groups have an order of their own.
    """
    if side.max_degree <= max_edges:
        return None

    def build() -> Chunks:
        if group:
            return group_heavy_rows(side.rowptr, max_edges, group)
        order = row_order(graph, side) if ordered else None
        return split_heavy_rows(side.rowptr[:-1], side.rowptr[1:], side.num_edges, max_edges, order)

    return graph.derived(("chunks", side.rows, side.cols, max_edges, group, ordered), build)


def ascending(graph: Derived, side: Adjacency) -> tuple[Tensor, Tensor]:
    """Return `col` and `perm` with the edges of each row in ascending order of their columns."""

    def build() -> tuple[Tensor, Tensor]:
        if order_of_columns(side.arrays)[0]:
            return side.col, side.perm
        # Sorted by column and then, stably, by row.
        by_column = graph.get(("adjacency", side.cols, side.rows))
        arrays = None if by_column is None else by_column.arrays
        if arrays is None or not order_of_columns(arrays)[0]:
            arrays = transpose(side.arrays, side.num_cols, False)
        return transpose(arrays, side.num_rows, False)[1:]

    return graph.derived(("ascending", side.rows, side.cols), build)


def order_of_columns(arrays: Arrays) -> tuple[bool, bool]:
    """Return whether the columns ascend in each row, and whether one follows itself in some row."""
    begins, col = row_begins(arrays.rowptr, arrays.col.numel())[1:], arrays.col
    ascends, repeats = pull(((col[1:] >= col[:-1]) | begins).all(), ((col[1:] == col[:-1]) & ~begins).any())
    return bool(ascends), bool(repeats)


def row_begins(rowptr: Tensor, num_edges: int) -> Tensor:
    """Whether an edge is the first of its row, bool [num_edges], from row offsets [rows + 1]."""
    begins = torch.zeros(num_edges + 1, dtype=torch.bool, device=rowptr.device)
    begins[rowptr.long()] = True
    return begins[:-1]


def column_blocks(graph: Derived, side: Adjacency, count: int, max_edges: int, ordered: bool = False) -> ColumnBlocks:
    """Return the edges of each row grouped by `count` equal ranges of columns, rows in the order of `heavy_rows`."""

    def build() -> ColumnBlocks:
        col, perm = ascending(graph, side)
        lengths = torch.zeros(side.num_rows * count, dtype=torch.int32, device=col.device)
        for span in spans(side.num_edges):
            block = col[span].long().mul_(count).div_(max(side.num_cols, 1), rounding_mode="floor")
            key = rows_at(side.rowptr, numbers(span, side.rowptr)).long().mul_(count).add_(block)
            lengths.index_add_(0, key, torch.ones_like(key, dtype=torch.int32))
        longest_rows = lengths.view(-1, count).amax(0).tolist() if side.num_rows else [0] * count
        rowptr = from_degree(lengths)
        order = row_order(graph, side) if ordered else None

        def split(block: int) -> Chunks:
            begin, end = rowptr[block:-1:count].contiguous(), rowptr[block + 1 :: count].contiguous()
            return split_heavy_rows(begin, end, side.num_edges, max_edges, order)

        chunks = [split(block) if length > max_edges else None for block, length in enumerate(longest_rows)]
        return ColumnBlocks(rowptr, col, perm, count, chunks)

    return graph.derived(("column_blocks", side.rows, side.cols, count, max_edges, ordered), build)


def most_edges(graph: Derived, side: Adjacency, rows: int) -> int:
    """Return the most edges of any block of `rows` consecutive rows."""

    def build() -> int:
        return pull(longest(torch.cat([side.rowptr[::rows], side.rowptr[-1:]])))[0]

    return graph.derived(("most_edges", side.rows, side.cols, rows), build)


def positions(graph: Derived, side: Adjacency, other: Adjacency) -> Tensor:
    """Return where each edge of `side` lies in `other`, an adjacency of the same edges: int32 [E]."""

    def build() -> Tensor:
        place = torch.empty_like(other.perm)
        for span in spans(other.num_edges):
            place[other.perm[span].long()] = numbers(span, place)
        return outside_capture(take(place, side.perm))

    return graph.derived(("positions", side.rows, side.cols, other.rows, other.cols), build)


def split_heavy_rows(begin: Tensor, end: Tensor, num_edges: int, max_edges: int, order: Tensor | None = None) -> Chunks:
    """Cut the rows longer than `max_edges` into chunks (see :class:`Chunks`).

    Args:
        begin: First edge of each row, int32 [num_rows].
        end: One past the last edge of each row, int32 [num_rows].
        num_edges: At least as many as the edges of all rows.
        max_edges: Edges of a chunk.
        order: A permutation of the rows, int32 [num_rows], in which they are taken; None is ascending.
    """
    if order is not None:
        chunks = split_heavy_rows(begin[order], end[order], num_edges, max_edges)
        rows, heavy_row = order[chunks.row], order[chunks.heavy_row]
        return Chunks(rows, chunks.begin, chunks.end, heavy_row, chunks.heavy_ptr)
    degree = end - begin
    heavy = degree > max_edges
    count = torch.where(heavy, (degree - 1) // max_edges + 1, 0)
    # A heavy row has more than max_edges edges and fewer than 2 * degree / max_edges chunks: room without a sync.
    heavy_room = num_edges // max_edges
    chunk_room = 2 * num_edges // max_edges
    rank = heavy.cumsum(0)
    place = torch.where(heavy, rank - 1, heavy_room)
    heavy_row = torch.zeros(heavy_room + 1, dtype=torch.int32, device=begin.device)
    heavy_row[place] = torch.arange(begin.numel(), dtype=torch.int32, device=begin.device)
    heavy_count = torch.zeros_like(heavy_row)
    heavy_count[place] = count
    heavy_ptr = from_degree(heavy_count[:heavy_room])

    owner = expand(heavy_ptr, chunk_room).clamp(max=heavy_room - 1).long()
    row = heavy_row[owner]
    first = torch.arange(chunk_room, dtype=torch.int32, device=row.device) - heavy_ptr[owner]
    first = begin[row.long()] + first * max_edges
    last = first + (end[row.long()] - first).clamp(max=max_edges)

    num_heavy, num_chunks = pull(rank[-1], count.sum())
    return Chunks(
        row[:num_chunks], first[:num_chunks], last[:num_chunks], heavy_row[:num_heavy], heavy_ptr[: num_heavy + 1]
    )


def group_heavy_rows(ptr: Tensor, max_edges: int, group: int) -> Chunks:
    """Cut the rows longer than `max_edges` into chunks so that those of a row lie in one group of the list.

    A row is cut into a power of two of equal chunks, the last ones shorter or empty, and rows with more chunks come
    first: then none begins in one group and ends in the next. The last group is filled up with chunks without edges.

    Args:
        ptr: Edge range of each row, int32 [num_rows + 1]; none is longer than `group * max_edges`.
        max_edges: Edges of a chunk.
        group: Size of a group, a power of two.
    """
    degree = ptr.diff()
    heavy = (degree > max_edges).nonzero().view(-1)
    needed = (degree[heavy] + max_edges - 1) // max_edges
    powers = 2 ** torch.arange(group.bit_length(), device=ptr.device)
    count = powers[(needed[:, None] > powers).sum(1)]
    count, order = count.sort(descending=True, stable=True)
    heavy = heavy[order]
    heavy_ptr = from_degree(count)
    (num_chunks,) = pull(heavy_ptr[-1])
    owner = expand(heavy_ptr, num_chunks).long()
    row = heavy[owner]
    length = (degree[row] + count[owner] - 1) // count[owner]
    place = torch.arange(num_chunks, dtype=torch.int32, device=ptr.device) - heavy_ptr[owner]
    begin = torch.minimum(ptr[row] + place * length, ptr[row + 1])
    end = torch.minimum(begin + length, ptr[row + 1])
    join = torch.where(place == 0, count[owner], 0)
    unused = -num_chunks % group

    def filled(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values.to(torch.int32), (0, unused))

    return Chunks(filled(row), filled(begin), filled(end), heavy.to(torch.int32), heavy_ptr, filled(join))
