"""The launches of the schedule `smem`: the kernels of `row_split`, a thread block per range of nodes."""

from typing import Any

from pyg_dfgnn.graph import Adjacency, Graph
from pyg_dfgnn.graph.node_ranges import node_ranges
from pyg_dfgnn.ops.attention.row_split import RowsWalk


class ResidentWalk(RowsWalk):
    """One pass over ranges of nodes that no edge leaves: a :class:`~pyg_dfgnn.ops.attention.launch.Walk`."""

    chosen: Any

    def _lay_out(self, walk: str, graph: Graph, side: Adjacency) -> None:
        ranges = node_ranges(graph, self.chosen.bound)
        assert ranges is not None
        self.chunks = [None]
        self.max_chunks = 0
        self.shared_bytes = self.chosen.shared_bytes
        self.sweeps = [self._arguments((side.rowptr, side.col, side.perm), node_ptr=ranges.ptr)]
        self.grid = (ranges.num_ranges, self.head_groups, 1)
        self.parameter_blocks = self.grid[0]
