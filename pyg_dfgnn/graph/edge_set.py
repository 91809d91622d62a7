"""Edge sets, which name a graph without building it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

GraphKey = tuple[Any, ...]
"""The anchors of a graph, then its sizes: what :meth:`pyg_dfgnn.graph.Graph.resolve` takes.

========================= ============================================================
anchors                   sizes
========================= ============================================================
`edge_index`              `num_src`, `num_dst`, `self_loops`, `transposed`
`edge_index`, `edge_type` `num_src`, `num_dst`, `self_loops`, `transposed`, `num_relations`
`index`                   `num_groups`
`ptr`                     none
========================= ============================================================
"""


class EdgeSet(NamedTuple):
    """Edges that name a graph without building it: the flat arguments of :meth:`pyg_dfgnn.graph.Graph.resolve`.

    Attributes:
        edge_index: int64 or int32 [2, E].
        num_src: Number of sources.
        num_dst: Number of targets.
        self_loops: Whether self-loops are replaced as PyG's GATConv does.
        transposed: Whether row 0 holds the targets.
        by_torch: Whether operators of torch run what reads the edges. Values of edges are then in the order of
            :meth:`ends`.
    """

    edge_index: Tensor
    num_src: int
    num_dst: int
    self_loops: bool = False
    transposed: bool = False
    by_torch: bool = False

    @property
    def key(self) -> GraphKey:
        """The fields that name the graph, as a plain tuple."""
        return tuple(self)[:5]

    def ends(self) -> Tensor:
        """Return sources and targets, int64 [2, E]; with new self-loops [2, E + min(num_src, num_dst)], these last.

        The host waits for no device: own self-loops stay, and point to one extra target, `num_dst`.
        """
        ends = (self.edge_index.flip(0) if self.transposed else self.edge_index).long()
        if not self.self_loops:
            return ends
        source, target = ends.unbind(0)
        loops = torch.arange(min(self.num_src, self.num_dst), device=ends.device)
        # An id out of range stays one.
        target = torch.where(source == target, self.num_dst, target + (target >= self.num_dst))
        return torch.cat([torch.stack([source, target]), loops.expand(2, -1)], dim=1)
