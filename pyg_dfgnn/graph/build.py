"""From edges, an index or offsets to a finished CSR, checked on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.errors import IdRangeError, check_dtype, check_integer, check_shape
from pyg_dfgnn.graph import adjacency
from pyg_dfgnn.graph.adjacency import (
    INT32_MAX,
    MAX_EDGES,
    Adjacency,
    ascends,
    count_loops,
    group,
    longest,
    offsets,
    order_rows,
    pull,
    replace_self_loops,
)
from pyg_dfgnn.graph.forms import INDEX_DTYPES, CooEdges, check_edge_index


@dataclass(frozen=True)
class Built:
    """Result of a build (see :class:`~pyg_dfgnn.graph.Graph`).

    Attributes:
        csr: Rows are targets.
        csc: Rows are sources, if the build has made it.
        source_sorted: Whether the sources ascend in the input order.
        stays: With replaced self-loops which input edges stay, bool [E].
    """

    csr: Adjacency
    csc: Adjacency | None = None
    source_sorted: bool = False
    stays: Tensor | None = None


def map_arrays(built: Built, function: Callable[[Tensor], Tensor]) -> Built:
    """Return the result of a build with what a function makes of each array."""

    def side(of: Adjacency | None) -> Any:
        if of is None:
            return None
        rowptr, col = function(of.rowptr), function(of.col)
        return replace(of, rowptr=rowptr, col=col, perm=col if of.perm is of.col else function(of.perm))

    stays = None if built.stays is None else function(built.stays)
    return replace(built, csr=side(built.csr), csc=side(built.csc), stays=stays)


def check_sizes(num_src: int, num_dst: int) -> None:
    """Check both numbers of nodes.

    Raises:
        TypeError: One is not an integer.
        ValueError: One is negative or exceeds 2^31 - 1.
    """
    check_integer("num_src", num_src, 0, INT32_MAX)
    check_integer("num_dst", num_dst, 0, INT32_MAX)


def check_edges(num_edges: int, name: str = "edge_index") -> None:
    """Raise ValueError if int32 cannot count the edges."""
    if num_edges > MAX_EDGES:
        raise ValueError(f"'{name}' needs at most {MAX_EDGES} edges, self-loops included (got {num_edges})")


def bounds_of(*ids: Tensor) -> list[Tensor]:
    """Smallest and largest of each list of ids, to be pulled; zeros for an empty one."""
    zero = torch.zeros((), dtype=torch.int64, device=ids[0].device)
    return [bound for each in ids for bound in (each.aminmax() if each.numel() else (zero, zero))]


def refuse_ids(bounds: list[int], num_src: int, num_dst: int, num_edges: int) -> None:
    """Raise IdRangeError if ids are out of range."""
    if num_edges == 0:
        return
    ends = (("source", "num_src", num_src, bounds[0], bounds[1]), ("target", "num_dst", num_dst, bounds[2], bounds[3]))
    for end, name, size, low, high in ends:
        if low < 0 or high >= size:
            need = f"{end} ids in [0, {name}={size}) (got {low} to {high})"
            raise IdRangeError(f"'edge_index' needs {need}: only those are valid indices")


def build(edges: CooEdges, num_src: int, num_dst: int, *, self_loops: bool = False) -> Built:
    """Build the CSR of edges: at most one sort, one host sync, a second one where the sort goes in spans.

    Raises:
        ValueError: An id is out of range, or the order that an `EdgeIndex` claims is false.
    """
    source, target, is_claimed = edges
    num_edges, num_loops = source.numel(), min(num_src, num_dst)
    check_edges(num_edges + num_loops * self_loops)
    if num_edges > adjacency.SORTED_AT_ONCE:
        refuse_ids(pull(*bounds_of(source, target)), num_src, num_dst, num_edges)
    arrays = group(target, source, num_dst, is_claimed)
    facts = [ascends(source), longest(arrays.rowptr)]
    facts += [ascends(target)] if is_claimed else []
    facts += [(source == target).sum()] if self_loops else []
    *bounds, by_source, max_degree = (pulled := pull(*bounds_of(source, target), *facts))[:6]
    refuse_ids(bounds, num_src, num_dst, num_edges)
    if is_claimed and not pulled[6]:
        raise ValueError("'edge_index' needs the order it claims: its targets do not ascend")
    csr = Adjacency(*arrays, num_src, max_degree)
    if self_loops:
        return _with_loops(csr, pulled[-1])
    return Built(csr, source_sorted=bool(by_source))


def build_pieces(
    pieces: Iterable[Tensor],
    num_edges: int,
    num_src: int,
    num_dst: int,
    transposed: bool,
    self_loops: bool,
    device: torch.device | str | None,
) -> Built:
    """Build the CSR of edges that come in pieces (see :meth:`~pyg_dfgnn.graph.Graph.of_pieces`)."""
    check_integer("num_edges", num_edges, 0)
    check_edges(num_edges + min(num_src, num_dst) * self_loops, "pieces")
    edges, bounds = _read_pieces(pieces, num_edges, device)
    source, target = (1, 0) if transposed else (0, 1)
    # Before int32 cut a number off, which the build does not see.
    refuse_ids([*bounds[source], *bounds[target]], num_src, num_dst, num_edges)
    built = build(CooEdges(edges[source], edges[target]), num_src, num_dst)
    del edges
    return add_loops(built.csr) if self_loops else built


def _read_pieces(
    pieces: Iterable[Tensor], num_edges: int, device: torch.device | str | None
) -> tuple[Tensor, list[list[int]]]:
    """Join pieces [2, e] to int32 [2, E]; smallest and largest id of both rows as they were."""
    edges, bounds, end = None, [], 0
    for piece in pieces:
        check_edge_index(piece, "pieces")
        if edges is None:
            edges = torch.empty(2, num_edges, dtype=torch.int32, device=piece.device if device is None else device)
        begin, end = end, end + piece.size(1)
        if end > num_edges:
            break
        edges[:, begin:end] = piece
        bounds.append(torch.stack(bounds_of(*piece)).to(edges.device, torch.int64))
    if end != num_edges:
        count = f"more than {num_edges}" if end > num_edges else str(end)
        raise ValueError(f"'pieces' needs num_edges={num_edges} edges in all (got {count})")
    if edges is None:
        return torch.empty(2, 0, dtype=torch.int32, device=device), [[0, 0], [0, 0]]
    low, high = torch.stack(bounds).view(-1, 2, 2).unbind(2)
    first_low, second_low, first_high, second_high = pull(*low.amin(0), *high.amax(0))
    return edges, [[first_low, first_high], [second_low, second_high]]


def build_relation(edge_type: Tensor, num_edges: int, num_relations: int) -> Tensor:
    """Return the relation of each edge in input order, int32 [E], checked in one host sync.

    Raises:
        TypeError: `edge_type` is no int64 or int32 tensor.
        ValueError: It has another shape or a relation outside of [0, num_relations).
    """
    check_integer("num_relations", num_relations, 0, INT32_MAX)
    check_shape("edge_type", edge_type, (num_edges,), f"[E={num_edges}]")
    check_dtype("edge_type", edge_type, INDEX_DTYPES)
    _refuse_range("edge_type", pull(*bounds_of(edge_type)), "num_relations", num_relations, num_edges)
    return edge_type.to(torch.int32, copy=True)


def build_index(index: Tensor, num_groups: int) -> Built:
    """Build the CSR whose rows are the groups of `index [E]` and whose columns are the positions 0 ... E - 1.

    An ascending index takes one host sync and no sort, another one a sort and a second sync.

    Raises:
        TypeError: `index` is no int64 or int32 tensor.
        ValueError: It is not one-dimensional, or a group is outside of [0, num_groups).
    """
    check_integer("num_groups", num_groups, 0, INT32_MAX)
    check_shape("index", index, ("E",), "[E]")
    check_dtype("index", index, INDEX_DTYPES)
    num_edges = index.numel()
    check_edges(num_edges, "index")
    rowptr = offsets(index.contiguous(), num_groups)
    low, high, is_sorted, max_degree = pull(*bounds_of(index), ascends(index), longest(rowptr))
    _refuse_range("index", [low, high], "num_groups", num_groups, num_edges)
    if is_sorted:
        perm = torch.arange(num_edges, dtype=torch.int32, device=index.device)
    else:
        rowptr, order = order_rows(index, num_groups)
        perm = order.to(torch.int32)
        (max_degree,) = pull(longest(rowptr))
    return Built(Adjacency(rowptr, perm, perm, num_edges, max_degree), source_sorted=True)


def build_ptr(ptr: Tensor) -> Built:
    """Build the CSR whose row g has the columns ptr[g] ... ptr[g + 1] - 1: one host sync.

    Raises:
        TypeError: `ptr` is no int64 or int32 tensor.
        ValueError: It is not one-dimensional, is empty, does not begin at 0, or descends.
    """
    check_shape("ptr", ptr, ("num_groups + 1",), "[num_groups + 1]")
    check_dtype("ptr", ptr, INDEX_DTYPES)
    if ptr.numel() == 0:
        raise ValueError("'ptr' needs shape [num_groups + 1] (got [0])")
    first, num_edges, shortest, max_degree = pull(ptr[0], ptr[-1], *bounds_of(ptr.diff()))
    if first != 0 or shortest < 0:
        fault = f"begins at {first}" if first else f"descends by {-shortest}"
        raise ValueError(f"'ptr' needs offsets that begin at 0 and never descend (got one that {fault})")
    check_edges(num_edges, "ptr")
    perm = torch.arange(num_edges, dtype=torch.int32, device=ptr.device)
    return Built(Adjacency(ptr.to(torch.int32, copy=True), perm, perm, num_edges, max_degree), source_sorted=True)


def _refuse_range(name: str, bounds: list[int], size_name: str, size: int, num_edges: int) -> None:
    low, high = bounds
    if num_edges and (low < 0 or high >= size):
        raise IdRangeError(f"'{name}' needs values in [0, {size_name}={size}) (got {low} to {high})")


def add_loops(csr: Adjacency) -> Built:
    """Build the CSR with self-loops replaced: no sort and a host sync.

    A second sync follows where some edges are loops already, or not all targets get one.
    """
    check_edges(csr.num_edges + min(csr.num_rows, csr.num_cols))
    (are_loops,) = pull(count_loops(csr.arrays))
    return _with_loops(csr, are_loops)


def _with_loops(csr: Adjacency, are_loops: int) -> Built:
    """Replace the self-loops of a CSR, of whose edges `are_loops` are some."""
    num_loops = min(csr.num_rows, csr.num_cols)
    arrays, stays = replace_self_loops(csr.arrays, num_loops, csr.num_edges - are_loops)
    if are_loops or num_loops < csr.num_rows:
        (max_degree,) = pull(longest(arrays.rowptr))
    else:
        max_degree = csr.max_degree + min(num_loops, 1)
    return Built(Adjacency(*arrays, csr.num_cols, max_degree), stays=stays)
