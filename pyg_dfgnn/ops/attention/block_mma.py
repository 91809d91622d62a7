"""The launches of the schedule `block_mma`: one kernel per pass, a thread block per window of rows and group of
heads."""

from collections.abc import Sequence
from typing import Any

from pyg_dfgnn.dispatch.attention.block_mma import specs, stem_of
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.graph import Graph, block_sparse
from pyg_dfgnn.ops.prepared import PreparedPass
from pyg_dfgnn.runtime.launcher import addresses, kernel_of, launch

_COUNT = {"forward": 14, "targets": 17, "sources": 17}
"""Arguments of the statement's pass that the kernel takes."""


class BlockMmaLaunch(PreparedPass):
    """One pass over the dense blocks of a side."""

    def __init__(self, problem: AttentionProblem, direction: str, plan: Any, graph: Graph) -> None:
        self.plan, self.device, self._count = plan, graph.device, _COUNT[direction]
        (spec,) = specs(problem, direction, plan)
        self.kernel = kernel_of(spec, f"attention_{stem_of(direction)}")
        self.block_sparse = block_sparse.of(graph, direction, plan.rows, plan.compact)
        self.arrays = addresses((self.block_sparse.windows, self.block_sparse.columns, self.block_sparse.bits))
        self.grid = (self.block_sparse.num_windows, plan.constants["HEADS"] // plan.constants["BLOCK_HEADS"], 1)
        self.threads = (32 * plan.constants["WARPS"], 1, 1)

    def __call__(self, graph: Graph, arguments: Sequence[Any], carry: Any = None) -> None:
        """Launch the pass."""
        launch_arguments = (*self.arrays, *arguments[: self._count])
        launch(self.kernel, self.grid, self.threads, launch_arguments, self.device, self.plan.shared_bytes)
