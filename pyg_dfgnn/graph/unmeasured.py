"""A graph on its first calls: a CSR that no host has waited for, and nothing that has to be measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from pyg_dfgnn.graph.graph import Graph

MEASURED_EDGES = 1 << 23
"""Edges or nodes from which a graph is measured at its first call: the wait for the device is short beside the call."""
VISITS = 2
"""Calls of the first layer that the graph was given to, after which its next one measures the graph."""


class Rows:
    """The edges of a graph by row, in memory that they share with others.

    Attributes:
        num_rows: Number of rows.
        num_cols: Number of columns.
        num_edges: Room for edges.
        rows: Domain of the rows.
        cols: Domain of the columns.
        addresses: Offsets of the rows, columns and places in the input, as kernels take them.
    """

    __slots__ = ("num_rows", "num_cols", "num_edges", "rows", "cols", "addresses", "_memory", "_parts")

    def __init__(
        self, memory: Tensor, parts: Sequence[tuple[int, int]], num_rows: int, num_cols: int, rows: str, cols: str
    ) -> None:
        self.num_rows, self.num_cols, self.rows, self.cols = num_rows, num_cols, rows, cols
        self.num_edges, self._memory, self._parts = parts[1][1], memory, parts
        first = memory.data_ptr()
        self.addresses: tuple[Any, ...] = (
            tuple(first + 4 * begin for begin, _ in parts) if memory.is_cuda else tuple(self.arrays)
        )

    @property
    def arrays(self) -> list[Tensor]:
        """The three arrays, int32."""
        return [self._memory.narrow(0, *part) for part in self._parts]

    @property
    def rowptr(self) -> Tensor:
        """Edge range of each row, int32 [num_rows + 1]."""
        return self.arrays[0]


class UnmeasuredGraph(Graph):
    """The graph of a tensor `edge_index` as its first calls see it.

    The host knows its sizes and nothing else: not the longest row, the self-loops, or whether all ids are valid. Edges
    that are left out, self-loops that were replaced and those with an id out of range, lie behind the last row, so that
    `num_edges` is the room of the arrays. It serves the stream that it was made on.

    Attributes:
        kind: What the plans of all passes depend on: powers of two of the mean degrees of targets and sources, and
            whether self-loops were replaced.
        stream: Raw handle of its stream; None on a CPU.
        transposed: Whether row 0 of the edges holds the targets.
        visitor: Number of the first layer that it was given to.
        visits: Calls of that layer.
    """

    is_measured = False
    is_bare = True
    csr: Any

    def __init__(
        self, edge_index: Tensor, sizes: tuple[int, int, bool, bool], visitor: int, stream: int | None
    ) -> None:
        num_src, num_dst, self_loops, self.transposed = sizes
        # Not through the constructor of `Graph`, which tells other streams when they may read the arrays.
        self.device, self.pinned, self._streams, self._made = edge_index.device, False, None, None
        self._derived: dict[Any, Any] = {}
        self.get = self._derived.get
        self.num_src, self.num_dst, self.self_loops = num_src, num_dst, self_loops
        self.num_edges = edge_index.size(1) + (min(num_src, num_dst) if self_loops else 0)
        self.relation, self.num_relations = None, 0
        self._anchors, self._versions, self._sizes = (TensorWeakRef(edge_index),), (edge_index._version,), sizes
        self._stays, self._source_sorted, self._base, self._own_version = None, False, None, None
        self.kind = power_below(self.num_edges, num_dst), power_below(self.num_edges, num_src), self_loops
        self.stream, self.visitor, self.visits = stream, visitor, 1

    def adjacency(self, rows: str, cols: str) -> Any:
        """Return the edges by target or by source.

        Raises:
            ValueError: Another pair of domains.
        """
        if (rows, cols) == ("targets", "sources"):
            return self.csr
        if (rows, cols) != ("sources", "targets"):
            raise ValueError(f"'rows' and 'cols' need targets and sources on an unmeasured graph (got {(rows, cols)})")
        return self.csc

    @property
    def edge_index(self) -> Tensor:
        """The edges, as :attr:`Graph.edge_index`: the user's own tensor, or else that of the measured graph."""
        (edge_index,) = self._live_anchors()
        is_own = self._sizes[2:] == (False, False) and edge_index.dtype == torch.int64
        return edge_index if is_own else Graph.resolve(edge_index, *self._sizes).edge_index

    def make_arrays(self) -> tuple[Any, ...]:
        """Make room for the edges by target and by source, and return the six arrays as kernels take them."""
        counts = [self.num_dst + 1, self.num_edges, self.num_edges, self.num_src + 1, self.num_edges, self.num_edges]
        memory = torch.empty(sum(counts), dtype=torch.int32, device=self.device)
        begins = list(accumulate(counts, initial=0))[:-1]
        parts = list(zip(begins, counts))
        sides = ("targets", "sources"), ("sources", "targets")
        sizes = (self.num_dst, self.num_src), (self.num_src, self.num_dst)
        csr, csc = (Rows(memory, parts[3 * k : 3 * k + 3], *sizes[k], *sides[k]) for k in range(2))
        self.csr, self._by_source = csr, csc
        return *csr.addresses, *csc.addresses

    @property
    def csc(self) -> Any:
        """Rows are sources, columns are targets."""
        return self._by_source

    def side(self, direction: str) -> Any:
        """Return the rows that a pass works on, as :meth:`Graph.side`."""
        return self._by_source if direction == "sources" else self.csr

    def mean_degree(self, direction: str) -> int:
        """Return the power of two below the mean length of a row that a pass works on."""
        return self.kind[direction == "sources"]


def power_below(num_edges: int, num_rows: int) -> int:
    """Return the power of two below the mean length of so many rows."""
    return (1 << (num_edges // max(num_rows, 1)).bit_length()) >> 1
