"""A stack of the attention layers of a graph transformer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pyg_dfgnn.models.parts import check_sizes, find_layer, pool


class TransformerStack(nn.Module):
    """Attention layers with their projections between two linear layers; timings compare this part of a transformer.

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
        check_sizes(hidden_channels=hidden_channels, heads=heads, layers=layers)
        conv, linear = find_layer(convs, "TransformerConv"), find_layer(convs, "Linear")
        self.lin_in = linear(in_channels, hidden_channels)
        self.convs = nn.ModuleList(
            conv(hidden_channels, hidden_channels // heads, heads, root_weight=False) for _ in range(layers)
        )
        self.lin_out = linear(hidden_channels, out_channels)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        batch: Tensor | None = None,
        num_graphs: int | None = None,
        nodes: Tensor | None = None,
    ) -> Tensor:
        """Return logits `[N, out_channels]` of `x [N, in_channels]` over `edge_index [2, E]`.

        With `batch [N]`, the graph of each node, return logits `[num_graphs, out_channels]` of means over the nodes;
        with `nodes [M]`, those of these nodes, `[M, out_channels]`.
        """
        x = self.lin_in(x)
        for conv in self.convs:
            x = conv(x, edge_index)
        return self.lin_out(pool(x, batch, num_graphs, nodes))
