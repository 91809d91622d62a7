"""The launches of the schedule `row_split`: one kernel per sweep over the edges, one that merges heavy rows."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention.row_split import RowsPass, items_per_block, node_constants, side_of
from pyg_dfgnn.graph import Adjacency, Chunks, Graph
from pyg_dfgnn.graph.chunks import column_blocks, heavy_rows, row_order
from pyg_dfgnn.runtime.compiler import Spec
from pyg_dfgnn.runtime.launcher import Argument, addresses, kernel_of, launch
from pyg_dfgnn.statements.scores import SCORES

_STEMS = {
    "forward": "forward",
    "tangent": "forward",
    "targets": "backward_targets",
    "sources": "backward_sources",
    "weights": "weights",
}
_NORMS_OF = ("targets", "sources")
"""Whose norms a forward pass with `NORMS` finds, by `RESIDENT`."""


class RowsWalk:
    """The kernels of one pass over one side of a graph, with the arguments that all its launches share.

    A :class:`~pyg_dfgnn.ops.attention.launch.Walk`, which says what the arguments are; `walk` may also be "weights"
    or "tangent".
    """

    def __init__(self, walk: str, chosen: RowsPass, graph: Graph) -> None:
        self.chosen = chosen
        side, _ = side_of(walk, graph)
        self.device = graph.device
        self.num_rows = side.num_rows
        constants = chosen.constants
        self.finds_norms = _NORMS_OF[constants["RESIDENT"]] if constants["NORMS"] else None
        stem = _STEMS[walk]
        spec = Spec(f"attention/{stem}.cu", tuple(constants.items()))
        self.kernel = kernel_of(spec, f"attention_{stem}")
        self.merge = kernel_of(spec, f"attention_{stem}_merge")
        self.state_elements = constants["HEADS"] * _state_channels(walk, constants["CHANNELS"], constants["SCORE"])
        self.items_per_block = items_per_block(constants)
        self.head_groups = -(-constants["HEADS"] // (constants["HEAD_SLOTS"] * constants["LANE_HEADS"]))
        self.threads = (32 * constants["WARPS"], 1, 1)
        # Kept for their addresses: two threads may make a list of the graph at once, of which it keeps one.
        self.arrays: list[Tensor | None] = []
        self._lay_out(walk, graph, side)
        # States that go from launch to launch: of chunks to their merge, of rows to the next column block.
        self.num_partial = 0 if constants["JOINED"] else self.max_chunks
        self.num_carried = self.num_rows if len(self.chunks) > 1 else 0

    def _lay_out(self, walk: str, graph: Graph, side: Adjacency) -> None:
        """Prepare the launches of one pass: which thread block works on what."""
        chosen, constants = self.chosen, self.chosen.constants
        ordered, joined = bool(constants["ORDERED"]), bool(constants["JOINED"])
        self.chunks: Sequence[Chunks | None]
        if chosen.blocks == 1:
            self.chunks = [heavy_rows(graph, side, chosen.max_edges, self.items_per_block if joined else 0, ordered)]
            arrays = (side.rowptr, side.col, side.perm)
        else:
            swept = column_blocks(graph, side, chosen.blocks, chosen.max_edges, ordered)
            self.chunks = swept.chunks
            arrays = (swept.rowptr, swept.col, swept.perm)
        self.max_chunks = max((c.num_chunks for c in self.chunks if c is not None), default=0)
        self.shared_bytes = 4 * self.items_per_block * self.state_elements if joined and self.max_chunks else 0
        order = row_order(graph, side) if ordered else None
        self.sweeps = [self._arguments(arrays, block, chunks, order) for block, chunks in enumerate(self.chunks)]
        # Thread blocks of one sweep, the same for all so that per-block results have a fixed place.
        self.grid = (-(-(self.num_rows + self.max_chunks) // self.items_per_block), self.head_groups, 1)
        self.parameter_blocks = self.grid[0]

    def _arguments(
        self,
        arrays: Sequence[Tensor],
        block: int = 0,
        chunks: Chunks | None = None,
        row_order: Tensor | None = None,
        node_ptr: Tensor | None = None,
    ) -> tuple[Any, ...]:
        listed = (None,) * 4 if chunks is None else (chunks.row, chunks.begin, chunks.end, chunks.join)
        sizes = (self.num_rows, 0 if chunks is None else chunks.num_chunks, self.chosen.max_edges)
        given = (*arrays, *listed, row_order, node_ptr)
        self.arrays += given
        return addresses((*given, *sizes, block, len(self.chunks)))

    def forward(
        self,
        ready: Sequence[Any],
        out: Tensor,
        softmax: Tensor | None,
        exact: Tensor | None,
        tangent: Tensor | None = None,
    ) -> None:
        """Write the results of the forward pass; the walk "tangent" needs `tangent` [N_dst, H, C] in float32."""
        results = (out, softmax, exact, tangent)
        source_scalars, slope = ready[4], ready[9]
        norms = None if self.finds_norms is None else source_scalars
        self._sweep(ready, (*results, norms), (slope,), results)

    def targets(
        self,
        ready: Sequence[Any],
        out: Tensor,
        softmax: Tensor,
        grad_out: Tensor,
        records: Tensor,
        grad_target: Tensor,
        grad_beta: Tensor | None,
        grad_edge: Tensor | None,
        parameter_sums: Tensor | None,
    ) -> None:
        """Write the results of the pass over targets; nothing else is kept for the pass over sources."""
        target, _, _, target_scalars, _, parameter, _, _, scale = ready[:9]
        self._sweep(
            ready,
            (out, softmax, grad_out, records, grad_target, grad_beta, grad_edge, parameter_sums),
            (target, target_scalars, parameter, scale),
            (grad_target, grad_beta),
        )

    def nodes(
        self,
        out: Tensor,
        tangent: Tensor,
        softmax: Tensor,
        grad_out: Tensor,
        records: Tensor,
        grad_target: Tensor,
    ) -> None:
        """Write the results of the pass over targets from the tangent [N_dst, H, C] of the forward pass: no edges."""
        constants = self.chosen.constants
        run = node_kernel(
            "attention/backward_nodes.cu",
            "attention_backward_nodes",
            constants["HEADS"],
            constants["CHANNELS"],
            grad_out.dtype,
        )
        run(self.num_rows, self.device, out, tangent, softmax, grad_out, records, grad_target)

    def sources(
        self,
        ready: Sequence[Any],
        records: Tensor,
        grad_out: Tensor,
        grad_key: Tensor | None,
        grad_value: Tensor,
        grad_source: Tensor | None,
        grad_target: Tensor | None,
        state: Tensor | None,
    ) -> None:
        """Write the results of the pass over sources."""
        _, _, value, _, source_scalars, parameter, _, _, scale = ready[:9]
        results = (grad_key, grad_value, grad_source, grad_target)
        self._sweep(ready, (records, grad_out, *results), (value, source_scalars, parameter, scale), results)

    def weights(self, ready: Sequence[Any], softmax: Tensor, weights: Tensor) -> None:
        """Write the weights after dropout [E, H]."""
        arguments = (*self.sweeps[0], *ready, *addresses((softmax, weights)))
        launch(self.kernel, self.grid, self.threads, arguments, self.device)

    def _sweep(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Argument],
        merge_inputs: Sequence[Argument],
        merge_outputs: Sequence[Argument],
    ) -> None:
        """Sweep all column blocks; heavy rows are merged after each.

        Args:
            inputs: What the kernel reads, after the adjacency, as it takes it.
            outputs: What it writes, before the two state buffers.
            merge_inputs: What the merge kernel reads, after the chunks' states.
            merge_outputs: What it writes, before the rows' states.
        """
        device = self.device
        partial = _states(self.num_partial, self.state_elements, device) if self.num_partial else None
        carry = _states(self.num_carried, self.state_elements, device) if self.num_carried else None
        arguments = (*inputs, *addresses((*outputs, partial, carry)))
        for block, (sweep, chunks) in enumerate(zip(self.sweeps, self.chunks, strict=True)):
            launch(self.kernel, self.grid, self.threads, sweep + arguments, device, self.shared_bytes)
            if chunks is not None and self.num_partial:
                grid = (-(-chunks.num_heavy // self.items_per_block), self.head_groups, 1)
                sizes = (chunks.num_heavy, chunks.num_chunks, self.num_rows, block, len(self.chunks))
                merge = (chunks.heavy_row, chunks.heavy_ptr, *sizes, partial, *merge_inputs, *merge_outputs, carry)
                launch(self.merge, grid, self.threads, addresses(merge), device)


class NodeKernel:
    """A kernel that reads the rows [H, C] of nodes and no edges."""

    def __init__(self, path: str, entry: str, heads: int, channels: int, dtype: torch.dtype) -> None:
        # The tangent and, in 16 bits, the output are float32.
        constants = node_constants(heads, channels, dtype, float_loads=entry == "attention_backward_nodes")
        self.kernel = kernel_of(Spec(path, tuple(constants.items())), entry)
        self.rows_per_block = constants["WARPS"] * constants["WARP_ROWS"]
        self.head_groups = -(-constants["HEADS"] // (constants["HEAD_SLOTS"] * constants["LANE_HEADS"]))
        self.threads = (32 * constants["WARPS"], 1, 1)

    def __call__(self, num_rows: int, device: torch.device, *arguments: Argument) -> None:
        """Launch it on `num_rows` nodes, with the arguments of the kernel after their number."""
        grid = (-(-num_rows // self.rows_per_block), self.head_groups, 1)
        launch(self.kernel, grid, self.threads, addresses((num_rows, *arguments)), device)


@cache
def node_kernel(path: str, entry: str, heads: int, channels: int, dtype: torch.dtype) -> NodeKernel:
    """A :class:`NodeKernel`, prepared once."""
    return NodeKernel(path, entry, heads, channels, dtype)


def _state_channels(walk: str, channels: int, score: int) -> int:
    """fp32 numbers per head of the state of one row or chunk."""
    return [*SCORES.values()][score].state_channels(walk, channels)


def _states(count: int, elements: int, device: torch.device) -> Tensor:
    """Room for `count` states of so many float32 `elements`, in whole vectors of 16 bytes."""
    return torch.empty(-(-count * elements // 4) * 4, dtype=torch.float32, device=device)
