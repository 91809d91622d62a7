"""A network of convolutions whose weights are functions of distances, written with PyG alone."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from pyg_dfgnn.errors import check_choice, check_range
from pyg_dfgnn.models.parts import POOLS, check_sizes, pool


class ShiftedSoftplus(nn.Module):
    """The function `log(1 + exp(x)) - log 2`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of each number of `x`."""
        return F.softplus(x) - math.log(2.0)


class ContinuousFilterConv(MessagePassing):
    """The convolution `y_i = W2 act(W1 sum_j (W0 x_j) * filter(d_ij))`, whose filter is a network of two layers.

    Args:
        channels: Width of `x`.
        basis: Number of functions of a distance that the filter takes.

    Source: Schuett et al., SchNet: A continuous-filter convolutional neural network, NeurIPS 2017, section 4.2.
    """

    def __init__(self, channels: int, basis: int) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(channels, channels, bias=False)
        self.filter = nn.Sequential(nn.Linear(basis, channels), ShiftedSoftplus(), nn.Linear(channels, channels))
        self.out = nn.Sequential(nn.Linear(channels, channels), ShiftedSoftplus(), nn.Linear(channels, channels))

    def forward(self, x: Tensor, edge_index: Tensor, expanded: Tensor, cut: Tensor) -> Tensor:
        """Return `[N, C]` of `x [N, C]`, functions of the distances `expanded [E, basis]`, and `cut [E, 1]`."""
        weight = self.filter(expanded) * cut
        return self.out(self.propagate(edge_index, x=self.lin(x), weight=weight))

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        """Return the messages `[E, C]`."""
        return x_j * weight


class ContinuousFilterNet(nn.Module):
    """Residual continuous-filter convolutions on edges that carry a distance, and a sum or mean over the nodes.

    Args:
        in_channels: Node features F, such as one per element.
        out_channels: Outputs.
        convs: Not read: the convolution is the model's own, which `accelerate` compiles.
        edge_channels: Edge features, 1: the distance.
        hidden_channels: Width of each layer.
        layers: Number of convolutions.
        basis: Number of Gaussians that a distance is expanded in.
        cutoff: Distance at which messages vanish.
        readout: "mean" or "add": how outputs of nodes make that of a graph.

    Attributes:
        edge_channels: Edge features, which :meth:`forward` needs as `edge_attr [E, 1]`.

    Raises:
        ValueError: A size, `cutoff` or `readout` is out of range, or `edge_channels` is not 1.

    Source: Schuett et al., SchNet: A continuous-filter convolutional neural network, NeurIPS 2017.
    """

    centres: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        convs: Any = None,
        *,
        edge_channels: int = 1,
        hidden_channels: int = 128,
        layers: int = 4,
        basis: int = 50,
        cutoff: float = 5.0,
        readout: str = "mean",
    ) -> None:
        super().__init__()
        check_sizes(hidden_channels=hidden_channels, layers=layers, basis=basis)
        check_range("cutoff", cutoff, 1e-3)
        check_choice("readout", readout, tuple(POOLS))
        if edge_channels != 1:
            raise ValueError(f"'edge_channels' needs 1, the distance (got {edge_channels})")
        self.edge_channels, self.cutoff, self.readout = edge_channels, cutoff, readout
        self.lin_in = nn.Linear(in_channels, hidden_channels, bias=False)
        self.convs = nn.ModuleList(ContinuousFilterConv(hidden_channels, basis) for _ in range(layers))
        half = -(-hidden_channels // 2)
        self.lin_out = nn.Sequential(nn.Linear(hidden_channels, half), ShiftedSoftplus(), nn.Linear(half, out_channels))
        self.register_buffer("centres", torch.linspace(0.0, cutoff, basis))

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        batch: Tensor | None = None,
        num_graphs: int | None = None,
        nodes: Tensor | None = None,
        *,
        edge_attr: Tensor,
    ) -> Tensor:
        """Return outputs `[N, out_channels]` of `x [N, in_channels]` over edges of length `edge_attr [E, 1]`.

        With `batch [N]`, the graph of each node, return `[num_graphs, out_channels]`; with `nodes [M]`, those of these
        nodes, `[M, out_channels]`.
        """
        width = self.cutoff / max(len(self.centres) - 1, 1)
        expanded = torch.exp(-0.5 * ((edge_attr - self.centres) / width) ** 2)
        cut = 0.5 * (torch.cos(edge_attr * (math.pi / self.cutoff)) + 1.0)
        x = self.lin_in(x)
        for conv in self.convs:
            x = x + conv(x, edge_index, expanded, cut)
        return pool(self.lin_out(x), batch, num_graphs, nodes, self.readout)
