"""Graph transformer attention and nothing else."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pyg_dfgnn.errors import check_integer
from pyg_dfgnn.models.convs import find_conv
from pyg_dfgnn.models.pool import mean_pool


class TransformerStack(nn.Module):
    """Only attention layers with their projections, the part of a graph transformer that timings compare.

    Args:
        in_channels: Node features F.
        out_channels: Classes.
        convs: Namespace that holds `TransformerConv` and `Linear`.
        hidden_channels: Width of each layer, a multiple of `heads`.
        heads: Attention heads.
        layers: Number of attention layers.

    Raises:
        ValueError: A size is below 1, `heads` does not divide `hidden_channels`, or `convs` lacks a layer.

    Source: Liu et al., DF-GNN: Dynamic Fusion Framework for Attention Graph Neural Networks on GPUs, LoG 2024.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        convs: Any,
        *,
        hidden_channels: int = 128,
        heads: int = 1,
        layers: int = 8,
    ) -> None:
        super().__init__()
        for name, size in {"hidden_channels": hidden_channels, "heads": heads, "layers": layers}.items():
            check_integer(name, size, 1)
        if hidden_channels % heads:
            raise ValueError(f"'hidden_channels' needs a multiple of heads={heads} (got {hidden_channels})")
        conv, linear = find_conv(convs, "TransformerConv"), find_conv(convs, "Linear")
        self.lin_in = linear(in_channels, hidden_channels)
        self.convs = nn.ModuleList(
            conv(hidden_channels, hidden_channels // heads, heads, root_weight=False) for _ in range(layers)
        )
        self.lin_out = linear(hidden_channels, out_channels)

    def forward(
        self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None, num_graphs: int | None = None
    ) -> Tensor:
        """Logits `[N, out_channels]` of `x [N, in_channels]` over `edge_index [2, E]`.

        With `batch [N]`, the graph of each node, logits `[num_graphs, out_channels]` of the means over the nodes.
        """
        x = self.lin_in(x)
        for conv in self.convs:
            x = conv(x, edge_index)
        return self.lin_out(mean_pool(x, batch, num_graphs))
