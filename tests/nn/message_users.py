"""Layers as users write them, each a `MessagePassing` of its own."""

from functools import partial

import torch
import torch.nn.functional as F
from torch.nn import BatchNorm1d, LayerNorm, Linear, Parameter
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import PowerMeanAggregation, SoftmaxAggregation
from torch_geometric.utils import degree, scatter, softmax

from benchmarks.loops.layers import EdgeGate, Temperature

FEATURES, WIDTH, EDGE = 6, 4, 3


def squash(x):
    """A helper that a message calls."""
    return x / (1 + x.abs())


class Gated(MessagePassing):
    """GatedGCN: gates per edge and channel, normalised by their sum; the edges get new features."""

    def __init__(self):
        super().__init__(aggr=None)
        self.a, self.b, self.c = Linear(FEATURES, WIDTH), Linear(FEATURES, WIDTH), Linear(EDGE, WIDTH)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, a=self.a(x), b=self.b(x), edge_attr=self.c(edge_attr))

    def message(self, a_i, b_j, edge_attr):
        edge = a_i + b_j + edge_attr
        return edge.sigmoid() * b_j, edge.sigmoid(), edge

    def aggregate(self, inputs, index, dim_size=None):
        messages, gates, edge = inputs
        total = scatter(gates, index, 0, dim_size, "sum")
        return scatter(messages, index, 0, dim_size, "sum") / (total + 1e-6), edge


class NodeGatedGCN(MessagePassing):
    """Sums with gates per channel of both ends, normalised by the sum of the gates."""

    def __init__(self, width):
        super().__init__(aggr="add")
        self.a, self.b, self.c = (Linear(width, width) for _ in range(3))

    def forward(self, x, edge_index):
        out = self.propagate(edge_index, query=self.a(x), key=self.b(x), value=self.c(x))
        total, gates = out.chunk(2, dim=-1)
        return total / (gates + 1e-6)

    def message(self, query_i, key_j, value_j):
        gate = torch.sigmoid(query_i + key_j)
        return torch.cat([gate * value_j, gate], dim=-1)


class SigmoidHeads(MessagePassing):
    """Heads whose weights are no softmax."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.query, self.key = Linear(FEATURES, 2 * WIDTH), Linear(FEATURES, 2 * WIDTH)

    def forward(self, x, edge_index, edge_weight):
        q, k = self.query(x).view(-1, 2, WIDTH), self.key(x).view(-1, 2, WIDTH)
        return self.propagate(edge_index, q=q, k=k, edge_weight=edge_weight).flatten(1)

    def message(self, q_i, k_j, edge_weight):
        weight = torch.sigmoid((q_i * k_j).sum(-1) / WIDTH**0.5) * edge_weight.unsqueeze(-1)
        return weight[..., None] * k_j


class SignedAttention(MessagePassing):
    """FAGCN-like weights in (-1, 1) with degrees."""

    def __init__(self):
        super().__init__(aggr="add")
        self.gate = Linear(2 * FEATURES, 1)

    def forward(self, x, edge_index):
        norm = degree(edge_index[1], x.size(0), dtype=x.dtype).clamp(min=1).rsqrt()
        return self.propagate(edge_index, x=x, norm=norm.view(-1, 1))

    def message(self, x_i, x_j, norm_i, norm_j):
        weight = torch.tanh(self.gate(torch.cat([x_i, x_j], dim=1)))
        return norm_i * norm_j * weight * x_j


class Gaussian(MessagePassing):
    """SchNet-like filters of distances."""

    def __init__(self):
        super().__init__(aggr="add")
        self.register_buffer("centres", torch.linspace(0, 2, 5).view(1, -1))
        self.filter = Linear(5, FEATURES)

    def forward(self, x, edge_index, pos):
        return self.propagate(edge_index, x=x, pos=pos)

    def message(self, x_j, pos_i, pos_j):
        distance = (pos_i - pos_j).norm(dim=-1, keepdim=True)
        basis = torch.exp(-0.5 * (distance - self.centres) ** 2)
        cutoff = 0.5 * (torch.cos(distance.clamp(max=3.0) * (torch.pi / 3.0)) + 1)
        return x_j * self.filter(basis) * cutoff


class Embedded(MessagePassing):
    """Messages with an embedding of the edge's type, looked up before."""

    def __init__(self):
        super().__init__(aggr="max")
        self.embedding, self.lin = torch.nn.Embedding(2, FEATURES), Linear(FEATURES, WIDTH)

    def forward(self, x, edge_index, edge_type):
        return self.propagate(edge_index, x=x, kind=self.embedding(edge_type))

    def message(self, x_j, kind):
        return self.lin(x_j) + F.relu(self.lin(kind))


class Modulated(MessagePassing):
    """FiLM-style modulation by the target, chunked."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin, self.film = Linear(FEATURES, WIDTH), Linear(FEATURES, 2 * WIDTH)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x), film=self.film(x))

    def message(self, x_j, film_i):
        gamma, beta = film_i.chunk(2, dim=-1)
        return F.gelu(gamma * x_j + beta)


class Differences(MessagePassing):
    """The largest difference and its deviation."""

    def __init__(self):
        super().__init__(aggr=["max", "min", "std"])
        self.lin = Linear(3 * FEATURES, WIDTH)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return (x_j - x_i).abs()

    def update(self, inputs, x):
        return self.lin(inputs) + x[:, :WIDTH]


class Products(MessagePassing):
    """The mean of products between two sets of nodes, against the edges' direction."""

    def __init__(self):
        super().__init__(aggr="mean", flow="target_to_source")

    def forward(self, pair, edge_index):
        return self.propagate(edge_index, x=pair, size=(pair[0].size(0), pair[1].size(0)))

    def message(self, x_i, x_j):
        out = x_i * x_j
        out += 1.0
        return out.mul_(0.5)


class Clipped(MessagePassing):
    """Clipped, masked and squashed messages through a helper, with a layer norm per message."""

    def __init__(self):
        super().__init__(aggr="add")
        self.norm, self.limit = LayerNorm(FEATURES), 0.8

    def forward(self, x, edge_index, edge_weight):
        return self.propagate(edge_index, x=x, w=edge_weight)

    def message(self, x_i, x_j, w):
        out = self.norm(x_j).clamp(-self.limit, self.limit)
        out = torch.where(x_i > 0, out, squash(x_j))
        return out.masked_fill((x_j < -1) & (x_i < 0), 0.25) * w[:, None]


class PowerMean(MessagePassing):
    """A learnt power mean of elu messages."""

    def __init__(self):
        super().__init__(aggr=PowerMeanAggregation(p=2.0, learn=True))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return F.elu(x_j, alpha=0.7) + 1.0


class SoftAggregated(MessagePassing):
    """A learnt softmax aggregation per channel after a batch norm in evaluation."""

    def __init__(self):
        super().__init__(aggr=SoftmaxAggregation(learn=True, channels=FEATURES))
        self.norm = BatchNorm1d(FEATURES).eval()

    def train(self, mode=True):
        return super().train(mode and False)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return self.norm(F.softplus(x_j) - x_i)


class Einsteinian(MessagePassing):
    """A matrix per head on vectors of the source, and a channel softmax of the target."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.weight = Parameter(torch.randn(2, FEATURES // 2, WIDTH))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x.view(-1, 2, FEATURES // 2))

    def message(self, x_i, x_j):
        mixed = (x_j.unsqueeze(-2) @ self.weight).squeeze(-2)
        share = F.softmax(x_i.mean(dim=-1), dim=-1)
        return torch.stack([mixed[:, 0] * share[:, :1], mixed[:, 1].tanh() * share[:, 1:]], dim=1)


class Updated(MessagePassing):
    """Edge features from `edge_updater`, used in messages and returned."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = Linear(EDGE, FEATURES, bias=False)

    def forward(self, x, edge_index, edge_attr):
        edge = self.edge_updater(edge_index, x=x, edge_attr=edge_attr)
        return self.propagate(edge_index, x=x, edge=edge), edge

    def edge_update(self, x_i, x_j, edge_attr):
        return F.leaky_relu(x_i + x_j + self.lin(edge_attr), 0.3)

    def message(self, x_j, edge):
        return F.normalize(edge, dim=-1) * x_j


class Normalized(MessagePassing):
    """A gated layer that divides by the sum of its gates and counts targets by the rows of another argument."""

    def __init__(self):
        super().__init__(aggr="add")
        self.target, self.source = Linear(FEATURES, WIDTH), Linear(FEATURES, WIDTH)
        self.value, self.edge = Linear(FEATURES, WIDTH), Linear(EDGE, WIDTH)

    def forward(self, x, edge_index, edge_attr):
        d, e, b = self.target(x), self.source(x), self.value(x)
        out = self.propagate(edge_index, d=d, e=e, b=b, c=self.edge(edge_attr))
        edge, self.edges = self.edges, None
        return out, edge

    def message(self, d_i, e_j, c):
        self.edges = d_i + e_j + c
        return self.edges.sigmoid()

    def aggregate(self, inputs, index, b_j, b):
        total = scatter(inputs * b_j, index, 0, b.shape[0], "sum")
        return total / (scatter(inputs, index, 0, b.shape[0], "sum") + 1e-6)


class Uncounted(MessagePassing):
    """A softmax that is told of no number of nodes, which it reads off the largest id."""

    def __init__(self):
        super().__init__(aggr="add")
        self.query, self.key = Linear(FEATURES, WIDTH), Linear(FEATURES, WIDTH)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, q=self.query(x), k=self.key(x))

    def message(self, x_j, q_i, k_j, index):
        return softmax((q_i * k_j).sum(dim=-1, keepdim=True), index) * x_j


class Joined(MessagePassing):
    """Attention as the paper on GAT states it: a vector per head on joined ends."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.lin = Linear(FEATURES, 2 * WIDTH, bias=False)
        self.att = Parameter(torch.randn(1, 2, 2 * WIDTH))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x).view(-1, 2, WIDTH))

    def message(self, x_i, x_j, index, size_i):
        logits = F.leaky_relu((torch.cat([x_i, x_j], dim=-1) * self.att).sum(dim=-1), 0.2)
        return x_j * softmax(logits, index, num_nodes=size_i).unsqueeze(-1)


class Distances(MessagePassing):
    """EGNN-like: invariant messages of squared distances."""

    def __init__(self):
        super().__init__(aggr="mean")
        self.first, self.second = Linear(2 * FEATURES + 1, 5), Linear(5, WIDTH)

    def forward(self, x, edge_index, pos):
        return self.propagate(edge_index, x=x, pos=pos)

    def message(self, x_i, x_j, pos_i, pos_j):
        squared = ((pos_i - pos_j) ** 2).sum(-1, keepdim=True)
        return F.silu(self.second(F.silu(self.first(torch.cat([x_i, x_j, squared], dim=-1)))))


class OneCoordinate(MessagePassing):
    """Distances and maxima of rows of one number, beside rows of several."""

    def __init__(self):
        super().__init__(aggr="add")

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, place=x[:, :1])

    def message(self, x_j, place_i, place_j):
        distance = (place_i - place_j).norm(dim=-1, keepdim=True)
        product = (place_i * place_j).sum(dim=-1, keepdim=True)
        return x_j * (distance + product) + torch.tanh(place_j).amax(dim=-1, keepdim=True)


class Corners(MessagePassing):
    """What looks like something else: a sum that is no degree, masks as numbers, ranges from the end."""

    def __init__(self):
        super().__init__(aggr=None)

    def forward(self, x, edge_index, edge_weight):
        return self.propagate(edge_index, x=x, w=edge_weight)

    def message(self, x_i, x_j, w):
        mask = (x_j > 0).where(x_i > 0, x_i > -1)
        kept = x_j.where(mask, -x_i) + mask * 0.5 + mask.to(x_j.dtype)
        tail = kept.narrow(1, -2, 2) + kept[:, -2:] + kept.select(1, -1).unsqueeze(1)
        with torch.no_grad():
            scale = x_i.abs().amax(dim=1, keepdim=True)
        return torch.minimum(tail, tail.new_full((2,), 0.7)) * scale + torch.maximum(tail, w.view(-1, 1))

    def aggregate(self, inputs, index, dim_size=None):
        total = scatter(F.leaky_relu(inputs, 1.0), index, 0, dim_size, "sum")
        out = total.new_zeros(dim_size, 2).index_add(0, index, inputs.detach())
        return (
            total.clamp(min=1)
            + total.clamp_max(2) * (out != 0)
            + (total >= 1) * total
            + degree(index, dim_size, dtype=total.dtype).view(-1, 1)
        )


USERS = {
    "Gated": (Gated, "edge_attr"),
    "EdgeGate": (partial(EdgeGate, FEATURES, EDGE), "edge_attr"),
    "SigmoidHeads": (SigmoidHeads, "edge_weight"),
    "SignedAttention": (SignedAttention, None),
    "Temperature": (partial(Temperature, FEATURES), None),
    "Gaussian": (Gaussian, "pos"),
    "Embedded": (Embedded, "edge_type"),
    "Modulated": (Modulated, None),
    "Differences": (Differences, None),
    "Products": (Products, "pair"),
    "Clipped": (Clipped, "edge_weight"),
    "PowerMean": (PowerMean, None),
    "SoftAggregated": (SoftAggregated, None),
    "Einsteinian": (Einsteinian, None),
    "Updated": (Updated, "edge_attr"),
    "Normalized": (Normalized, "edge_attr"),
    "Uncounted": (Uncounted, None),
    "Joined": (Joined, None),
    "Distances": (Distances, "pos"),
    "OneCoordinate": (OneCoordinate, None),
    "Corners": (Corners, "edge_weight"),
}
"""Name -> class, and what its forward takes beside features and edges."""
