"""The launches of the schedule `row_split`: one kernel per sweep over the edges, one that merges heavy rows."""

from functools import cache
from typing import Any

import torch

from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.attention.row_split import STEMS, node_constants, specs
from pyg_dfgnn.dispatch.traversal import STORAGE
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.traversal import NodeKernel, NodeLaunch, TraversalLaunch
from pyg_dfgnn.statements.attention import TARGETS
from pyg_dfgnn.statements.spec import Spec

_COUNT = {"forward": 18, "dout_dlogit": 18, "targets": 23, "sources": 19, "weights": 14}
"""Arguments of the statement's pass that the kernel takes."""
_MERGED = {
    "forward": (9, 11, 12, 13, 14, 16, 17),
    "dout_dlogit": (9, 11, 12, 13, 14, 16, 17),
    "targets": (0, 3, 5, 8, 15, 16, 22),
    "sources": (2, 4, 5, 8, 13, 14, 15, 16),
    "weights": (),
}
"""Places of the arguments that the merge kernel takes between its two states."""
_OF_NODES = ("out", "dout_dlogit", "row_stats", "grad_out", "bwd_row_stats", "grad_target")
"""Arguments of the kernel that reads no edge."""
_NORMS = 4
"""Place of the source scalars, to which a forward pass writes the norms that it finds."""
_NORMS_OF = ("targets", "sources")
"""Whose norms a forward pass with `NORMS` finds, by `SMEM`."""


class RowSplitLaunch(TraversalLaunch):
    """One pass over one side of a graph (:class:`~pyg_dfgnn.ops.core.PreparedPass`).

    Args:
        problem: What is computed.
        direction: A pass of the statement, or "dout_dlogit" for the forward pass that leaves that derivative.
        plan: How it runs.
        graph: The edges.
    """

    def __init__(self, problem: AttentionProblem, direction: str, plan: Any, graph: Graph) -> None:
        constants, stem = plan.constants, STEMS[direction]
        self.norms_of = _NORMS_OF[constants["SMEM"]] if constants["NORMS"] else ""
        more = ((_NORMS if self.norms_of else None),) if stem == "forward" else ()
        (spec,) = specs(problem, direction, plan)
        numbers = problem.record.state_channels(direction, constants["CHANNELS"], problem.edge_channels)
        state_elements = constants["HEADS"] * numbers
        if direction == "weights":
            state_elements = 0
        super().__init__(
            plan,
            direction,
            graph,
            spec,
            f"attention_{stem}",
            state_elements,
            _COUNT[direction],
            _MERGED[direction],
            more,
        )

    def derives(self, name: str, saved: bool, shared: bool) -> str:
        """Return what the forward pass does with the inverse norms of a side: it may find them itself."""
        if self.norms_of == "sources":
            return "writes" if name == "source_scalars" else "reads"
        if self.norms_of == "targets":
            return ("writes" if shared else "reads") if saved else "ignores"
        return "reads"


def node_launch(plan: Any) -> NodeLaunch:
    """Return the pass over targets where the forward pass left the derivative of the output: it reads no edge."""
    heads, channels = plan.constants["HEADS"], plan.constants["CHANNELS"]
    dtype = next(dtype for dtype, number in STORAGE.items() if number == plan.constants["STORAGE"])
    kernel = node_kernel("attention/backward_nodes.cu", "attention_backward_nodes", heads, channels, dtype)
    return NodeLaunch(plan, kernel, tuple(TARGETS.arguments.index(name) for name in _OF_NODES))


@cache
def node_kernel(path: str, entry: str, heads: int, channels: int, dtype: torch.dtype) -> NodeKernel:
    """Return a :class:`NodeKernel`, prepared once."""
    # The derivative and, in 16 bits, the output are float32.
    constants = node_constants(heads, channels, dtype, float_loads=entry == "attention_backward_nodes")
    return NodeKernel(Spec(path, tuple(constants.items())), entry)
