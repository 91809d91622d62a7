"""The launches of a pass of the traversal: one kernel per sweep over the edges, one that merges heavy rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.traversal import items_per_block
from pyg_dfgnn.graph import Adjacency, Chunks, Graph
from pyg_dfgnn.graph.chunks import ascending, column_blocks, heavy_rows, row_order
from pyg_dfgnn.graph.derived import Derived
from pyg_dfgnn.ops.prepared import PreparedPass
from pyg_dfgnn.runtime.launcher import Argument, addresses, kernel_of, launch
from pyg_dfgnn.statements.spec import Spec


class TraversalLaunch(PreparedPass):
    """One pass over one side of a graph: a kernel for each sweep over the edges, and one that merges heavy rows.

    Made for an unmeasured graph it runs on every one: a sweep over whole rows, whose arrays come with the call.

    Args:
        plan: How it runs.
        direction: A direction; the pass over sources takes the rows of the CSC, all others those of the CSR.
        graph: The edges, or what else keeps what is derived from `side`.
        spec: The module.
        entry: Its kernel; the one that merges is called the same with "_merge" behind it.
        state_elements: Numbers, in float32, of the state of a row or chunk; 0 for a pass without states.
        count: How many arguments of the statement's pass the kernel takes.
        merged: Places of those that the merge kernel takes between its two states.
        more: Places of arguments that the kernel takes after these; None for one that is not there.
        side: The rows of other domains that are taken instead of the CSR or the CSC.
    """

    def __init__(
        self,
        plan: Any,
        direction: str,
        graph: Derived,
        spec: Spec,
        entry: str,
        state_elements: int,
        count: int,
        merged: tuple[int, ...],
        more: tuple[int | None, ...] = (),
        side: Adjacency | None = None,
    ) -> None:
        self.plan, self.direction = plan, direction
        is_bound = not isinstance(graph, Graph) or graph.is_measured
        if side is None:
            assert isinstance(graph, Graph)
            side = graph.side(direction)
        self.device, self.num_rows, self.side = graph.device, side.num_rows, None if is_bound else direction
        constants = plan.constants
        self.kernel, self.merge = kernel_of(spec, entry), kernel_of(spec, f"{entry}_merge")
        self.state_elements = state_elements
        self.items_per_block = items_per_block(constants)
        self.head_groups = -(-constants["HEADS"] // (constants["HEAD_SLOTS"] * constants["LANE_HEADS"]))
        self.threads = (32 * constants["WARPS"], 1, 1)
        # Kept for their addresses: two threads may make a list of the graph at once, of which it keeps one.
        self.arrays: list[Tensor | None] = []
        self.chunks: Sequence[Chunks | None] = ()
        self.max_chunks = self.shared_bytes = 0
        if is_bound:
            self._lay_out(graph, side)
        # States that go from launch to launch: of chunks to their merge, of rows to the next column block.
        self.num_partial = self.max_chunks if state_elements and not constants["JOINED"] else 0
        self.num_carried = self.num_rows if state_elements and len(self.chunks) > 1 else 0
        self.nothing = 0 if self.device.type == "cuda" else None
        # What an unmeasured graph has none of: lists of chunks, an order of rows, ranges of nodes.
        self._no_lists = (self.nothing,) * 6
        self._count, self._merged, self._more = count, merged, more
        self._no_states = (self.nothing,) * 2 if state_elements else ()

    def _lay_out(self, graph: Derived, side: Adjacency) -> None:
        """Prepare the launches: which thread block works on what."""
        plan, constants = self.plan, self.plan.constants
        ordered, joined = bool(constants["ORDERED"]), bool(constants["JOINED"])
        if plan.blocks == 1:
            self.chunks = [heavy_rows(graph, side, plan.max_edges, self.items_per_block if joined else 0, ordered)]
            arrays = (side.rowptr, *(ascending(graph, side) if plan.ascending else (side.col, side.perm)))
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
        lists = (*arrays, *listed, row_order, node_ptr)
        self.arrays += lists
        return addresses((*lists, *sizes, block, len(self.chunks)))

    def num_blocks(self, graph: Any) -> int:
        """Return the thread blocks of one sweep."""
        if self.side is None:
            return self.grid[0]
        return -(-graph.side(self.side).num_rows // self.items_per_block)

    def __call__(self, graph: Any, arguments: Sequence[Any], carry: Any = None) -> None:
        """Sweep all column blocks; heavy rows are merged after each."""
        device, nothing = self.device, self.nothing
        taken = arguments[: self._count]
        if self._more:
            taken = [*taken, *[nothing if place is None else arguments[place] for place in self._more]]
        if self.side is not None:
            rows = graph.side(self.side)
            grid = (-(-rows.num_rows // self.items_per_block), self.head_groups, 1)
            whole = (*rows.addresses, *self._no_lists, rows.num_rows, 0, self.plan.max_edges, 0, 1, *taken)
            launch(self.kernel, grid, self.threads, (*whole, *self._no_states), graph.device)
            return
        if not self.num_partial and not self.num_carried:
            whole = (*self.sweeps[0], *taken, *self._no_states)
            launch(self.kernel, self.grid, self.threads, whole, device, self.shared_bytes)
            return
        partial = _states(self.num_partial, self.state_elements, device) if self.num_partial else None
        carry = _states(self.num_carried, self.state_elements, device) if self.num_carried else None
        states = [
            nothing if state is None else state.data_ptr() if state.is_cuda else state for state in (partial, carry)
        ]
        for block, (sweep, chunks) in enumerate(zip(self.sweeps, self.chunks, strict=True)):
            launch(self.kernel, self.grid, self.threads, (*sweep, *taken, *states), device, self.shared_bytes)
            if chunks is not None and self.num_partial:
                grid = (-(-chunks.num_heavy // self.items_per_block), self.head_groups, 1)
                sizes = (chunks.num_heavy, chunks.num_chunks, self.num_rows, block, len(self.chunks))
                heavy = addresses((chunks.heavy_row, chunks.heavy_ptr, *sizes))
                merged = (arguments[place] for place in self._merged)
                launch(self.merge, grid, self.threads, (*heavy, states[0], *merged, states[1]), device)


class NodeKernel:
    """A kernel that reads the rows [H, C] of nodes and no edges."""

    def __init__(self, spec: Spec, entry: str) -> None:
        constants = dict(spec.constants)
        self.kernel = kernel_of(spec, entry)
        self.rows_per_block = items_per_block(constants)
        self.head_groups = -(-constants["HEADS"] // (constants["HEAD_SLOTS"] * constants["LANE_HEADS"]))
        self.threads = (32 * constants["WARPS"], 1, 1)

    def launch(self, num_rows: int, device: torch.device, arguments: Sequence[Any]) -> None:
        """Launch it on `num_rows` nodes, with the arguments of the kernel after their number, as kernels take them."""
        grid = (-(-num_rows // self.rows_per_block), self.head_groups, 1)
        launch(self.kernel, grid, self.threads, (num_rows, *arguments), device)

    def __call__(self, num_rows: int, device: torch.device, *arguments: Argument) -> None:
        """Launch it on tensors."""
        self.launch(num_rows, device, addresses(arguments))


class NodeLaunch(PreparedPass):
    """A pass over targets that reads no edge.

    Args:
        plan: How the pass would run over edges.
        kernel: Its kernel.
        places: Places of the arguments that the kernel takes.
    """

    def __init__(self, plan: Any, kernel: NodeKernel, places: tuple[int, ...]) -> None:
        self.plan, self.kernel, self.places = plan, kernel, places

    def __call__(self, graph: Graph, arguments: Sequence[Any], carry: Any = None) -> None:
        """Launch the kernel."""
        self.kernel.launch(graph.num_dst, graph.device, [arguments[place] for place in self.places])


def _states(count: int, elements: int, device: torch.device) -> Tensor:
    """Return room for `count` states of so many float32 `elements`, in whole vectors of 16 bytes."""
    return torch.empty(-(-count * elements // 4) * 4, dtype=torch.float32, device=device)
