"""Stacks of the layers that aggregate messages without attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyg_dfgnn.errors import check_bool, check_choice, check_integer
from pyg_dfgnn.models.parts import NORMS, check_rates, check_sizes, find_layer, pool

MakeLayer = Callable[[int, int], nn.Module]
"""A function of the widths of input and output that makes a layer."""


class ConvStack(nn.Module):
    """Convolutions of one kind with normalisation, ReLU and dropout between them; subclasses name the kind.

    Args:
        in_channels: Node features F.
        out_channels: Classes.
        make: Makes one convolution.
        linear: Class of a linear layer.
        hidden_channels: Width of every layer but the last.
        layers: Number of convolutions.
        dropout: Dropout rate between the convolutions.
        norm: Normalisation before each ReLU: "batch", "layer" or None.
        readout: Let a linear layer make the logits; all convolutions are then hidden layers. Where logits of some nodes
            are asked for, no tensor of all nodes is as wide as there are classes.

    Raises:
        ValueError: `norm` is unknown, or a size or rate is out of range.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        make: MakeLayer,
        linear: Any,
        *,
        hidden_channels: int = 64,
        layers: int = 2,
        dropout: float = 0.5,
        norm: str | None = None,
        readout: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(hidden_channels=hidden_channels, layers=layers)
        check_rates(dropout=dropout)
        check_bool("readout", readout)
        if norm is not None:
            check_choice("norm", norm, tuple(NORMS))
        self.dropout = dropout
        widths = [in_channels, *[hidden_channels] * layers]
        if not readout:
            widths[-1] = out_channels
        self.convs = nn.ModuleList(make(*pair) for pair in zip(widths, widths[1:]))
        hidden = layers if readout else layers - 1
        self.norms = nn.ModuleList(NORMS[norm](hidden_channels) for _ in range(hidden) if norm is not None)
        self.lin_out = linear(hidden_channels, out_channels) if readout else None

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        batch: Tensor | None = None,
        num_graphs: int | None = None,
        nodes: Tensor | None = None,
        edge_type: Tensor | None = None,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """Return logits `[N, out_channels]` of `x [N, in_channels]` over `edge_index [2, E]` or a `Graph`.

        With `batch [N]`, the graph of each node, return logits `[num_graphs, out_channels]` of means over the nodes;
        with `nodes [M]`, those of these nodes, `[M, out_channels]`. Convolutions of relations need `edge_type [E]`,
        those of edge features `edge_attr [E, edge_channels]`.
        """
        of_edges = [tensor for tensor in (edge_type, edge_attr) if tensor is not None]
        for index, conv in enumerate(self.convs):
            x = conv(x, edge_index, *of_edges)
            if index < len(self.convs) - 1 or self.lin_out is not None:
                x = (self.norms[index](x) if self.norms else x).relu()
                x = F.dropout(x, self.dropout, self.training)
        x = pool(x, batch, num_graphs, nodes)
        return x if self.lin_out is None else self.lin_out(x)


class GCN(ConvStack):
    """The graph convolutional network.

    Args:
        in_channels: Node features F.
        out_channels: Classes.
        convs: Namespace that holds `GCNConv` and `Linear`.
        bias: Learn a bias in each convolution.
        **options: Of :class:`ConvStack`.

    Source: Kipf and Welling, Semi-Supervised Classification with Graph Convolutional Networks, ICLR 2017.
    """

    def __init__(self, in_channels: int, out_channels: int, convs: Any, *, bias: bool = True, **options: Any) -> None:
        check_bool("bias", bias)
        make = partial(find_layer(convs, "GCNConv"), bias=bias)
        super().__init__(in_channels, out_channels, make, find_layer(convs, "Linear"), **options)


class SAGE(ConvStack):
    """GraphSAGE.

    Args:
        in_channels: Node features F.
        out_channels: Classes.
        convs: Namespace that holds `SAGEConv` and `Linear`.
        aggr: Aggregation of the neighbours, such as "mean" or "max", or a list of several.
        **options: Of :class:`ConvStack`.

    Source: Hamilton et al., Inductive Representation Learning on Large Graphs, NeurIPS 2017.
    """

    def __init__(
        self, in_channels: int, out_channels: int, convs: Any, *, aggr: str | Sequence[str] = "mean", **options: Any
    ) -> None:
        make = partial(find_layer(convs, "SAGEConv"), aggr=aggr if isinstance(aggr, str) else list(aggr))
        super().__init__(in_channels, out_channels, make, find_layer(convs, "Linear"), **options)


class GIN(ConvStack):
    """The graph isomorphism network: sums of neighbours go through two linear layers.

    Args:
        in_channels: Node features F.
        out_channels: Classes.
        convs: Namespace that holds `GINConv` and `Linear`.
        train_eps: Learn the weight of a node's own features.
        **options: Of :class:`ConvStack`.

    Source: Xu et al., How Powerful are Graph Neural Networks?, ICLR 2019.
    """

    def __init__(
        self, in_channels: int, out_channels: int, convs: Any, *, train_eps: bool = False, **options: Any
    ) -> None:
        check_bool("train_eps", train_eps)
        make = _of_two_linear(convs, "GINConv", train_eps=train_eps)
        super().__init__(in_channels, out_channels, make, find_layer(convs, "Linear"), **options)


class GINE(ConvStack):
    """The graph isomorphism network with edge features, which each layer maps to its width and adds to its messages.

    Args:
        in_channels: Node features F.
        out_channels: Classes.
        convs: Namespace that holds `GINEConv` and `Linear`.
        edge_channels: Edge features D.
        train_eps: Learn the weight of a node's own features.
        **options: Of :class:`ConvStack`.

    Attributes:
        edge_channels: Edge features, which :meth:`forward` needs as `edge_attr [E, D]`.

    Source: Hu et al., Strategies for Pre-training Graph Neural Networks, ICLR 2020.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        convs: Any,
        *,
        edge_channels: int = 1,
        train_eps: bool = False,
        **options: Any,
    ) -> None:
        check_integer("edge_channels", edge_channels, 1)
        check_bool("train_eps", train_eps)
        make = _of_two_linear(convs, "GINEConv", train_eps=train_eps, edge_dim=edge_channels)
        super().__init__(in_channels, out_channels, make, find_layer(convs, "Linear"), **options)
        self.edge_channels = edge_channels


def _of_two_linear(convs: Any, name: str, **options: Any) -> MakeLayer:
    """Return what makes a convolution whose sums go through two linear layers."""
    conv, linear = find_layer(convs, name), find_layer(convs, "Linear")

    def make(width: int, out: int) -> nn.Module:
        layers = nn.Sequential(linear(width, out), nn.BatchNorm1d(out), nn.ReLU(), linear(out, out))
        return conv(layers, **options)  # type: ignore[no-any-return]

    return make


class ResGatedGCN(ConvStack):
    """The residual gated graph network: sums of neighbours behind gates that both ends of an edge open.

    Args:
        in_channels: Node features F.
        out_channels: Classes.
        convs: Namespace that holds `ResGatedGraphConv` and `Linear`.
        **options: Of :class:`ConvStack`.

    Source: Bresson and Laurent, Residual Gated Graph ConvNets, 2017.
    """

    def __init__(self, in_channels: int, out_channels: int, convs: Any, **options: Any) -> None:
        super().__init__(
            in_channels, out_channels, find_layer(convs, "ResGatedGraphConv"), find_layer(convs, "Linear"), **options
        )


class PNA(ConvStack):
    """Principal neighbourhood aggregation: several statistics of the neighbours, each scaled by the degree.

    Args:
        in_channels: Node features F.
        out_channels: Classes.
        convs: Namespace that holds `PNAConv` and `Linear`.
        degrees: Number of nodes of each in-degree in the training graphs, `[D + 1]`, of which the scalers take means,
            which a state dict holds; None: as if every node had one edge, for a model that loads a state.
        aggregators: Statistics.
        scalers: Functions of the degree.
        **options: Of :class:`ConvStack`.

    Source: Corso et al., Principal Neighbourhood Aggregation for Graph Nets, NeurIPS 2020.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        convs: Any,
        *,
        degrees: Tensor | None = None,
        aggregators: Sequence[str] = ("mean", "min", "max", "std"),
        scalers: Sequence[str] = ("identity", "amplification", "attenuation"),
        **options: Any,
    ) -> None:
        degrees = torch.tensor([0, 1], device="cpu") if degrees is None else degrees
        names = {"aggregators": list(aggregators), "scalers": list(scalers)}
        make = partial(find_layer(convs, "PNAConv"), deg=degrees, **names)
        super().__init__(in_channels, out_channels, make, find_layer(convs, "Linear"), **options)
