"""From nodes to graphs."""

from __future__ import annotations

from torch import Tensor
from torch_geometric.nn import global_mean_pool


def mean_pool(x: Tensor, batch: Tensor | None, num_graphs: int | None) -> Tensor:
    """Mean of `x [N, C]` over the nodes of each graph, `[G, C]`; `x` itself without `batch`.

    Args:
        x: Node features.
        batch: Graph of each node `[N]`, ascending; None for a model of nodes.
        num_graphs: G; a graph without nodes gives zeros.
    """
    return x if batch is None else global_mean_pool(x, batch, num_graphs)
