"""The launches of the schedule `row_split`: one kernel per sweep over the edges, one that merges heavy rows."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention.problem import STORAGE, AttentionProblem
from pyg_dfgnn.dispatch.attention.row_split import STEMS, items_per_block, node_constants, side_of, specs
from pyg_dfgnn.graph import Adjacency, Chunks, Graph
from pyg_dfgnn.graph.chunks import column_blocks, heavy_rows, row_order
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


class RowSplitLaunch:
    """One pass over one side of a graph (:class:`~pyg_dfgnn.ops.core.PreparedPass`): a kernel for each sweep over the
    edges, and one that merges heavy rows.

    Args:
        problem: What is computed.
        direction: A pass of the statement, or "dout_dlogit" for the forward pass that leaves that derivative.
        plan: How it runs.
        graph: The edges.
    """

    def __init__(self, problem: AttentionProblem, direction: str, plan: Any, graph: Graph) -> None:
        self.plan, self.direction = plan, direction
        side, _ = side_of(direction, graph)
        self.device, self.num_rows = graph.device, side.num_rows
        constants = plan.constants
        self.norms_of = _NORMS_OF[constants["SMEM"]] if constants["NORMS"] else ""
        stem = STEMS[direction]
        (spec,) = specs(problem, direction, plan)
        self.kernel = kernel_of(spec, f"attention_{stem}")
        self.merge = kernel_of(spec, f"attention_{stem}_merge")
        self.state_elements = constants["HEADS"] * problem.record.state_channels(direction, constants["CHANNELS"])
        self.items_per_block = items_per_block(constants)
        self.head_groups = -(-constants["HEADS"] // (constants["HEAD_SLOTS"] * constants["LANE_HEADS"]))
        self.threads = (32 * constants["WARPS"], 1, 1)
        # Kept for their addresses: two threads may make a list of the graph at once, of which it keeps one.
        self.arrays: list[Tensor | None] = []
        self._lay_out(graph, side)
        # States that go from launch to launch: of chunks to their merge, of rows to the next column block.
        has_state = direction != "weights"
        self.num_partial = self.max_chunks if has_state and not constants["JOINED"] else 0
        self.num_carried = self.num_rows if has_state and len(self.chunks) > 1 else 0
        self.nothing = 0 if self.device.type == "cuda" else None
        self._count, self._merged = _COUNT[direction], _MERGED[direction]
        self._finds = stem == "forward"
        self._no_states = () if direction == "weights" else (self.nothing,) * 2

    def _lay_out(self, graph: Graph, side: Adjacency) -> None:
        """Prepare the launches: which thread block works on what."""
        plan, constants = self.plan, self.plan.constants
        ordered, joined = bool(constants["ORDERED"]), bool(constants["JOINED"])
        self.chunks: Sequence[Chunks | None]
        if plan.blocks == 1:
            self.chunks = [heavy_rows(graph, side, plan.max_edges, self.items_per_block if joined else 0, ordered)]
            arrays = (side.rowptr, side.col, side.perm)
        else:
            swept = column_blocks(graph, side, plan.blocks, plan.max_edges, ordered)
            self.chunks = swept.chunks
            arrays = (swept.rowptr, swept.col, swept.perm)
        self.max_chunks = max((c.num_chunks for c in self.chunks if c is not None), default=0)
        self.shared_bytes = 4 * self.items_per_block * self.state_elements if joined and self.max_chunks else 0
        order = row_order(graph, side) if ordered else None
        self.sweeps = [self._adjacency(arrays, block, chunks, order) for block, chunks in enumerate(self.chunks)]
        # Thread blocks of one sweep, the same for all so that per-block results have a fixed place.
        self.grid = (-(-(self.num_rows + self.max_chunks) // self.items_per_block), self.head_groups, 1)
        self.blocks = self.grid[0]

    def _adjacency(
        self,
        arrays: Sequence[Tensor],
        block: int = 0,
        chunks: Chunks | None = None,
        row_order: Tensor | None = None,
        node_ptr: Tensor | None = None,
    ) -> tuple[Any, ...]:
        listed = (None,) * 4 if chunks is None else (chunks.row, chunks.begin, chunks.end, chunks.join)
        sizes = (self.num_rows, 0 if chunks is None else chunks.num_chunks, self.plan.max_edges)
        given = (*arrays, *listed, row_order, node_ptr)
        self.arrays += given
        return addresses((*given, *sizes, block, len(self.chunks)))

    def derives(self, name: str, saved: bool, shared: bool) -> str:
        """Return what the forward pass does with the inverse norms of a side: it may find them itself."""
        if self.norms_of == "sources":
            return "writes" if name == "source_scalars" else "reads"
        if self.norms_of == "targets":
            return ("writes" if shared else "reads") if saved else "ignores"
        return "reads"

    def __call__(self, arguments: Sequence[Any], handed: Any = None) -> None:
        """Sweep all column blocks; heavy rows are merged after each."""
        device, nothing = self.device, self.nothing
        given = arguments[: self._count]
        if self._finds:
            given = (*given, arguments[_NORMS] if self.norms_of else nothing)
        if not self.num_partial and not self.num_carried:
            # The edge pass has no states.
            given = (*self.sweeps[0], *given, *self._no_states)
            launch(self.kernel, self.grid, self.threads, given, device, self.shared_bytes)
            return
        partial = _states(self.num_partial, self.state_elements, device) if self.num_partial else None
        carry = _states(self.num_carried, self.state_elements, device) if self.num_carried else None
        states = [
            nothing if state is None else state.data_ptr() if state.is_cuda else state for state in (partial, carry)
        ]
        for block, (sweep, chunks) in enumerate(zip(self.sweeps, self.chunks, strict=True)):
            launch(self.kernel, self.grid, self.threads, (*sweep, *given, *states), device, self.shared_bytes)
            if chunks is not None and self.num_partial:
                grid = (-(-chunks.num_heavy // self.items_per_block), self.head_groups, 1)
                sizes = (chunks.num_heavy, chunks.num_chunks, self.num_rows, block, len(self.chunks))
                heavy = addresses((chunks.heavy_row, chunks.heavy_ptr, *sizes))
                merged = (arguments[place] for place in self._merged)
                launch(self.merge, grid, self.threads, (*heavy, states[0], *merged, states[1]), device)


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


def _states(count: int, elements: int, device: torch.device) -> Tensor:
    """Return room for `count` states of so many float32 `elements`, in whole vectors of 16 bytes."""
    return torch.empty(-(-count * elements // 4) * 4, dtype=torch.float32, device=device)
