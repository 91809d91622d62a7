"""The graph transformer with Laplacian positional encodings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyg_dfgnn.errors import check_choice, check_integer, check_shape
from pyg_dfgnn.models.parts import NORMS, check_rates, check_sizes, find_layer, pool


class GraphTransformer(nn.Module):
    """Transformer blocks whose attention runs over the edges of the graph.

    `h = norm(h + O(attention(h)))`, `h = norm(h + FFN(h))`, first `h = embed(x) + project(pe)`.

    Args:
        in_channels: Node features F.
        out_channels: Classes.
        convs: Namespace that holds `TransformerConv` and `Linear`.
        hidden_channels: Width of the blocks, a multiple of `heads`.
        heads: Attention heads.
        layers: Number of blocks.
        pe_size: Size of the positional encoding; 0 for none.
        norm: "batch" or "layer".
        dropout: Dropout rate after attention and inside the feed-forward part.
        attention_dropout: Dropout rate of the attention weights.

    Raises:
        ValueError: `norm` is unknown, a size or rate is out of range, `heads` does not divide `hidden_channels`, or
            `convs` lacks a layer.

    Source: Dwivedi and Bresson, A Generalization of Transformer Networks to Graphs, 2021.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        convs: Any,
        *,
        hidden_channels: int = 80,
        heads: int = 8,
        layers: int = 10,
        pe_size: int = 2,
        norm: str = "batch",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_choice("norm", norm, tuple(NORMS))
        check_sizes(hidden_channels=hidden_channels, heads=heads, layers=layers)
        check_integer("pe_size", pe_size, 0)
        check_rates(dropout=dropout, attention_dropout=attention_dropout)
        self.pe_size = pe_size
        conv, linear = find_layer(convs, "TransformerConv"), find_layer(convs, "Linear")
        self.embed = linear(in_channels, hidden_channels)
        self.embed_pe = linear(pe_size, hidden_channels) if pe_size else None
        self.blocks = nn.ModuleList(
            _Block(conv, linear, hidden_channels, heads, NORMS[norm], dropout, attention_dropout) for _ in range(layers)
        )
        self.readout = nn.Sequential(
            linear(hidden_channels, hidden_channels // 2),
            nn.ReLU(),
            linear(hidden_channels // 2, hidden_channels // 4),
            nn.ReLU(),
            linear(hidden_channels // 4, out_channels),
        )

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        pe: Tensor | None = None,
        batch: Tensor | None = None,
        num_graphs: int | None = None,
        nodes: Tensor | None = None,
    ) -> Tensor:
        """Return logits `[N, out_channels]` of `x [N, in_channels]` over `edge_index [2, E]` with `pe [N, pe_size]`.

        With `batch [N]`, the graph of each node, return logits `[num_graphs, out_channels]` of means over the nodes;
        with `nodes [M]`, those of these nodes, `[M, out_channels]`.

        Raises:
            ValueError: `pe` is missing or has another shape.
        """
        h = self.embed(x)
        if self.embed_pe is not None:
            if pe is None:
                raise ValueError(f"'pe' needs shape [N, pe_size={self.pe_size}] (got None)")
            check_shape("pe", pe, ("N", self.pe_size), f"[N, pe_size={self.pe_size}]")
            if self.training:
                # An eigenvector is defined up to its sign.
                pe = pe * (2 * torch.randint(2, (self.pe_size,), device=pe.device, dtype=pe.dtype) - 1)
            h = h + self.embed_pe(pe)
        for block in self.blocks:
            h = block(h, edge_index)
        return self.readout(pool(h, batch, num_graphs, nodes))


class _Block(nn.Module):
    def __init__(
        self, conv: Any, linear: Any, channels: int, heads: int, norm: Any, dropout: float, attention_dropout: float
    ) -> None:
        super().__init__()
        self.conv = conv(channels, channels // heads, heads, dropout=attention_dropout, bias=False, root_weight=False)
        self.project = linear(channels, channels)
        self.dropout = nn.Dropout(dropout)
        self.norm_attention = norm(channels)
        self.feed_forward = nn.Sequential(
            linear(channels, 2 * channels), nn.ReLU(), nn.Dropout(dropout), linear(2 * channels, channels)
        )
        self.norm_feed_forward = norm(channels)

    def forward(self, h: Tensor, edge_index: Tensor) -> Tensor:
        h = self.norm_attention(h + self.project(self.dropout(self.conv(h, edge_index))))
        return self.norm_feed_forward(h + self.feed_forward(h))
