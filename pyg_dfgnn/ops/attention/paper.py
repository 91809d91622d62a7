"""The launches of the schedules `smmf` and `pmf` and of the ablations of `smmf`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention.paper import smmf, stem_of
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.chunks import positions, row_index
from pyg_dfgnn.ops.prepared import PreparedPass
from pyg_dfgnn.runtime.launcher import addresses, kernel_of, launch

_INPUTS = 11
"""Inputs and numbers at the head of the arguments of every pass."""
_OUTPUTS = {"forward": slice(11, 14), "targets": slice(11, 18)}
"""Places of the arguments after the inputs in the kernels that write a pass's results."""
_GRAD_OUT = 13
"""Place of the output's gradient in the pass over targets."""
_SOURCE_GRADS = slice(12, 17)
"""The output's gradient and the results in the pass over sources."""


class PaperLaunch(PreparedPass):
    """One pass.

    The pass over targets hands over the weights after dropout and the gradients of the scores, float32 [2, E, H] in the
    order of the CSR, to the pass over sources, which is the same for both schedules.
    """

    def __init__(self, problem: AttentionProblem, direction: str, plan: Any, graph: Graph) -> None:
        self.plan, self.direction = plan, direction
        self.device, self.num_edges = graph.device, graph.num_edges
        constants = plan.constants
        warps = constants["WARPS"]
        self.threads = (32 * warps, 1, 1)
        self.heads = constants["HEADS"]
        self.head_groups = -(-self.heads // (constants["HEAD_SLOTS"] * constants["LANE_HEADS"]))
        stem, (spec,) = stem_of(direction, plan), smmf.specs(problem, direction, plan)
        self.kernel = kernel_of(spec, f"attention_{stem}")
        side = graph.csc if direction == "sources" else graph.csr
        sizes = (side.num_rows,) if direction == "forward" else (side.num_rows, self.num_edges)
        # Kept for their addresses: two threads may make an array of the graph at once, of which it keeps one.
        self.arrays: tuple[Tensor, ...]
        if direction == "sources":
            self.arrays = (side.rowptr, side.col, positions(graph, side, graph.csr))
        else:
            self.arrays = (side.rowptr, row_index(graph, side), side.col, side.perm)
            if not plan.one_kernel:
                self.score_kernel = kernel_of(spec, f"attention_{stem}_scores")
                self.score_edges = addresses((*self.arrays[1:], self.num_edges, plan.warp_edges))
                self.score_grid = (-(-self.num_edges // (plan.warp_edges * warps)), self.head_groups, 1)
        self.edges = addresses((*self.arrays, *sizes))
        block_rows = constants.get("BLOCK_ROWS", warps // constants["ROW_WARPS"])
        self.grid = (-(-side.num_rows // block_rows), self.head_groups, 1)

    def __call__(self, graph: Graph, arguments: Sequence[Any], carry: Tensor | None = None) -> Tensor | None:
        """Launch the pass, and return the state of the edges that the pass over sources reads."""
        inputs = arguments[:_INPUTS]
        if self.direction == "sources":
            (state,) = addresses((carry,))
            self._launch((*inputs, state, *arguments[_SOURCE_GRADS]))
            return None
        outputs = arguments[_OUTPUTS[self.direction]]
        if self.direction == "forward":
            if self.plan.one_kernel:
                self._launch((*inputs, *outputs))
                return None
            scores = torch.empty((self.num_edges, self.heads), dtype=torch.float32, device=self.device)
            (scores_at,) = addresses((scores,))
            self._launch_scores((*inputs, scores_at))
            self._launch((*inputs, scores_at, *outputs))
            return None
        state = torch.empty((2, self.num_edges, self.heads), dtype=torch.float32, device=self.device)
        (state_at,) = addresses((state,))
        if not self.plan.one_kernel:
            self._launch_scores((*inputs, arguments[_GRAD_OUT], state_at))
        self._launch((*inputs, *outputs, state_at))
        return state

    def _launch(self, arguments: Sequence[Any]) -> None:
        launch_arguments = (*self.edges, *arguments)
        launch(self.kernel, self.grid, self.threads, launch_arguments, self.device, self.plan.shared_bytes)

    def _launch_scores(self, arguments: Sequence[Any]) -> None:
        launch(self.score_kernel, self.score_grid, self.threads, (*self.score_edges, *arguments), self.device)
