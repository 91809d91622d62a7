"""Layers as users write them, which the loops train; eight of them are a loop by themselves.

The models have no kinks where a layer can do without: by a kink, rounding decides about a whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing, PointTransformerConv, global_mean_pool
from torch_geometric.utils import scatter, softmax

from pyg_dfgnn.models.continuous_filter import ContinuousFilterConv


class GatedGCN(MessagePassing):
    """Sums with gates per channel of both ends and the edge, whose features are updated too."""

    def __init__(self, width: int, edge_width: int) -> None:
        super().__init__(aggr="add")
        self.a, self.b, self.d, self.e = (nn.Linear(width, width) for _ in range(4))
        self.c = nn.Linear(edge_width, width)
        self.edge: Tensor | None = None

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        values = {"bx": self.b(x), "dx": self.d(x), "ex": self.e(x), "ce": self.c(edge_attr), "ax": self.a(x)}
        out = self.propagate(edge_index, **values)
        edge, self.edge = self.edge, None
        return F.silu(out), F.silu(edge)  # type: ignore[arg-type]

    def message(self, dx_i: Tensor, ex_j: Tensor, ce: Tensor) -> Tensor:
        self.edge = dx_i + ex_j + ce
        return torch.sigmoid(self.edge)

    def aggregate(self, inputs: Tensor, index: Tensor, bx_j: Tensor, bx: Tensor) -> Tensor:  # type: ignore[override]
        total = scatter(inputs * bx_j, index, 0, dim_size=bx.size(0), reduce="sum")
        return total / (scatter(inputs, index, 0, dim_size=bx.size(0), reduce="sum") + 1e-6)

    def update(self, aggregated: Tensor, ax: Tensor) -> Tensor:  # type: ignore[override]
        return ax + aggregated


class SigmoidHeads(MessagePassing):
    """Heads of values, each with a gate of both ends."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__(aggr="mean", node_dim=0)
        self.heads, self.channels = heads, width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        query, key, value = (f(x).view(-1, self.heads, self.channels) for f in (self.query, self.key, self.value))
        out: Tensor = self.propagate(edge_index, query=query, key=key, value=value)
        return out.flatten(1)

    def message(self, query_i: Tensor, key_j: Tensor, value_j: Tensor) -> Tensor:
        gate = torch.sigmoid((query_i * key_j).sum(dim=-1, keepdim=True) / self.channels**0.5)
        return gate * value_j


class Signed(MessagePassing):
    """Sums whose weight, a tanh of both ends, may be negative."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="add")
        self.lin, self.gate = nn.Linear(width, width), nn.Linear(2 * width, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x + self.propagate(edge_index, x=self.lin(x))  # type: ignore[no-any-return]

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.tanh(self.gate(torch.cat([x_i, x_j], dim=-1))) * x_j


class Gaussians(MessagePassing):
    """Sources times a filter, which is linear in bells around the length of the edge."""

    def __init__(self, width: int, edge_width: int, bells: int = 16) -> None:
        super().__init__(aggr="add")
        self.lin, self.filter = nn.Linear(width, width, bias=False), nn.Linear(bells, width)
        self.register_buffer("centres", torch.linspace(0, 2 * edge_width**0.5, bells))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), distance=edge_attr.norm(dim=-1))  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, distance: Tensor) -> Tensor:
        return x_j * self.filter(torch.exp(-((distance.view(-1, 1) - self.centres) ** 2)))


class EdgeGate(MessagePassing):
    """Sources times a gate of both ends and the edge."""

    def __init__(self, width: int, edge_width: int) -> None:
        super().__init__(aggr="mean")
        self.gate = nn.Linear(2 * width + edge_width, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge=edge)  # type: ignore[no-any-return]

    def message(self, x_i: Tensor, x_j: Tensor, edge: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(torch.cat([x_i, x_j, edge], dim=-1))) * x_j


class Temperature(MessagePassing):
    """Attention of one number per edge with a learnt temperature."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="add")
        self.log_t, self.att = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.randn(1, width) / width**0.5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)  # type: ignore[no-any-return]

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, ptr: Tensor | None, size_i: int | None) -> Tensor:
        score = (self.att * F.silu(x_i + x_j)).sum(dim=-1) * self.log_t.exp()
        return x_j * softmax(score, index, ptr, size_i).view(-1, 1)


class Modulated(MessagePassing):
    """Sources modulated by their target, then activated."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="add")
        self.lin, self.film = nn.Linear(width, width), nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        gamma, beta = self.film(x).chunk(2, dim=-1)
        return self.propagate(edge_index, x=self.lin(x), gamma=gamma, beta=beta)  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, gamma_i: Tensor, beta_i: Tensor) -> Tensor:
        return F.gelu(gamma_i * x_j + beta_i)


class Differences(MessagePassing):
    """The largest, smallest and mean difference of the ends."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr=["max", "min", "mean"])
        self.lin = nn.Linear(3 * width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(self.propagate(edge_index, x=x))  # type: ignore[no-any-return]

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_j - x_i).abs()


class RelationsByHand(MessagePassing):
    """A product per relation, propagated over the edges of that relation."""

    def __init__(self, width: int, relations: int) -> None:
        super().__init__(aggr="mean")
        self.weights = nn.Parameter(torch.randn(relations, width, width) / width**0.5)
        self.root = nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        out: Tensor = self.root(x)
        for relation in range(len(self.weights)):
            mask = edge_type == relation
            out = out + self.propagate(edge_index[:, mask], x=x @ self.weights[relation], size=(len(x), len(x)))
        return out

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class Diffusion(MessagePassing):
    """Random walks of a few steps along the edges and against them, each with its weights."""

    def __init__(self, inputs: int, outputs: int, steps: int = 2) -> None:
        super().__init__(aggr="add", node_dim=-2)
        self.steps, self.lin = steps, nn.Linear((2 * steps + 1) * inputs, outputs)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        walks = [x]
        for edges in (edge_index, edge_index.flip(0)):
            total = scatter(edge_weight, edges[0], 0, dim_size=x.size(-2), reduce="sum")
            norm, value = edge_weight / total[edges[0]], x
            for _ in range(self.steps):
                value = self.propagate(edges, x=value, norm=norm)
                walks.append(value)
        return self.lin(torch.cat(walks, dim=-1))  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class Recurrent(nn.Module):
    """A gated recurrent cell with graph convs in place of its products, unrolled over `x [B, T, N, F]`."""

    def __init__(self, width: int, convs: list[nn.Module]) -> None:
        super().__init__()
        self.gates, self.candidate = convs
        self.width, self.head = width, nn.Linear(width, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        state = x.new_zeros(x.size(0), x.size(2), self.width)
        for step in range(x.size(1)):
            now = x[:, step]
            gates = torch.sigmoid(self.gates(torch.cat([now, state], dim=-1), edge_index, edge_weight))
            update, reset = gates.chunk(2, dim=-1)
            candidate = self.candidate(torch.cat([now, reset * state], dim=-1), edge_index, edge_weight)
            state = update * state + (1 - update) * torch.tanh(candidate)
        return self.head(state)  # type: ignore[no-any-return]


class GraphLevel(nn.Module):
    """Convs with batch norm and residuals, a mean pool and one number per graph."""

    def __init__(self, sample: Any, convs: list[nn.Module], width: int, takes_edges: bool) -> None:
        super().__init__()

        def encoder(values: Tensor) -> nn.Module:
            return nn.Linear(values.size(1), width) if values.is_floating_point() else nn.Embedding(120, width)

        self.encode, self.encode_edges = encoder(sample.x), encoder(sample.edge_attr) if takes_edges else None
        self.convs, self.norms = nn.ModuleList(convs), nn.ModuleList(nn.BatchNorm1d(width) for _ in convs)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor, graphs: int) -> Tensor:
        x = self.encode(x)
        edge = None if self.encode_edges is None else self.encode_edges(edge_attr)
        for conv, norm in zip(self.convs, self.norms):
            if isinstance(conv, GatedGCN):
                out, edge = conv(x, edge_index, edge)
            elif hasattr(conv, "attn"):
                out = conv(x, edge_index, batch, edge_attr=edge)
            elif edge is not None:
                out = conv(x, edge_index, edge_attr=edge)
            else:
                out = conv(x, edge_index)
            x = x + F.silu(norm(out))
        return self.head(global_mean_pool(x, batch, graphs)).squeeze(-1)  # type: ignore[no-any-return]


class NodeLevel(nn.Module):
    """Two convs with a SiLU between them, called with `x`, `edge_index` and what else the conv takes."""

    def __init__(self, convs: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = convs

    def forward(self, x: Tensor, edge_index: Tensor, *edge: Tensor) -> Tensor:
        out = self.first(x, edge_index, *edge)
        if isinstance(out, tuple):
            return self.second(*out[:1], edge_index, *out[1:])[0]  # type: ignore[no-any-return]
        return self.second(F.silu(out), edge_index, *edge)  # type: ignore[no-any-return]


class Blocks(nn.Module):
    """One conv per bipartite block, the outermost first."""

    def __init__(self, convs: list[nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, *blocks: Any) -> Tensor:
        for i, conv in enumerate(self.convs):
            edge_index, count = blocks[2 * i : 2 * i + 2]
            x = conv((x, x[:count]), edge_index)
            x = F.silu(x) if i + 1 < len(self.convs) else x
        return x


class Hetero(nn.Module):
    """A linear map per type, two convs on dictionaries, logits of the first nodes of a type."""

    def __init__(self, kinds: Sequence[str], width: int, seeds: str, convs: list[nn.Module]) -> None:
        super().__init__()
        self.seeds = seeds
        self.encode = nn.ModuleDict({kind: nn.Linear(128, width) for kind in kinds})
        self.convs, self.head = nn.ModuleList(convs), nn.Linear(width, 349)

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor], seeds: int) -> Tensor:
        x = {kind: F.silu(self.encode[kind](value)) for kind, value in x.items()}
        for conv in self.convs:
            x = {kind: F.silu(value) for kind, value in conv(x, edges).items()}
        return self.head(x[self.seeds][:seeds])  # type: ignore[no-any-return]


class OfOneType(nn.Module):
    """A conv on one type of nodes, which `to_hetero` repeats for each relation."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)  # type: ignore[no-any-return]


class Typed(NodeLevel):
    """RGCN: two convs on typed edges, logits of the first rows."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor, seeds: int) -> Tensor:  # type: ignore[override]
        return super().forward(x, edge_index, edge_type)[:seeds]


def nearest(x: Tensor, clouds: int, k: int) -> Tensor:
    """Edges `[2, E]` from the `k` nearest points of its cloud to each point, itself among them."""
    points = x.detach().view(clouds, -1, x.size(-1))
    near = torch.cdist(points, points).topk(k, largest=False).indices
    first = torch.arange(clouds, device=x.device).view(-1, 1, 1) * points.size(1)
    return torch.stack([(near + first).flatten(), torch.arange(len(x), device=x.device).repeat_interleave(k)])


class Clouds(nn.Module):
    """Convs on the nearest points by features, or by position where the convs take positions."""

    def __init__(self, width: int, k: int, convs: list[nn.Module]) -> None:
        super().__init__()
        self.convs, self.k, self.head = nn.ModuleList(convs), k, nn.Linear(width, 40)

    def forward(self, position: Tensor, clouds: int) -> Tensor:
        x = position
        for conv in self.convs:
            if isinstance(conv, PointTransformerConv):
                x = F.silu(conv(x, position, nearest(position, clouds, self.k)))
            else:
                x = conv(x, nearest(x, clouds, self.k))
        return self.head(x.view(clouds, -1, x.size(-1)).amax(dim=1))  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A layer that reads some of the arguments that it is called with, by their places."""

    def __init__(self, layer: nn.Module, *places: int) -> None:
        super().__init__()
        self.layer, self.places = layer, places

    def forward(self, *arguments: Tensor) -> Tensor:
        return self.layer(*(arguments[place] for place in self.places))  # type: ignore[no-any-return]


class Equivariant(MessagePassing):
    """A network on both ends and their squared distance, summed (EGNN without moving positions)."""

    def __init__(self, net: nn.Module, update: nn.Module) -> None:
        super().__init__(aggr="add")
        self.net, self.renew = net, update

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor, edge: Tensor) -> Tensor:
        return x + self.renew(torch.cat([x, self.propagate(edge_index, x=x, pos=pos)], dim=-1))  # type: ignore[no-any-return]

    def message(self, x_i: Tensor, x_j: Tensor, pos_i: Tensor, pos_j: Tensor) -> Tensor:
        distance = (pos_i - pos_j).square().sum(dim=-1, keepdim=True)
        return F.silu(self.net(torch.cat([x_i, x_j, distance], dim=-1)))


class Filtered(MessagePassing):
    """Sources times a network of the edge (SchNet)."""

    def __init__(self, net: nn.Module, lin: nn.Module) -> None:
        super().__init__(aggr="add")
        self.net, self.lin = net, lin

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor, edge: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), edge=edge)  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, edge: Tensor) -> Tensor:
        return x_j * self.net(edge)


class MeshBlock(MessagePassing):
    """New features of edges by a network of the ends and the old ones; their sums update nodes (MeshGraphNet)."""

    def __init__(self, net: nn.Module, update: nn.Module, adds: bool) -> None:
        super().__init__(aggr="add")
        self.net, self.renew, self.adds = net, update, adds

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
        row, col = edge_index
        new = self.net(torch.cat([x[col], x[row], edge], dim=-1))
        new = new + edge if self.adds else new
        return x + self.renew(torch.cat([x, self.propagate(edge_index, edge=new, size=(len(x), len(x)))], dim=-1)), new

    def message(self, edge: Tensor) -> Tensor:
        return edge


class Gates(MessagePassing):
    """A network on both ends times the sigmoid of another."""

    def __init__(self, gate: nn.Module, net: nn.Module) -> None:
        super().__init__(aggr="add")
        self.gate, self.net = gate, net

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor, edge: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)  # type: ignore[no-any-return]

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        both = torch.cat([x_i, x_j], dim=-1)
        return torch.sigmoid(self.gate(both)) * self.net(both)


class OnMeshes(nn.Module):
    """Layers on nodes and edges with positions."""

    def __init__(self, convs: list[nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor, edge: Tensor) -> Tensor:
        for conv in self.convs:
            out = conv(x, edge_index, pos, edge)
            x, edge = out if isinstance(out, tuple) else (out, edge)
        return x


BASIS = 20
"""Functions that the length of an edge is expanded in."""


class FilterBlock(nn.Module):
    """A residual convolution whose filter is a network of the length (SchNet)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = ContinuousFilterConv(width, BASIS)

    def forward(self, x: Tensor, vectors: Tensor, edge_index: Tensor, *edge: Tensor) -> tuple[Tensor, Tensor]:
        expanded, cut, _ = edge
        return x + self.conv(x, edge_index, expanded, cut), vectors


class VectorBlock(MessagePassing):
    """Messages of scalars and of vectors `[N, 3, F]`, each of both (PaiNN)."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.net = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 3 * width))
        self.filter, self.mix = nn.Linear(BASIS, 3 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, vectors: Tensor, edge_index: Tensor, *edge: Tensor) -> tuple[Tensor, Tensor]:
        expanded, cut, direction = edge
        weight = self.filter(expanded) * cut
        scalar, vector = self.propagate(
            edge_index, phi=self.net(x), vectors=vectors, weight=weight, direction=direction
        )
        vectors = vectors + vector
        # The square is smooth where a vector is zero.
        return x + self.mix(torch.cat([scalar, vectors.square().sum(dim=1)], dim=-1)), vectors

    def message(self, phi_j: Tensor, vectors_j: Tensor, weight: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        scalar, along, of_vectors = torch.split(phi_j * weight, phi_j.size(-1) // 3, dim=-1)
        return scalar, vectors_j * of_vectors.unsqueeze(1) + direction.unsqueeze(-1) * along.unsqueeze(1)

    def aggregate(self, inputs: Any, index: Tensor, dim_size: int | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        scalar, vectors = (scatter(each, index, 0, dim_size=dim_size, reduce="sum") for each in inputs)
        return scalar, vectors

    def update(self, inputs: Any) -> Any:
        return inputs


class Energies(nn.Module):
    """An energy per molecule of the elements and positions of its atoms, by residual blocks."""

    centres: Tensor

    def __init__(self, width: int, blocks: list[nn.Module], cutoff: float = 5.0) -> None:
        super().__init__()
        self.embed, self.blocks, self.cutoff = nn.Embedding(120, width), nn.ModuleList(blocks), cutoff
        self.head = nn.Sequential(nn.Linear(width, width // 2), nn.SiLU(), nn.Linear(width // 2, 1))
        self.register_buffer("centres", torch.linspace(0.0, cutoff, BASIS))

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor, batch: Tensor, graphs: int) -> Tensor:
        row, col = edge_index
        step = pos[row] - pos[col]
        # Ends of edges that fill a captured batch are at one place.
        length = step.square().sum(dim=-1, keepdim=True).clamp(min=1e-12).sqrt()
        expanded = torch.exp(-((length - self.centres) ** 2) / (2 * (self.cutoff / BASIS) ** 2))
        cut = 0.5 * (torch.cos(length * (torch.pi / self.cutoff)) + 1.0)
        x = self.embed(x)
        vectors = x.new_zeros(len(x), 3, x.size(1))
        for block in self.blocks:
            x, vectors = block(x, vectors, edge_index, expanded, cut, step / length)
        return scatter(self.head(x).squeeze(-1), batch, 0, dim_size=graphs, reduce="sum")
