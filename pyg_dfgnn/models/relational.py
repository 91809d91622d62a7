"""Models of graphs with relations: stacks of convolutions, a decoder of links, and a heterogeneous transformer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyg_dfgnn.errors import check_bool, check_choice, check_integer, check_shape
from pyg_dfgnn.models.conv_stack import ConvStack, MakeLayer
from pyg_dfgnn.models.parts import check_rates, check_sizes, find_layer

Metadata = tuple[Sequence[str], Sequence[tuple[str, str, str]]]
"""Node types and edge types, as `HeteroData.metadata()` returns them."""
_ANY: Metadata = (["node"], [("node", "to", "node")])


class _RelationalStack(ConvStack):
    """A stack of convolutions of relations, on features or on a learnt row per node.

    Args:
        in_channels: Node features F, or the number of nodes N where they have none.
        out_channels: Classes.
        make: Makes one convolution.
        linear: Class of a linear layer.
        embedding: Nodes have no features: learn a row of `hidden_channels` per node in front of the first convolution.
        **options: Of :class:`ConvStack`.
    """

    def __init__(
        self, in_channels: int, out_channels: int, make: MakeLayer, linear: Any, *, embedding: bool, **options: Any
    ) -> None:
        check_bool("embedding", embedding)
        width = options.get("hidden_channels", 64)
        super().__init__(width if embedding else in_channels, out_channels, make, linear, **options)
        self.embedding = nn.Embedding(in_channels, width) if embedding else None
        if self.embedding is not None:
            nn.init.xavier_uniform_(self.embedding.weight)

    def forward(self, x: Tensor | None, edge_index: Any, *arguments: Any, **options: Any) -> Tensor:
        """Return the result of :meth:`ConvStack.forward`; `x` is None where nodes have no features."""
        x = x if self.embedding is None else self.embedding.weight
        return super().forward(x, edge_index, *arguments, **options)  # type: ignore[arg-type]


class RGCN(_RelationalStack):
    """The relational graph convolutional network.

    Args:
        in_channels: Node features F, or the number of nodes N where they have none.
        out_channels: Classes.
        convs: Namespace that holds the convolution and `Linear`.
        num_relations: Number of relations.
        num_bases: Bases of the weights of the relations; None: each has its own weight.
        num_blocks: Blocks on the diagonal of each weight; None: weights are full.
        embedding: Learn a row per node; without it, nodes without features are one-hot inputs.
        conv: "RGCNConv" or "FastRGCNConv".
        **options: Of :class:`ConvStack`.

    Source: Schlichtkrull et al., Modeling Relational Data with Graph Convolutional Networks, ESWC 2018.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        convs: Any,
        *,
        num_relations: int = 1,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        embedding: bool = False,
        conv: str = "RGCNConv",
        **options: Any,
    ) -> None:
        check_choice("conv", conv, ("RGCNConv", "FastRGCNConv"))
        bases = {"num_bases": num_bases, "num_blocks": num_blocks}
        make = partial(find_layer(convs, conv), num_relations=num_relations, **bases)
        super().__init__(in_channels, out_channels, make, find_layer(convs, "Linear"), embedding=embedding, **options)


class RGAT(_RelationalStack):
    """The relational graph attention network; heads are averaged.

    Args:
        in_channels: Node features F, or the number of nodes N where they have none.
        out_channels: Classes.
        convs: Namespace that holds `RGATConv` and `Linear`.
        num_relations: Number of relations.
        num_bases: Bases of the weights of the relations; None: each has its own weight.
        heads: Attention heads.
        attention_mechanism: Where attention sums to 1: "across-relation" or "within-relation".
        embedding: Nodes have no features: learn a row per node.
        **options: Of :class:`ConvStack`.

    Source: Busbridge et al., Relational Graph Attention Networks, 2019.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        convs: Any,
        *,
        num_relations: int = 1,
        num_bases: int | None = None,
        heads: int = 1,
        attention_mechanism: str = "across-relation",
        embedding: bool = False,
        **options: Any,
    ) -> None:
        check_integer("heads", heads, 1)
        shared: dict[str, Any] = {"num_bases": num_bases, "heads": heads, "attention_mechanism": attention_mechanism}
        make = partial(find_layer(convs, "RGATConv"), num_relations=num_relations, concat=False, **shared)
        super().__init__(in_channels, out_channels, make, find_layer(convs, "Linear"), embedding=embedding, **options)


ENCODERS = {"rgcn": RGCN, "rgat": RGAT}


class DistMult(nn.Module):
    r"""Scores of links, :math:`\langle z_i, r, z_j \rangle` with a learnt row per relation, on encoded nodes.

    Args:
        in_channels: Node features F, or the number of nodes N where they have none.
        out_channels: Number of nodes N.
        convs: Namespace of the encoder's layers.
        num_relations: Number of relations.
        encoder: "rgcn" or "rgat".
        hidden_channels: Width of the encoded nodes.
        dropout: Dropout rate between the encoder's convolutions and of the encoded nodes.
        **options: Of the encoder.

    Raises:
        ValueError: `encoder` is unknown, or an option of it is wrong.

    Source: Yang et al., Embedding Entities and Relations for Learning and Inference in Knowledge Bases, ICLR 2015;
        Schlichtkrull et al., Modeling Relational Data with Graph Convolutional Networks, ESWC 2018, section 4.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        convs: Any,
        *,
        num_relations: int = 1,
        encoder: str = "rgcn",
        hidden_channels: int = 64,
        dropout: float = 0.2,
        **options: Any,
    ) -> None:
        super().__init__()
        check_choice("encoder", encoder, tuple(ENCODERS))
        options |= {"num_relations": num_relations, "hidden_channels": hidden_channels, "dropout": dropout}
        self.encoder = ENCODERS[encoder](in_channels, hidden_channels, convs, **options)
        self.relation = nn.Parameter(torch.empty(num_relations, hidden_channels))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        self.dropout = nn.Dropout(dropout)
        nn.init.xavier_uniform_(self.relation)

    def forward(
        self, x: Tensor | None, edge_index: Any, queries: Tensor | None = None, edge_type: Tensor | None = None
    ) -> Tensor:
        """Return the score `[Q, N]` of each node as the other end of each query `[Q, 2]`, a node and a relation.

        Args:
            x: Node features [N, F]; None where nodes have none.
            edge_index: Edges [2, E].
            queries: Nodes and relations; None is refused.
            edge_type: Relation of each edge [E].

        Raises:
            ValueError: `queries` is missing or has another shape.
        """
        if queries is None:
            raise ValueError("'queries' needs shape [Q, 2] (got None)")
        check_shape("queries", queries, ("Q", 2), "[Q, 2]")
        z = self.dropout(self.encoder(x, edge_index, edge_type=edge_type))
        node, relation = queries.unbind(dim=1)
        return torch.addmm(self.bias, z[node] * self.relation[relation], z.t())


class HGT(nn.Module):
    """The heterogeneous graph transformer between two linear layers; labels are of the first node type.

    Args:
        in_channels: Features F of a node of each type.
        out_channels: Classes.
        convs: Namespace that holds `HGTConv` and `Linear`.
        metadata: Node types and edge types.
        hidden_channels: Width, a multiple of `heads`.
        heads: Attention heads.
        layers: Number of convolutions.
        dropout: Dropout rate in front of each convolution and of the last layer.

    Raises:
        ValueError: A size or rate is out of range, or `convs` lacks a layer.

    Source: Hu et al., Heterogeneous Graph Transformer, WWW 2020.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        convs: Any,
        *,
        metadata: Metadata = _ANY,
        hidden_channels: int = 64,
        heads: int = 4,
        layers: int = 2,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        check_sizes(hidden_channels=hidden_channels, heads=heads, layers=layers)
        check_rates(dropout=dropout)
        conv, linear = find_layer(convs, "HGTConv"), find_layer(convs, "Linear")
        self.dropout, self.labelled = nn.Dropout(dropout), metadata[0][0]
        self.lin_in = nn.ModuleDict({kind: linear(in_channels, hidden_channels) for kind in metadata[0]})
        self.convs = nn.ModuleList(conv(hidden_channels, hidden_channels, metadata, heads) for _ in range(layers))
        self.lin_out = linear(hidden_channels, out_channels)

    def forward(
        self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple[str, str, str], Any], nodes: Tensor | None = None
    ) -> Tensor:
        """Return logits `[N, out_channels]` of the first node type, or of some of its nodes `[M]`.

        Args:
            x_dict: Features [N, F] by node type.
            edge_index_dict: Edges [2, E] by edge type.
            nodes: Nodes of the first type whose logits are wanted; None: all.
        """
        x_dict = {kind: self.lin_in[kind](x).relu() for kind, x in x_dict.items()}
        for conv in self.convs:
            x_dict = conv({kind: self.dropout(x) for kind, x in x_dict.items()}, edge_index_dict)
        x = x_dict[self.labelled]
        return self.lin_out(self.dropout(x if nodes is None else x.index_select(0, nodes)))  # type: ignore[no-any-return]
