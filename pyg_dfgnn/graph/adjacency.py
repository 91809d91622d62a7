"""Compressed adjacency: grouping edges by row, transposing, inserting self-loops.

Every function runs on the device of its input, sorts each edge at most once, loops over no rows and is deterministic.
Whoever builds a structure from them asks the device at once (:func:`pull`) for what the host has to know.
Temporary arrays are as long as a span of the edges (:func:`spans`): see "Memory of a graph" in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1
# Positions past the end of a row, which kernels compute and then discard, must fit int32 too.
MAX_EDGES = INT32_MAX - 4096
SORTED_AT_ONCE = 1 << 24
"""Edges up to which one sort takes all of them: torch's radix sort holds 36 bytes for each."""
SPAN_EDGES = 1 << 22
"""Edges of a span of a graph with at most 16 of them; a larger graph has 16 spans."""
_MAX_SPANS = 16


class Arrays(NamedTuple):
    """The three arrays of an :class:`Adjacency` before its facts are on the host."""

    rowptr: Tensor
    col: Tensor
    perm: Tensor


@dataclass(eq=False)
class Adjacency:
    """Edges grouped by row, where rows and columns are two domains of a graph, such as its targets and its sources.

    Attributes:
        rowptr: Edge range of each row, int32 [num_rows + 1].
        col: Column of each edge, int32 [E].
        perm: Position of each edge in the input order, int32 [E].
        num_cols: Number of columns.
        max_degree: Edges of the longest row.
        rows: Domain of the rows.
        cols: Domain of the columns.
        num_rows: Number of rows.
        num_edges: Number of edges E.
    """

    rowptr: Tensor
    col: Tensor
    perm: Tensor
    num_cols: int
    max_degree: int
    rows: str = "targets"
    cols: str = "sources"
    num_rows: int = field(init=False)
    num_edges: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_rows, self.num_edges = self.rowptr.numel() - 1, self.col.numel()

    @property
    def arrays(self) -> Arrays:
        """The three arrays."""
        return Arrays(self.rowptr, self.col, self.perm)

    @cached_property
    def addresses(self) -> tuple[Any, ...]:
        """The three arrays as kernels take them: addresses on a GPU."""
        return tuple(array.data_ptr() for array in self.arrays) if self.rowptr.is_cuda else self.arrays


def pull(*values: Tensor) -> list[int]:
    """Bring zero-dimensional integer or bool tensors to the host: one sync for all."""
    return torch.stack([value.to(torch.int64) for value in values]).tolist()


def outside_capture(tensor: Tensor) -> Tensor:
    """Return a tensor that a graph is to keep, which a captured CUDA graph would make anew in each replay.

    Raises:
        RuntimeError: The stream is being captured.
    """
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("what a graph keeps cannot be made while a stream is captured: call the layer once before")
    return tensor


def push(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor of the host to a device, without waiting for it."""
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def spans(num_edges: int) -> list[slice]:
    """Cut the positions 0 ... num_edges - 1 into ranges that temporary arrays may be as long as."""
    length = max(SPAN_EDGES, -(-num_edges // _MAX_SPANS))
    return [slice(begin, min(begin + length, num_edges)) for begin in range(0, num_edges, length)]


def in_spans(num_edges: int, device: torch.device, make: Callable[[slice], Tensor]) -> Tensor:
    """Return int32 [num_edges], of which `make` returns the part of each span."""
    parts = spans(num_edges)
    if len(parts) == 1:
        return make(parts[0])
    joined = torch.empty(num_edges, dtype=torch.int32, device=device)
    for span in parts:
        joined[span] = make(span)
    return joined


def numbers(span: slice, like: Tensor) -> Tensor:
    """Positions of a span, with the dtype and device of a tensor."""
    return torch.arange(span.start, span.stop, dtype=like.dtype, device=like.device)


def expand(ptr: Tensor, num_edges: int) -> Tensor:
    """Row of each edge, int32 [num_edges], from row offsets [rows + 1]; balanced whatever the row lengths."""
    return in_spans(num_edges, ptr.device, lambda span: rows_at(ptr, numbers(span, ptr)))


def rows_at(ptr: Tensor, positions: Tensor) -> Tensor:
    """Row of each position, int32, from row offsets [rows + 1]."""
    return torch.bucketize(positions, ptr[1:], right=True, out_int32=True)


def count_loops(arrays: Arrays) -> Tensor:
    """How many of the edges go from a node to itself, int64 []."""
    rowptr, col, _ = arrays
    count = torch.zeros((), dtype=torch.int64, device=col.device)
    for span in spans(col.numel()):
        count += (rows_at(rowptr, numbers(span, rowptr)) == col[span]).sum()
    return count


def offsets(rows: Tensor, num_rows: int) -> Tensor:
    """Row offsets, int32 [num_rows + 1], from ascending row ids [E]."""
    return torch.searchsorted(rows, torch.arange(num_rows + 1, dtype=rows.dtype, device=rows.device), out_int32=True)


def from_degree(degree: Tensor) -> Tensor:
    """Row offsets, int32 [rows + 1], from row lengths [rows]."""
    ptr = degree.new_zeros(degree.numel() + 1, dtype=torch.int32)
    torch.cumsum(degree, 0, dtype=torch.int32, out=ptr[1:])
    return ptr


def longest(ptr: Tensor) -> Tensor:
    """Length of the longest row, a zero-dimensional tensor."""
    return ptr.diff().max() if ptr.numel() > 1 else ptr.sum()


def sort_rows(rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Stable sort of row ids in [0, num_rows): the ascending ids and the permutation, int64 [E]."""
    # Radix sorts pass over the bytes of the key: a narrow key halves the work for batches and samples.
    return rows.to(torch.int16 if num_rows < 2**15 else torch.int32).sort(stable=True)


def order_rows(rows: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Row offsets, int32 [num_rows + 1], and the positions of the edges by row, in the input order inside a row.

    Above :data:`SORTED_AT_ONCE` edges they are counted and then sorted span by span: those of a span go behind what
    earlier spans have left in their rows. Memory does not depend on how many edges a row has.

    Args:
        rows: Row of each edge, int [E]; above :data:`SORTED_AT_ONCE` edges within [0, num_rows).
        num_rows: Number of rows.

    Returns:
        The offsets, and the positions int [E].
    """
    num_edges, device = rows.numel(), rows.device
    if num_edges <= SORTED_AT_ONCE:
        rows, order = sort_rows(rows, num_rows)
        return offsets(rows, num_rows), order
    degree = torch.zeros(num_rows, dtype=torch.int32, device=device)
    one = torch.ones((), dtype=torch.int32, device=device)
    for span in spans(num_edges):
        degree.index_add_(0, rows[span], one.expand(span.stop - span.start))
    rowptr = from_degree(degree)
    end, order = rowptr[:-1].clone(), torch.empty(num_edges, dtype=torch.int32, device=device)
    for span in spans(num_edges):
        _place_span(rows, span, end, order)
    return rowptr, order


def _place_span(rows: Tensor, span: slice, end: Tensor, order: Tensor) -> None:
    """Write the positions of a span by row behind what earlier spans have left, up to `end` of each row."""
    row, edge = sort_rows(rows[span], end.numel())
    begin = torch.searchsorted(row, row, out_int32=True)
    count = torch.searchsorted(row, row, right=True, out_int32=True).sub_(begin)
    row = row.long()
    here = end[row]
    end[row] = count.add_(here)
    place = here.sub_(begin).add_(numbers(slice(0, row.numel()), here)).long()
    order[place] = edge.add_(span.start).to(torch.int32)


def group(rows: Tensor, cols: Tensor, num_rows: int, is_sorted: bool) -> Arrays:
    """Group edges by row, keeping the input order inside a row.

    Args:
        rows: Row of each edge, int [E], as :func:`order_rows` takes it.
        cols: Column of each edge, int [E].
        num_rows: Number of rows.
        is_sorted: Whether `rows` are said to be ascending: the arrays are wrong if they are not.
    """
    if is_sorted:
        perm = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device)
        return Arrays(offsets(rows.contiguous(), num_rows), cols.to(torch.int32, copy=True), perm)
    rowptr, order = order_rows(rows, num_rows)
    return Arrays(rowptr, take(cols, order), order.to(torch.int32))


def ascends(ids: Tensor) -> Tensor:
    """Whether ids [E] never descend, a zero-dimensional tensor."""
    return (ids[1:] >= ids[:-1]).all()


def take(values: Tensor, order: Tensor) -> Tensor:
    """Values of the edges in an order, int32 [E]."""
    return in_spans(order.numel(), order.device, lambda span: values.index_select(0, order[span]).to(torch.int32))


def transpose(arrays: Arrays, num_rows: int, input_sorted: bool) -> Arrays:
    """Group the edges by column.

    Args:
        arrays: The edges by row; `col` becomes the rows.
        num_rows: Number of rows of the result.
        input_sorted: Whether the input order of the edges is already ascending in the new rows: then nothing is sorted.

    Returns:
        The transposed arrays; inside a row the edges ascend in their column unless `input_sorted`.
    """
    rowptr, col, perm = arrays
    num_edges = col.numel()
    if input_sorted:
        keys, ends = torch.empty_like(col), torch.empty_like(col)
        for span in spans(num_edges):
            place = perm[span].long()
            keys[place], ends[place] = col[span], rows_at(rowptr, numbers(span, rowptr))
        return Arrays(offsets(keys, num_rows), ends, numbers(slice(0, num_edges), perm))
    new_ptr, order = order_rows(col, num_rows)
    return Arrays(new_ptr, take(expand(rowptr, num_edges), order), take(perm, order))


def replace_self_loops(arrays: Arrays, num_loops: int, num_kept: int) -> tuple[Arrays, Tensor]:
    """Drop all self-loops and give each of the first `num_loops` nodes one, by a scan and a scatter, without sorting.

    Edges that stay keep their order and are numbered anew without gaps; the loop of node v is edge `num_kept + v`, as
    PyG's `remove_self_loops` and `add_self_loops` number them. Inside a row the loop comes last.

    Args:
        arrays: E edges by row.
        num_loops: Nodes that get a loop.
        num_kept: How many of the edges are no loops.

    Returns:
        Arrays of `num_kept + num_loops` edges; which input edges stay, bool [E].
    """
    rowptr, col, perm = arrays
    device, num_edges, num_rows = rowptr.device, col.numel(), rowptr.numel() - 1
    is_dropped = num_kept < num_edges
    # Dropped edges all go to one spare slot behind the end.
    spare = num_kept + num_loops
    new_col = torch.empty(spare + is_dropped, dtype=torch.int32, device=device)
    new_perm = torch.empty_like(new_col)
    stays = torch.ones((), dtype=torch.bool, device=device).expand(num_edges)
    before, number = None, None
    if is_dropped:
        stays, before, number = _count_kept(arrays)
    for span in spans(num_edges):
        row = rows_at(rowptr, numbers(span, rowptr))
        slot = row if num_loops == num_rows else row.clamp(max=num_loops)
        if before is None or number is None:
            slot = (slot + numbers(span, rowptr)).long()
            new_col[slot], new_perm[slot] = col[span], perm[span]
        else:
            slot = torch.where(row != col[span], slot + before[span], spare).long()
            new_col[slot], new_perm[slot] = col[span], number.index_select(0, perm[span])
    node = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    new_ptr = rowptr if before is None else before.index_select(0, rowptr)
    new_ptr = new_ptr + (node if num_loops == num_rows else node.clamp(max=num_loops))
    loops, node = (new_ptr[1 : num_loops + 1] - 1).long(), node[:num_loops]
    new_col[loops], new_perm[loops] = node, node + num_kept
    return Arrays(new_ptr, new_col[:spare], new_perm[:spare]), stays


def in_input_order(arrays: Arrays) -> Tensor:
    """Return the ends of the edges, int64 [2, E], columns first, in the order in which they came."""
    rowptr, col, perm = arrays
    ends = torch.empty(2, col.numel(), dtype=torch.int64, device=col.device)
    for span in spans(col.numel()):
        order = perm[span].long()
        ends[0, order], ends[1, order] = col[span].long(), rows_at(rowptr, numbers(span, rowptr)).long()
    return ends


def _count_kept(arrays: Arrays) -> tuple[Tensor, Tensor, Tensor]:
    """Which edges are no loops, bool [E] in the input order; how many of them come before each edge, int32 [E + 1].

    The latter first by row and then in the input order.
    """
    rowptr, col, perm = arrays
    num_edges = col.numel()
    kept = torch.empty(num_edges, dtype=torch.bool, device=rowptr.device)
    before = torch.zeros(num_edges + 1, dtype=torch.int32, device=rowptr.device)
    for span in spans(num_edges):
        stays = rows_at(rowptr, numbers(span, rowptr)) != col[span]
        kept[perm[span].long()] = stays
        after = before[span.start + 1 : span.stop + 1]
        torch.cumsum(stays, 0, dtype=torch.int32, out=after)
        after += before[span.start]
    number = torch.zeros_like(before)
    torch.cumsum(kept, 0, dtype=torch.int32, out=number[1:])
    return kept, before, number
