"""Edge sets, which name a graph without building it."""

from typing import Any, NamedTuple

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
    """

    edge_index: Tensor
    num_src: int
    num_dst: int
    self_loops: bool = False
    transposed: bool = False

    @property
    def key(self) -> GraphKey:
        """The five fields as a plain tuple."""
        return tuple(self)
