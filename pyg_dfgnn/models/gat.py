"""Graph attention networks."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from pyg_dfgnn.errors import check_bool, check_choice, check_integer
from pyg_dfgnn.models.parts import NORMS, check_rates, find_layer, pool


class GAT(nn.Module):
    """A stack of graph attention layers with dropout before each layer and ELU between them.

    Args:
        in_channels: Node features F.
        out_channels: Classes.
        convs: Namespace that holds the convolution.
        hidden_channels: Width of each head.
        heads: Heads of every layer but the last, concatenated.
        out_heads: Heads of the last layer, averaged.
        layers: Number of convolutions.
        dropout: Dropout rate of the features and of the attention weights.
        residual: Add each layer's (projected) input to its output.
        norm: Normalisation before each ELU: "batch", "layer" or None.
        readout: Let a linear layer behind the last convolution, which is then `hidden_channels` wide, make the logits.
            Where logits of some nodes are asked for, no tensor of all nodes is as wide as there are classes.
        bias: Learn a bias in each convolution.
        checkpoint: Keep only the input of each layer for backward, which then runs the layer once more.

    Raises:
        ValueError: `norm` is unknown, a size or rate is out of range, `convs` lacks the convolution, or layers that run
            twice would count each batch twice in their statistics.

    Source: Velickovic et al., Graph Attention Networks, ICLR 2018; the defaults are its setting for Cora.
    """

    conv = "GATConv"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        convs: Any,
        *,
        hidden_channels: int = 8,
        heads: int = 8,
        out_heads: int = 1,
        layers: int = 2,
        dropout: float = 0.6,
        residual: bool = False,
        norm: str | None = None,
        readout: bool = False,
        bias: bool = True,
        checkpoint: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"hidden_channels": hidden_channels, "heads": heads, "out_heads": out_heads, "layers": layers}
        for name, size in sizes.items():
            check_integer(name, size, 1)
        check_rates(dropout=dropout)
        for name, flag in {"residual": residual, "readout": readout, "bias": bias, "checkpoint": checkpoint}.items():
            check_bool(name, flag)
        if checkpoint and norm == "batch":
            raise ValueError(
                "'checkpoint' needs False with batch normalisation, which would count a batch twice (got True)"
            )
        if norm is not None:
            check_choice("norm", norm, tuple(NORMS))
        self.dropout, self.checkpoint = dropout, checkpoint
        conv = find_layer(convs, self.conv)
        options = {"dropout": dropout, "residual": residual, "bias": bias}
        self.convs = nn.ModuleList()
        for _ in range(layers - 1):
            self.convs.append(conv(in_channels, hidden_channels, heads, **options))
            in_channels = hidden_channels * heads
        self.norms = nn.ModuleList(NORMS[norm](in_channels) for _ in range(layers - 1) if norm is not None)
        width = hidden_channels if readout else out_channels
        self.convs.append(conv(in_channels, width, out_heads, concat=False, **options))
        self.lin_out = find_layer(convs, "Linear")(width, out_channels) if readout else None

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
        for index in range(len(self.convs)):
            if self.checkpoint and self.training:
                keeps_rng = self.dropout > 0.0
                x = recomputed(self._layer, index, x, edge_index, use_reentrant=False, preserve_rng_state=keeps_rng)
            else:
                x = self._layer(index, x, edge_index)
        x = pool(x, batch, num_graphs, nodes)
        return x if self.lin_out is None else self.lin_out(x)

    def _layer(self, index: int, x: Tensor, edge_index: Tensor) -> Tensor:
        if index:
            x = F.elu(self.norms[index - 1](x) if self.norms else x)
        out: Tensor = self.convs[index](F.dropout(x, self.dropout, self.training), edge_index)
        return out


class GATv2(GAT):
    """:class:`GAT` with the attention that ranks neighbours differently for each target.

    Source: Brody et al., How Attentive are Graph Attention Networks?, ICLR 2022.
    """

    conv = "GATv2Conv"
