"""Graphs whose arrays stay where they are while batches pass through them: what a captured CUDA graph may read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from pyg_dfgnn.graph.adjacency import INT32_MAX, Adjacency, offsets
from pyg_dfgnn.graph.build import Built
from pyg_dfgnn.graph.derived import Derived
from pyg_dfgnn.graph.graph import Graph, keep
from pyg_dfgnn.graph.unmeasured import power_below


class RefilledGraph(Graph):
    """The edges of batches that a fixed tensor holds one after another, in arrays that stay where they are.

    The host knows the room and nothing of a batch, for which it so never waits. Kernels write the arrays once per step,
    also in the replays of a captured one. As of an unmeasured graph, edges that are left out lie behind the last row:
    those of padding, self-loops that were replaced and those with an id out of range.

    Args:
        edge_index: The tensor, int64 or int32 [2, room for edges]; only weakly referred to.
        batch_sizes: Numbers of edges and of nodes of the batch that it holds, int64 [2] on its device.
        num_nodes: Room for nodes.
        self_loops: As in :meth:`Graph.of`.
        transposed: Whether row 0 of the edges holds the targets.
        refill: Makes a graph write its arrays.
    """

    is_static = True
    is_bare = True

    def __init__(
        self,
        edge_index: Tensor,
        batch_sizes: Tensor,
        num_nodes: int,
        self_loops: bool,
        transposed: bool,
        refill: Callable[[RefilledGraph], None],
    ) -> None:
        # Not through the constructor of `Graph`: most layers ask for one of the variants, and the others get no arrays.
        Derived.__init__(self, edge_index.device)
        self.num_src = self.num_dst = num_nodes
        self.num_edges = edge_index.size(1) + (num_nodes if self_loops else 0)
        self.self_loops, self.transposed, self.batch_sizes = self_loops, transposed, batch_sizes
        self.relation, self.num_relations = None, 0
        self._sizes = num_nodes, num_nodes, self_loops, transposed
        self._anchors, self._versions = (TensorWeakRef(edge_index),), (edge_index._version,)
        self._stays, self._source_sorted, self._base, self._own_version = None, False, None, None
        self._refill = refill
        self._sides: tuple[Adjacency, Adjacency] | None = None
        self.pin()

    def register(self) -> None:
        """Let layers find the graph by the tensor as it is now; an edit of that ends it."""
        self._versions = (self.room._version,)
        keep(self, (self.room,), self._sizes)

    def refill(self) -> None:
        """Write the arrays from what the tensor now holds, if a layer has ever read them."""
        if self._sides is not None:
            self._refill(self)

    @property
    def room(self) -> Tensor:
        """The tensor that batches are copied to."""
        (edge_index,) = (ref() for ref in self._anchors)
        assert edge_index is not None
        return edge_index

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays by target and by source, as kernels take them."""
        return *self.csr.addresses, *self.csc.addresses

    def adjacency(self, rows: str, cols: str) -> Adjacency:
        """Return the edges by target or by source; the first reader has them written.

        Raises:
            ValueError: Another pair of domains.
        """
        if {rows, cols} != {"targets", "sources"}:
            need = "targets and sources on a graph whose edges change"
            raise ValueError(f"'rows' and 'cols' need {need} (got {(rows, cols)})")
        if self._sides is None:
            self._sides = self._make("targets", "sources"), self._make("sources", "targets")
            self._refill(self)
        return self._sides[rows == "sources"]

    def _make(self, rows: str, cols: str) -> Adjacency:
        counts = self.num_dst + 1, self.num_edges, self.num_edges
        with torch.inference_mode(False):
            rowptr, col, perm = (torch.zeros(count, dtype=torch.int32, device=self.device) for count in counts)
        # Longer than any row: rows are not split, for a list of pieces would not fit the edges to come.
        return Adjacency(rowptr, col, perm, self.num_dst, INT32_MAX, rows, cols)

    def mean_degree(self, direction: str) -> int:
        """Return the power of two below the mean length of a row that a pass works on, where the room is full."""
        return power_below(self.num_edges, self.num_dst)

    @property
    def csr(self) -> Adjacency:  # type: ignore[override]
        """Rows are targets, columns are sources."""
        return self.adjacency("targets", "sources")

    @property
    def has_loops(self) -> bool:
        """Whether there may be self-loops, which is not known of batches to come."""
        return True

    @property
    def kept(self) -> Tensor | None:
        """Nothing: edges keep their numbers also where self-loops were replaced.

        Raises:
            ValueError: Self-loops were replaced.
        """
        if self.self_loops:
            raise ValueError("'edge_attr' needs layers without self-loops on a graph whose edges change")
        return None

    @property
    def edge_index(self) -> Tensor:
        """The edges of the room as they are now, int64 [2, E]: row 0 sources, row 1 targets, loops appended."""
        edge_index = self.room
        if self._sizes[2:] == (False, False) and edge_index.dtype == torch.int64:
            return edge_index
        edges = (edge_index.flip(0) if self.transposed else edge_index).long()
        if not self.self_loops:
            return edges
        return torch.cat([edges, torch.arange(self.num_dst, device=self.device).expand(2, -1)], dim=1)


class StaticGroups(Graph):
    """The graph of a reduction over groups of consecutive rows, at fixed addresses while other groups are put in.

    Args:
        index: Group of each row, ascending, int64 or int32 [N]; its values may change. Only weakly referred to.
        num_groups: Number of groups.
    """

    is_static = True

    def __init__(self, index: Tensor, num_groups: int) -> None:
        count = index.numel()
        rows = torch.arange(count + 1, dtype=torch.int32, device=index.device)
        by_group = Adjacency(torch.zeros_like(rows[:1]).repeat(num_groups + 1), rows[:-1], rows[:-1], count, count)
        by_row = Adjacency(rows, torch.zeros_like(rows[:-1]), rows[:-1], num_groups, 1, "sources", "targets")
        super().__init__(Built(by_group, by_row, source_sorted=True), (index,), (num_groups,))
        self.pin()

    @property
    def edge_index(self) -> Tensor:
        """The edges as they are now, int64 [2, N]: row 0 the rows, row 1 their groups."""
        return torch.stack([self.csc.perm.long(), self.csc.col.long()])

    def refill(self, index: Tensor) -> None:
        """Take the groups that the index now holds."""
        self.csr.rowptr.copy_(offsets(index, self.num_dst))
        self.csc.col.copy_(index)

    def register(self, index: Tensor) -> None:
        """Let reductions find the graph by the index as it is now; an edit of that ends it."""
        self._versions = (index._version,)
        keep(self, (index,), self._sizes)
