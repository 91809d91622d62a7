"""Common parts of models: where layers come from, checks of sizes, norms, and the mean over the nodes of a graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import global_add_pool, global_mean_pool

from pyg_dfgnn.errors import check_integer, check_range

NORMS = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
"""Normalisation between layers, by name."""
POOLS = {"mean": global_mean_pool, "add": global_add_pool}
"""Functions that pool the outputs of the nodes of a graph into one, by name."""


def find_layer(convs: Any, name: str) -> Any:
    """Return the convolution or linear layer of this name.

    Args:
        convs: Namespace of layers, such as `torch_geometric.nn`.
        name: Class name, such as "GATConv".

    Raises:
        ValueError: The namespace lacks the layer.
    """
    if not hasattr(convs, name):
        namespace = getattr(convs, "__name__", convs)
        raise ValueError(f"'convs' needs a namespace with {name}, as torch_geometric.nn has (got {namespace})")
    return getattr(convs, name)


def check_sizes(**sizes: int) -> None:
    """Check that sizes are at least 1 and that `heads`, where given, divides `hidden_channels`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1, or `heads` does not divide `hidden_channels`.
    """
    for name, size in sizes.items():
        check_integer(name, size, 1)
    if sizes["hidden_channels"] % sizes.get("heads", 1):
        need = f"a multiple of heads={sizes['heads']}"
        raise ValueError(f"'hidden_channels' needs {need} (got {sizes['hidden_channels']})")


def check_rates(**rates: float) -> None:
    """Check that dropout rates are in [0, 1].

    Raises:
        TypeError: A rate is not a number.
        ValueError: A rate is out of range.
    """
    for name, rate in rates.items():
        check_range(name, rate, 0.0, 1.0)


def pool(
    x: Tensor, batch: Tensor | None, num_graphs: int | None, nodes: Tensor | None = None, readout: str = "mean"
) -> Tensor:
    """Return the rows of `x [N, C]` that logits are made of: of all nodes, of some, or the means or sums of graphs.

    Args:
        x: Node features.
        batch: Graph of each node `[N]`, ascending; None for a model of nodes.
        num_graphs: G; a graph without nodes gives zeros.
        nodes: Nodes `[M]` whose logits are wanted, where `batch` is None; None: all.
        readout: Of graphs, one of :data:`POOLS`.
    """
    if batch is not None:
        return POOLS[readout](x, batch, num_graphs)
    return x if nodes is None else x.index_select(0, nodes)
