"""The launches of the schedule `block_mma`: one kernel per pass, one thread block per window of rows and group of
heads."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pyg_dfgnn.dispatch.attention.block_mma import TilesPass, tiles_of
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.runtime.compiler import Spec
from pyg_dfgnn.runtime.launcher import Argument, addresses, kernel_of, launch

_STEMS = {
    "forward": "block_mma_forward",
    "targets": "block_mma_backward_targets",
    "sources": "block_mma_backward_sources",
}


class TilesWalk:
    """One pass over the dense blocks of a side: a :class:`~pyg_dfgnn.ops.attention.launch.Walk`."""

    parameter_blocks = 0
    finds_norms: str | None = None

    def __init__(self, walk: str, chosen: TilesPass, graph: Graph) -> None:
        self.chosen = chosen
        self.device = graph.device
        stem = _STEMS[walk]
        self.kernel = kernel_of(Spec(f"attention/{stem}.cu", tuple(chosen.constants.items())), f"attention_{stem}")
        self.tiles = tiles_of(graph, walk, chosen.rows, chosen.compact)
        self.arrays = addresses((self.tiles.windows, self.tiles.columns, self.tiles.bits))
        self.grid = (self.tiles.num_windows, chosen.constants["HEADS"] // chosen.constants["BLOCK_HEADS"], 1)
        self.threads = (32 * chosen.constants["WARPS"], 1, 1)

    def forward(self, ready: Sequence[Any], out: Tensor, softmax: Tensor | None, exact: Tensor | None) -> None:
        """Write the results of the forward pass."""
        self._launch((*ready, out, softmax, exact))

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
        self._launch((*ready, out, softmax, grad_out, records, grad_target, grad_beta))

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
        self._launch((*ready, records, grad_out, grad_key, grad_value, grad_source, grad_target))

    def _launch(self, arguments: Sequence[Argument]) -> None:
        arrays = self.arrays + addresses(arguments)
        launch(self.kernel, self.grid, self.threads, arrays, self.device, self.chosen.shared_bytes)
