"""The launches of the schedule `smem`: the kernels of `row_split`, a thread block per range of nodes."""

from pyg_dfgnn.graph import Adjacency, Graph
from pyg_dfgnn.graph.derived import Derived
from pyg_dfgnn.graph.node_ranges import node_ranges
from pyg_dfgnn.ops.attention.row_split import RowSplitLaunch


class SmemLaunch(RowSplitLaunch):
    """One pass over ranges of nodes that no edge leaves (:class:`~pyg_dfgnn.ops.core.PreparedPass`)."""

    def _lay_out(self, graph: Derived, side: Adjacency) -> None:
        assert isinstance(graph, Graph)
        ranges = node_ranges(graph, self.plan.bound)
        assert ranges is not None
        self.chunks = [None]
        self.max_chunks = 0
        self.shared_bytes = self.plan.shared_bytes
        self.sweeps = [self._adjacency((side.rowptr, side.col, side.perm), node_ptr=ranges.ptr)]
        self.grid = (ranges.num_ranges, self.head_groups, 1)
