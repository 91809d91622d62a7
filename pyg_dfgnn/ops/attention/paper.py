"""The launches of the schedules `smmf` and `pmf` and of the ablations of `smmf`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dfgnn.dispatch.attention.paper import PaperPass
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.chunks import positions, rows_of
from pyg_dfgnn.runtime.compiler import Spec
from pyg_dfgnn.runtime.launcher import Argument, addresses, kernel_of, launch


def source_stem(walk: str, chosen: PaperPass) -> str:
    """Stem of the kernel source of a pass; its main entry is called the same."""
    if walk == "sources":
        return "paper_sources"
    return f"{'smmf' if chosen.one_kernel else 'pmf'}_{walk}"


class PaperWalk:
    """The kernels of one pass, with the arguments that all its calls share.

    A :class:`~pyg_dfgnn.ops.attention.launch.Walk`, which says what the arguments are. The pass over targets leaves the
    weights after dropout and the gradients of the scores, float32 [2, E, H] in the order of the CSR, for the pass over
    sources, which is the same for both schedules.
    """

    parameter_blocks = 0
    finds_norms: str | None = None

    def __init__(self, walk: str, chosen: PaperPass, graph: Graph) -> None:
        self.chosen = chosen
        self.device = graph.device
        self.num_edges = graph.num_edges
        constants = chosen.constants
        warps = constants["WARPS"]
        self.threads = (32 * warps, 1, 1)
        self.heads = constants["HEADS"]
        self.head_groups = -(-self.heads // (constants["HEAD_SLOTS"] * constants["LANE_HEADS"]))
        stem = source_stem(walk, chosen)
        spec = Spec(f"attention/{stem}.cu", tuple(constants.items()))
        self.kernel = kernel_of(spec, f"attention_{stem}")
        side = graph.csc if walk == "sources" else graph.csr
        sizes = (side.num_rows,) if walk == "forward" else (side.num_rows, self.num_edges)
        # Kept for their addresses: two threads may make an array of the graph at once, of which it keeps one.
        self.arrays: tuple[Tensor, ...]
        if walk == "sources":
            self.arrays = (side.rowptr, side.col, positions(graph, side, graph.csr))
        else:
            self.arrays = (side.rowptr, rows_of(graph, side), side.col, side.perm)
            if not chosen.one_kernel:
                self.score_kernel = kernel_of(spec, f"attention_{stem}_scores")
                self.score_edges = addresses((*self.arrays[1:], self.num_edges, chosen.warp_edges))
                self.score_grid = (-(-self.num_edges // (chosen.warp_edges * warps)), self.head_groups, 1)
        self.edges = addresses((*self.arrays, *sizes))
        block_rows = constants.get("BLOCK_ROWS", warps // constants["ROW_WARPS"])
        self.grid = (-(-side.num_rows // block_rows), self.head_groups, 1)

    def forward(self, ready: Sequence[Any], out: Tensor, softmax: Tensor | None, exact: Tensor | None) -> None:
        """Write the results of the forward pass."""
        if self.chosen.one_kernel:
            self._launch((*ready, out, softmax, exact))
            return
        scores = torch.empty((self.num_edges, self.heads), dtype=torch.float32, device=self.device)
        self._launch_scores((*ready, scores))
        self._launch((*ready, scores, out, softmax, exact))

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
    ) -> Tensor:
        """Write the results of the pass over targets; returns the state of the edges, [2, E, H]."""
        state = torch.empty((2, self.num_edges, self.heads), dtype=torch.float32, device=self.device)
        if not self.chosen.one_kernel:
            self._launch_scores((*ready, grad_out, state))
        self._launch((*ready, out, softmax, grad_out, records, grad_target, grad_beta, grad_edge, state))
        return state

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
        """Write the results of the pass over sources from the state of the edges."""
        self._launch((*ready, state, grad_out, grad_key, grad_value, grad_source, grad_target))

    def _launch(self, arguments: Sequence[Argument]) -> None:
        shared_bytes = self.chosen.shared_bytes
        launch(self.kernel, self.grid, self.threads, self.edges + addresses(arguments), self.device, shared_bytes)

    def _launch_scores(self, arguments: Sequence[Argument]) -> None:
        inputs = self.score_edges + addresses(arguments)
        launch(self.score_kernel, self.score_grid, self.threads, inputs, self.device)
