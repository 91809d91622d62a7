"""Compressed adjacency: grouping edges by row, transposing, inserting self-loops.

Every function runs on the device of its input, sorts at most once, loops over no rows and is deterministic. Whoever
builds a structure from them ends with one host sync (:func:`pull`), which also brings what the host has to know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1
# Positions past the end of a row, which kernels compute and then discard, must fit int32 too.
MAX_EDGES = INT32_MAX - 4096


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
        is_trusted: Whether bounds must do where exact facts would take a host sync.
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
    is_trusted: bool = False
    num_rows: int = field(init=False)
    num_edges: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_rows, self.num_edges = self.rowptr.numel() - 1, self.col.numel()

    @property
    def arrays(self) -> Arrays:
        """The three arrays."""
        return Arrays(self.rowptr, self.col, self.perm)


def pull(*values: Tensor) -> list[int]:
    """Bring zero-dimensional integer or bool tensors to the host: one sync for all."""
    return torch.stack([value.reshape(()).to(torch.int64) for value in values]).tolist()


def finished(tensor: Tensor) -> Tensor:
    """Return a tensor once the device has written it: one sync, after which any stream may read it."""
    pull(tensor[-1:].sum())
    return tensor


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


def group(rows: Tensor, cols: Tensor, num_rows: int, is_sorted: bool) -> tuple[Arrays, Tensor]:
    """Group edges by row, keeping the input order inside a row.

    Args:
        rows: Row of each edge, int [E].
        cols: Column of each edge, int [E].
        num_rows: Number of rows.
        is_sorted: Whether `rows` are known to be ascending.

    Returns:
        The arrays, and a bool tensor [] that tells whether the rows were sorted as claimed.
    """
    if is_sorted:
        perm = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device)
        in_order = (rows[1:] >= rows[:-1]).all()
        return Arrays(offsets(rows.contiguous(), num_rows), cols.to(torch.int32, copy=True), perm), in_order
    rows, order = sort_rows(rows, num_rows)
    arrays = Arrays(offsets(rows, num_rows), cols.to(torch.int32)[order], order.to(torch.int32))
    return arrays, torch.ones((), dtype=torch.bool, device=rows.device)


def transpose(arrays: Arrays, num_rows: int, input_sorted: bool) -> Arrays:
    """Group the edges by column.

    Args:
        arrays: The edges by row; `col` becomes the rows.
        num_rows: Number of rows of the result.
        input_sorted: Whether the input order of the edges is already ascending in the new rows: then nothing is sorted.

    Returns:
        The transposed arrays; inside a row the edges ascend in their column unless `input_sorted`.
    """
    row = expand(arrays.rowptr, arrays.col.numel())
    if input_sorted:
        order = torch.empty_like(arrays.perm, dtype=torch.int64)
        order[arrays.perm.long()] = torch.arange(order.numel(), device=order.device)
        keys = arrays.col[order]
    else:
        keys, order = sort_rows(arrays.col, num_rows)
    return Arrays(offsets(keys, num_rows), row[order], arrays.perm[order])


def replace_self_loops(arrays: Arrays, num_loops: int) -> tuple[Arrays, Tensor, Tensor]:
    """Drop all self-loops and give each of the first `num_loops` nodes one, by a scan and a scatter, without sorting.

    Edges that stay keep their order and are numbered anew without gaps; the loop of node v is edge `num_kept + v`, as
    PyG's `remove_self_loops` and `add_self_loops` number them. Inside a row the loop comes last.

    Args:
        arrays: E edges by row.
        num_loops: Nodes that get a loop.

    Returns:
        Arrays with room for `E + num_loops` edges, of which the first `num_kept + num_loops` are filled; which input
        edges stay, bool [E]; their number `num_kept`, a tensor [].
    """
    rowptr, col, perm = arrays
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

    return Arrays(new_ptr, place(col, node), place(new_id[perm.long()], num_kept + node)), kept, num_kept


def trim(arrays: Arrays, num_edges: int) -> Arrays:
    """Return the first `num_edges` edges of arrays with room for more."""
    return Arrays(arrays.rowptr, arrays.col[:num_edges], arrays.perm[:num_edges])
