"""Compressed adjacency: grouping edges by row, transposing, inserting self-loops, splitting heavy rows.

Every function runs on the device of its input, sorts at most once, loops over no rows and is deterministic. Each
structure is finished by a host sync (:func:`pull`), its last step: afterwards nothing is in flight, so any stream may
read it.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1
# Positions past the end of a row, which kernels compute and then discard, must fit int32 too.
MAX_EDGES = INT32_MAX - 4096


class Side(NamedTuple):
    """The three arrays of a compressed side before its facts are on the host (see :class:`Adjacency`)."""

    rowptr: Tensor
    col: Tensor
    perm: Tensor


class Chunks:
    """Rows with more than `max_edges` edges (heavy rows), cut into chunks of at most `max_edges`.

    Attributes:
        row: Row of each chunk, int32 [num_chunks].
        begin: First edge of each chunk, a position in `Adjacency.col`, int32 [num_chunks].
        end: One past the last edge of each chunk, int32 [num_chunks].
        heavy_row: Heavy rows in the order of their chunks, int32 [num_heavy].
        heavy_ptr: Chunk range of each heavy row, int32 [num_heavy + 1].
        join: At the first chunk of a row their number, else 0, int32 [num_chunks]; None unless in groups.
    """

    def __init__(
        self,
        row: Tensor,
        begin: Tensor,
        end: Tensor,
        heavy_row: Tensor,
        heavy_ptr: Tensor,
        join: Tensor | None = None,
    ) -> None:
        self.row, self.begin, self.end = row, begin, end
        self.heavy_row, self.heavy_ptr, self.join = heavy_row, heavy_ptr, join
        self.num_chunks = row.numel()
        self.num_heavy = heavy_row.numel()

    def tensors(self) -> tuple[Tensor, ...]:
        """All arrays."""
        arrays = (self.row, self.begin, self.end, self.heavy_row, self.heavy_ptr, self.join)
        return tuple(array for array in arrays if array is not None)


class Adjacency:
    """One compressed side of a graph: CSR when the rows are targets, CSC when they are sources.

    Attributes:
        rowptr: Edge range of each row, int32 [num_rows + 1].
        col: Column of each edge, int32 [E].
        perm: Position of each edge in `Graph.edge_index`, int32 [E].
        num_rows: Number of rows.
        num_edges: Number of edges E.
        max_degree: Edges of the longest row.
    """

    def __init__(self, side: Side, max_degree: int) -> None:
        self.rowptr, self.col, self.perm = side
        self.num_rows = self.rowptr.numel() - 1
        self.num_edges = self.col.numel()
        self.max_degree = max_degree
        self._chunks: dict[tuple[int, int, bool], Chunks] = {}
        self._blocks: dict[tuple[int, int, bool], ColumnBlocks] = {}
        self._block_edges: dict[int, int] = {}
        self._position: Tensor | None = None
        self._ascending: tuple[Tensor, Tensor] | None = None

    @property
    def side(self) -> Side:
        """The three arrays."""
        return Side(self.rowptr, self.col, self.perm)

    @cached_property
    def row(self) -> Tensor:
        """Row of each edge, int32 [E]; made on first use."""
        with torch.inference_mode(False):
            row = expand(self.rowptr, self.num_edges)
            pull(row[-1:].sum())
        return row

    @cached_property
    def row_order(self) -> Tensor:
        """The rows by descending length, int32 [num_rows]; made on first use."""
        with torch.inference_mode(False):
            order = self.rowptr.diff().argsort(descending=True, stable=True).to(torch.int32)
            pull(order[-1:].sum())
        return order

    def chunks(self, max_edges: int, group: int = 0, ordered: bool = False) -> Chunks | None:
        """Chunk list of the rows longer than `max_edges`; None if there is none. Kept per argument.

        Args:
            max_edges: Edges of a chunk.
            group: If not 0, the chunks of each row lie in one group of so many (see :func:`group_heavy_rows`).
            ordered: Take rows in the order of `row_order` rather than ascending; groups have an order of their own.
        """
        if self.max_degree <= max_edges:
            return None
        found = self._chunks.get((max_edges, group, ordered))
        if found is None:
            with torch.inference_mode(False):
                if group:
                    found = group_heavy_rows(self.rowptr, max_edges, group)
                else:
                    order = self.row_order if ordered else None
                    found = split_heavy_rows(self.rowptr[:-1], self.rowptr[1:], self.num_edges, max_edges, order)
            self._chunks[max_edges, group, ordered] = found
        return found

    def ascending(self, num_columns: int) -> tuple[Tensor, Tensor]:
        """`col` and `perm` with the edges of each row in the order of their other end; made once."""
        if self._ascending is None:
            key = expand(self.rowptr, self.num_edges).long().mul_(max(num_columns, 1)).add_(self.col)
            (ascends,) = pull((key[1:] >= key[:-1]).all())
            order = slice(None) if ascends else key.argsort(stable=True)
            self._ascending = self.col[order], self.perm[order]
        return self._ascending

    def column_blocks(self, count: int, max_edges: int, num_columns: int, ordered: bool = False) -> ColumnBlocks:
        """The edges of each row grouped by `count` equal ranges of their other end, kept per argument."""
        found = self._blocks.get((count, max_edges, ordered))
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = ColumnBlocks(self, count, max_edges, num_columns, ordered)
            self._blocks[count, max_edges, ordered] = found
        return found

    def block_edges(self, rows: int) -> int:
        """Most edges of any block of `rows` consecutive rows; kept per `rows`."""
        found = self._block_edges.get(rows)
        if found is None:
            (found,) = pull(longest(torch.cat([self.rowptr[::rows], self.rowptr[-1:]])))
            self._block_edges[rows] = found
        return found

    def position_in(self, other: Adjacency) -> Tensor:
        """Where each edge lies in `other`, the graph's other side: int32 [E]; made on first use."""
        if self._position is None:
            with torch.inference_mode(False), torch.no_grad():
                place = torch.empty_like(other.perm)
                place[other.perm.long()] = torch.arange(other.num_edges, dtype=place.dtype, device=place.device)
                position = place[self.perm.long()]
                pull(position[-1:].sum())
            self._position = position
        return self._position

    def tensors(self) -> list[Tensor]:
        """All arrays that exist so far, chunk lists included."""
        found = [self.rowptr, self.col, self.perm]
        found.extend(self.__dict__[name] for name in ("row", "row_order") if name in self.__dict__)
        if self._position is not None:
            found.append(self._position)
        for chunks in list(self._chunks.values()):
            found.extend(chunks.tensors())
        for blocks in list(self._blocks.values()):
            found.extend(blocks.tensors())
        return found


class ColumnBlocks:
    """The edges of each row of a side grouped by blocks of columns, for sweeps that reuse what lies in a cache.

    Attributes:
        rowptr: Edge range of each row and block, int32 [num_rows * count + 1]; block b of row r is at `r * count + b`.
        col: As `Adjacency.col`, in the order of `Adjacency.ascending`, whatever the count.
        perm: As `Adjacency.perm`, in this order.
        count: Number of blocks.
        chunks: Per block the chunk list of the rows with more than `max_edges` edges in it, or None; rows ascend or
            are in the order of `Adjacency.row_order`.
    """

    def __init__(self, side: Adjacency, count: int, max_edges: int, num_columns: int, ordered: bool) -> None:
        self.count = count
        self.col, self.perm = side.ascending(num_columns)
        block = self.col.long().mul_(count).div_(max(num_columns, 1), rounding_mode="floor")
        key = expand(side.rowptr, side.num_edges).long().mul_(count).add_(block)
        del block
        self.rowptr = offsets(key, side.num_rows * count)
        del key
        longest_rows = self.rowptr.diff().view(-1, count).amax(0).tolist() if side.num_rows else [0] * count
        self.chunks = [
            self._split(side, block, max_edges, ordered) if longest_row > max_edges else None
            for block, longest_row in enumerate(longest_rows)
        ]

    def _split(self, side: Adjacency, block: int, max_edges: int, ordered: bool) -> Chunks:
        begin, end = (
            self.rowptr[block : -1 : self.count].contiguous(),
            self.rowptr[block + 1 :: self.count].contiguous(),
        )
        return split_heavy_rows(begin, end, side.num_edges, max_edges, side.row_order if ordered else None)

    def tensors(self) -> list[Tensor]:
        """All arrays."""
        return [self.rowptr, self.col, self.perm, *(t for c in self.chunks if c is not None for t in c.tensors())]


def pull(*values: Tensor) -> list[int]:
    """Bring zero-dimensional integer or bool tensors to the host: one sync for all."""
    return torch.stack([value.reshape(()).to(torch.int64) for value in values]).tolist()


def push(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor of the host to a device, without waiting for it."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def expand(ptr: Tensor, num_edges: int) -> Tensor:
    """Row of each edge, int32 [num_edges], from row offsets [rows + 1]; balanced whatever the row lengths."""
    edge = torch.arange(num_edges, dtype=ptr.dtype, device=ptr.device)
    return torch.bucketize(edge, ptr[1:], right=True, out_int32=True)


def offsets(rows: Tensor, num_rows: int) -> Tensor:
    """Row offsets, int32 [num_rows + 1], from ascending row ids [E]."""
    return torch.searchsorted(rows, torch.arange(num_rows + 1, dtype=rows.dtype, device=rows.device), out_int32=True)


def from_degree(degree: Tensor) -> Tensor:
    """Row offsets, int32 [rows + 1], from row lengths [rows]."""
    return torch.cat([degree.new_zeros(1, dtype=torch.int32), degree.cumsum(0, dtype=torch.int32)])


def longest(ptr: Tensor) -> Tensor:
    """Length of the longest row, a zero-dimensional tensor."""
    return ptr.diff().max() if ptr.numel() > 1 else ptr.sum()


def sort_rows(rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Stable sort of row ids in [0, num_rows): the ascending ids and the permutation, int64 [E]."""
    # Radix sorts pass over the bytes of the key: a narrow key halves the work for batches and samples.
    return rows.to(torch.int16 if num_rows < 2**15 else torch.int32).sort(stable=True)


def group(rows: Tensor, others: Tensor, num_rows: int, order: Tensor | None, is_sorted: bool) -> tuple[Side, Tensor]:
    """Group edges by row, keeping the input order inside a row.

    Args:
        rows: Row of each edge, int [E].
        others: The other end of each edge, int [E].
        num_rows: Number of rows.
        order: A permutation [E] known to sort `rows`, if there is one.
        is_sorted: Whether `rows` are known to be ascending.

    Returns:
        The side, and a bool tensor [] that tells whether what was known is true.
    """
    edge_id = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device)
    if is_sorted or order is not None:
        if order is not None:
            rows, others, edge_id = rows[order], others[order], order.to(torch.int32, copy=True)
        in_order = (rows[1:] >= rows[:-1]).all()
        index = others.to(torch.int32, copy=True)
        return Side(offsets(rows.contiguous(), num_rows), index, edge_id), in_order
    rows, order = sort_rows(rows, num_rows)
    side = Side(offsets(rows, num_rows), others.to(torch.int32)[order], order.to(torch.int32))
    return side, torch.ones((), dtype=torch.bool, device=rows.device)


def transpose(side: Side, num_rows: int, input_sorted: bool) -> Side:
    """The other side of a graph.

    Args:
        side: One side, whose `col` become the rows.
        num_rows: Number of rows of the result.
        input_sorted: Whether the input order of the edges is already ascending in the new rows: then nothing is sorted.

    Returns:
        The other side; inside a row the edges ascend in their other end unless `input_sorted`.
    """
    row = expand(side.rowptr, side.col.numel())
    if input_sorted:
        order = torch.empty_like(side.perm, dtype=torch.int64)
        order[side.perm.long()] = torch.arange(order.numel(), device=order.device)
        keys = side.col[order]
    else:
        keys, order = sort_rows(side.col, num_rows)
    return Side(offsets(keys, num_rows), row[order], side.perm[order])


def replace_self_loops(side: Side, num_loops: int) -> tuple[Side, Tensor, Tensor]:
    """Drop all self-loops and give each of the first `num_loops` nodes one, by a scan and a scatter, without sorting.

    Edges that stay keep their order and are numbered anew without gaps; the loop of node v is edge `num_kept + v`, as
    PyG's `remove_self_loops` and `add_self_loops` number them. Inside a row the loop comes last.

    Args:
        side: One side of the graph, E edges.
        num_loops: Nodes that get a loop.

    Returns:
        The side with room for `E + num_loops` edges, of which the first `num_kept + num_loops` are filled; which input
        edges stay, bool [E]; their number `num_kept`, a tensor [].
    """
    rowptr, col, perm = side
    device, num_edges, num_rows = rowptr.device, col.numel(), rowptr.numel() - 1
    row = expand(rowptr, num_edges)
    stays = row != col
    kept = torch.empty_like(stays)
    kept[perm.long()] = stays

    before = from_degree(stays)
    new_ptr = before[rowptr.long()] + torch.arange(num_rows + 1, dtype=torch.int32, device=device).clamp(max=num_loops)
    node = torch.arange(num_loops, dtype=torch.int32, device=device)
    # Dropped edges all go to one spare slot behind the end, so that no size has to be known here.
    spare = num_edges + num_loops
    slot = torch.where(stays, before[:-1] + row.clamp(max=num_loops), spare)
    slot = torch.cat([slot, new_ptr[1 : num_loops + 1] - 1]).long()
    new_id = from_degree(kept)
    num_kept = new_id[-1]

    def place(edges: Tensor, loops: Tensor) -> Tensor:
        out = torch.empty(spare + 1, dtype=torch.int32, device=device)
        out[slot] = torch.cat([edges, loops])
        return out

    return Side(new_ptr, place(col, node), place(new_id[perm.long()], num_kept + node)), kept, num_kept


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
        row, heavy_row = order[chunks.row], order[chunks.heavy_row]
        pull(heavy_row[-1:].sum())
        return Chunks(row, chunks.begin, chunks.end, heavy_row, chunks.heavy_ptr)
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

    chunks = Chunks(filled(row), filled(begin), filled(end), heavy.to(torch.int32), heavy_ptr, filled(join))
    pull(*(array[-1] for array in chunks.tensors()))
    return chunks
