"""The attention-based graph neural network, whose attention is the cosine similarity of features."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from pyg_dfgnn.models.parts import check_rates, check_sizes, find_layer, pool


class AGNN(nn.Module):
    """Propagation by cosine attention between two linear layers.

    Args:
        in_channels: Node features F.
        out_channels: Classes.
        convs: Namespace that holds `AGNNConv` and `Linear`.
        hidden_channels: Width of the propagated features.
        layers: Number of propagations; the first has a fixed temperature, the others learn theirs.
        dropout: Dropout rate before both linear layers.

    Raises:
        ValueError: A size or rate is out of range, or `convs` lacks a layer.

    Source: Thekumparampil et al., Attention-based Graph Neural Network for Semi-supervised Learning, 2018.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        convs: Any,
        *,
        hidden_channels: int = 16,
        layers: int = 2,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        check_sizes(hidden_channels=hidden_channels, layers=layers)
        check_rates(dropout=dropout)
        self.dropout = dropout
        conv, linear = find_layer(convs, "AGNNConv"), find_layer(convs, "Linear")
        self.lin_in = linear(in_channels, hidden_channels)
        self.convs = nn.ModuleList(conv(requires_grad=index > 0) for index in range(layers))
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
        x = self.lin_in(F.dropout(x, self.dropout, self.training)).relu()
        for conv in self.convs:
            x = conv(x, edge_index)
        x = pool(x, batch, num_graphs, nodes)
        return self.lin_out(F.dropout(x, self.dropout, self.training))
