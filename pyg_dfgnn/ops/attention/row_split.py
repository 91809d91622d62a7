"""The launches of the schedule `row_split`: one kernel per sweep over the edges, one that merges heavy rows."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.attention.row_split import STEMS, node_constants, specs
from pyg_dfgnn.dispatch.traversal import STORAGE
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.traversal import TraversalLaunch
from pyg_dfgnn.runtime.launcher import Argument, addresses, kernel_of, launch
from pyg_dfgnn.statements.spec import Spec

_COUNT = {"forward": 15, "dout_dlogit": 15, "targets": 19, "sources": 17, "weights": 13}
"""Arguments of the statement's pass that the kernel takes."""
_MERGED = {
    "forward": (9, 11, 12, 13, 14),
    "dout_dlogit": (9, 11, 12, 13, 14),
    "targets": (0, 3, 5, 8, 15, 16),
    "sources": (2, 4, 5, 8, 13, 14, 15, 16),
    "weights": (),
}
"""Places of the arguments that the merge kernel takes between its two states."""
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
        state_elements = constants["HEADS"] * problem.record.state_channels(direction, constants["CHANNELS"])
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


class NodeLaunch:
    """The pass over targets where the forward pass left the derivative of the output: it reads no edge."""

    blocks = 0

    def __init__(self, plan: Any, graph: Graph) -> None:
        self.plan, self.device, self.num_rows = plan, graph.device, graph.num_dst
        heads, channels = plan.constants["HEADS"], plan.constants["CHANNELS"]
        dtype = next(dtype for dtype, number in STORAGE.items() if number == plan.constants["STORAGE"])
        self.kernel = node_kernel("attention/backward_nodes.cu", "attention_backward_nodes", heads, channels, dtype)

    def __call__(self, arguments: Sequence[Any], handed: Any = None) -> None:
        """Launch on (out, dout_dlogit, row_stats, grad_out, bwd_row_stats, grad_target)."""
        out, row_stats, grad_out, bwd_row_stats, grad_target, *_, dout_dlogit = arguments[11:]
        given = (out, dout_dlogit, row_stats, grad_out, bwd_row_stats, grad_target)
        self.kernel.launch(self.num_rows, self.device, given)

    def derives(self, name: str, saved: bool, shared: bool) -> str:
        """Return that the pass reads what is derived."""
        return "reads"


class NodeKernel:
    """A kernel that reads the rows [H, C] of nodes and no edges."""

    def __init__(self, path: str, entry: str, heads: int, channels: int, dtype: torch.dtype) -> None:
        # The derivative and, in 16 bits, the output are float32.
        constants = node_constants(heads, channels, dtype, float_loads=entry == "attention_backward_nodes")
        self.kernel = kernel_of(Spec(path, tuple(constants.items())), entry)
        self.rows_per_block = constants["WARPS"] * constants["WARP_ROWS"]
        self.head_groups = -(-constants["HEADS"] // (constants["HEAD_SLOTS"] * constants["LANE_HEADS"]))
        self.threads = (32 * constants["WARPS"], 1, 1)

    def launch(self, num_rows: int, device: torch.device, arguments: Sequence[Any]) -> None:
        """Launch it on `num_rows` nodes, with the arguments of the kernel after their number, as kernels take them."""
        grid = (-(-num_rows // self.rows_per_block), self.head_groups, 1)
        launch(self.kernel, grid, self.threads, (num_rows, *arguments), device)

    def __call__(self, num_rows: int, device: torch.device, *arguments: Argument) -> None:
        """Launch it on tensors."""
        self.launch(num_rows, device, addresses(arguments))


@cache
def node_kernel(path: str, entry: str, heads: int, channels: int, dtype: torch.dtype) -> NodeKernel:
    """Return a :class:`NodeKernel`, prepared once."""
    return NodeKernel(path, entry, heads, channels, dtype)
