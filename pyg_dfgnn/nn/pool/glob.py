"""Drop-ins for PyG's global pools: one fused reduction over the nodes of each graph."""

from torch import Tensor
from torch_geometric.nn import pool

from pyg_dfgnn.nn.scripted import scripts
from pyg_dfgnn.nn.segment import scatter


@scripts(pool.global_add_pool)
def global_add_pool(x: Tensor, batch: Tensor | None, size: int | None = None) -> Tensor:
    """PyG's `global_add_pool`: the sum over the nodes of each graph.

    Args:
        x: Node features, shape [N, F].
        batch: Graph of each node, [N]; None for one graph.
        size: Number of graphs B, None for the largest and one.

    Returns:
        Shape [B, F].
    """
    return pool.global_add_pool(x, None, size) if batch is None else _pool("global_add_pool", x, batch, size, "sum")


@scripts(pool.global_mean_pool)
def global_mean_pool(x: Tensor, batch: Tensor | None, size: int | None = None) -> Tensor:
    """PyG's `global_mean_pool`: the mean over the nodes of each graph; see :func:`global_add_pool`."""
    return pool.global_mean_pool(x, None, size) if batch is None else _pool("global_mean_pool", x, batch, size, "mean")


@scripts(pool.global_max_pool)
def global_max_pool(x: Tensor, batch: Tensor | None, size: int | None = None) -> Tensor:
    """PyG's `global_max_pool`: the maximum over the nodes of each graph; see :func:`global_add_pool`."""
    return pool.global_max_pool(x, None, size) if batch is None else _pool("global_max_pool", x, batch, size, "max")


def _pool(name: str, x: Tensor, batch: Tensor, size: int | None, reduction: str) -> Tensor:
    return scatter(x, batch, -1 if x.dim() == 1 else -2, size, reduction, name=name)
