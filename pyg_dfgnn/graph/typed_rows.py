"""Rows that are sorted by type, cut into the items that thread blocks take: built once and kept with a graph."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dfgnn.graph.adjacency import order_rows, outside_capture, push
from pyg_dfgnn.graph.derived import Derived
from pyg_dfgnn.graph.graph import Graph
from pyg_dfgnn.graph.relations import compact_rows


class TypedRows(NamedTuple):
    """Rows that are sorted by type.

    Attributes:
        holder: The graph, or another container, that keeps what is made from them.
        name: What they are called there.
        type_ptr: Range of the rows of each type, int32 [T + 1].
        num_rows: Their number.
    """

    holder: Derived
    name: Hashable
    type_ptr: Tensor
    num_rows: int

    @property
    def num_types(self) -> int:
        """The number T of types."""
        return self.type_ptr.numel() - 1


@dataclass(frozen=True, eq=False)
class RowItems:
    """Typed rows in items: consecutive rows of one type.

    Attributes:
        items: Type, first row, row after the last, and place of a partial result, int32 [I, 4]; the place is -1 for an
            item that has all rows of its type.
        split_types: Types of more than one item, int32 [S].
        split_ptr: Range of the places of each of these, int32 [S + 1].
        num_places: Number of places.
    """

    items: Tensor
    split_types: Tensor
    split_ptr: Tensor
    num_places: int


def pairs_by_relation(graph: Graph, rows: str) -> TypedRows:
    """Return the compact rows "source_relations" or "target_relations" of a graph, by relation."""
    compact = compact_rows(graph, rows)
    graph.derived(_ends(rows), lambda: compact.ends)
    return TypedRows(graph, rows, compact.rowptr, compact.node.numel())


def one_type(graph: Derived, num_rows: int) -> TypedRows:
    """Return any rows as rows of one type: those of a weight that all of them share."""

    def build() -> Tensor:
        type_ptr = torch.zeros(2, dtype=torch.int32, device=graph.device)
        type_ptr[1:].fill_(num_rows)
        return type_ptr

    name = "one_type", num_rows
    graph.derived(_ends(name), lambda: [0, num_rows])
    return TypedRows(graph, name, graph.derived(name, build), num_rows)


def sorted_by_type(holder: Derived, name: Hashable, type_of: Tensor, num_types: int) -> tuple[TypedRows, Tensor]:
    """Return rows of any types sorted by them, rows of one type in the order that they have.

    Args:
        holder: The graph, or another container, that keeps the result.
        name: What the rows are called there; one name for one `type_of`.
        type_of: Type of each row, int [rows].
        num_types: The number T of types.

    Returns:
        The typed rows, and the row at each place, int32 [rows].
    """

    def build() -> tuple[Tensor, Tensor]:
        type_ptr, order = order_rows(type_of, num_types)
        return type_ptr, order.to(torch.int32)

    type_ptr, order = holder.derived(("sorted_by_type", name), build)
    return TypedRows(holder, name, type_ptr, type_of.numel()), order


def row_items(rows: TypedRows, length: int, every_type: bool) -> RowItems:
    """Return typed rows in items of at most `length` rows, built on first use.

    There is a host sync where the ranges of the types are on the device alone.

    Args:
        rows: The rows.
        length: Most rows of an item.
        every_type: Whether a type without rows has an item too, which is empty.

    Raises:
        ValueError: The ranges of the types do not ascend from 0 to the number of rows.
    """
    key = "row_items", rows.name, length, every_type
    return rows.holder.derived(key, lambda: _build(rows, length, every_type))


def _build(rows: TypedRows, length: int, every_type: bool) -> RowItems:
    listed = rows.holder.derived(_ends(rows.name), rows.type_ptr.tolist)
    # On arrays as short as these, torch takes several times as long, and a GPU would be waited for.
    ends = np.array(listed, dtype=np.int64)
    lengths = np.diff(ends)
    if ends[0] != 0 or ends[-1] != rows.num_rows or (lengths < 0).any():
        raise ValueError(f"'type_ptr' needs to ascend from 0 to {rows.num_rows} (got {listed})")
    count = -(-lengths // length)
    count = count.clip(min=1) if every_type else count
    split = np.flatnonzero(count > 1)
    of_split = np.where(count > 1, count, 0)
    first, places = np.cumsum(count) - count, np.cumsum(of_split) - of_split
    type_of = np.arange(len(count)).repeat(count)
    order = np.arange(len(type_of)) - first[type_of]
    begin = ends[type_of] + order * length
    end = np.minimum(begin + length, ends[type_of + 1])
    place = np.where(count[type_of] > 1, places[type_of] + order, -1)
    num_places = int(of_split.sum())
    outside_capture(rows.type_ptr)
    parts = np.stack([type_of, begin, end, place], 1).ravel(), split, places[split], [num_places]
    joined = push(torch.from_numpy(np.concatenate(parts).astype(np.int32)), rows.holder.device)
    items, split_types, split_ptr = joined.split([4 * len(type_of), len(split), len(split) + 1])
    return RowItems(items.view(-1, 4), split_types, split_ptr, num_places)


def _ends(name: Hashable) -> tuple[Hashable, ...]:
    """Return where a holder keeps the ranges of types on the host."""
    return "ends", name
