"""Small layers as people write them, with what of their edges becomes programs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import add_self_loops, degree, remove_self_loops, scatter, softmax

WIDTH, EDGE = 8, 4
FUSED, PARTLY, TORCH = "fused", "in part", "torch"
LAYERS: dict[str, tuple[type[nn.Module], str]] = {}
"""Name -> the layer, and what becomes of the gathers and reductions of its first graph."""


def layer(what):
    def register(kind):
        LAYERS[kind.__name__] = kind, what
        return kind

    return register


class Sum(MessagePassing):
    """A layer that adds messages of sources."""

    def __init__(self, aggr="add", **options):
        super().__init__(aggr=aggr, node_dim=options.pop("node_dim", 0), **options)

    def forward(self, x, edge_index, edge):
        return self.propagate(edge_index, x=x, edge=edge)

    def message(self, x_j):
        return x_j


@layer(PARTLY)
class BatchNormOfMessages(Sum):
    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Linear(2 * WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def message(self, x_i, x_j):
        return self.norm(self.lin(torch.cat([x_i, x_j], -1))).relu()


@layer(FUSED)
class AddsInPlace(Sum):
    def __init__(self):
        super().__init__("mean")
        self.lin = nn.Linear(EDGE, WIDTH)

    def message(self, x_j, edge):
        x_j += self.lin(edge)
        return x_j.relu()


@layer(FUSED)
class EditsAView(Sum):
    def message(self, x_i, x_j):
        halves = x_j.view(-1, 2, WIDTH // 2)
        halves[:, 0] *= 2
        x_j.add_(1)
        return x_j + x_i


@layer(FUSED)
class AssignsByMask(Sum):
    def forward(self, x, edge_index, edge):
        degrees = degree(edge_index[1], x.size(0), x.dtype)
        scale = degrees.pow(-0.5)
        scale[degrees == 0] = 1
        return self.propagate(edge_index, x=x * scale.view(-1, 1)) * scale.view(-1, 1)


@layer(FUSED)
class SplitsEdgeRows(Sum):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(EDGE, 2 * WIDTH)

    def message(self, x_j, edge):
        scale, shift = torch.split(self.lin(edge), WIDTH, dim=-1)
        return x_j * scale + shift.sigmoid()


@layer(FUSED)
class SoftmaxOfSources(Sum):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, edge):
        score = self.lin(x)[edge_index[1]].view(-1) + edge[:, 0]
        return self.propagate(edge_index, x=x, share=softmax(score, edge_index[0], num_nodes=x.size(0)))

    def message(self, x_j, share):
        return x_j * share.view(-1, 1)


@layer(FUSED)
class ReturnsEdgeRows(Sum):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH + EDGE, 16), nn.SiLU(), nn.Linear(16, EDGE), nn.LayerNorm(EDGE))
        self.lin = nn.Linear(EDGE, WIDTH)

    def forward(self, x, edge_index, edge):
        row, col = edge_index
        edge = edge + self.mlp(torch.cat([x[row], x[col], edge], -1))
        return x + self.lin(self.propagate(edge_index, edge=edge, size=(x.size(0), x.size(0)))), edge

    def message(self, edge):
        return edge


@layer(FUSED)
class KeepsEdgeRows(Sum):
    def message(self, x_i, x_j):
        self.gate = torch.sigmoid(x_i - x_j)
        return self.gate * x_j

    def update(self, out, x):
        gate, self.gate = self.gate, None
        return out + x + gate.mean()


@layer(FUSED)
class TupleOfMessages(Sum):
    def message(self, x_i, x_j, edge):
        return x_j * x_i, (x_j - x_i) * edge[:, :1]

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return tuple(scatter(part, index, 0, dim_size, "sum") for part in inputs)


@layer(FUSED)
class NodesAlongDimensionOne(Sum):
    def __init__(self):
        super().__init__(node_dim=1)

    def forward(self, x, edge_index, edge):
        return self.propagate(edge_index, x=torch.stack([x, x * 2, x.relu()]))

    def message(self, x_i, x_j):
        return torch.tanh(x_i) * x_j


@layer(FUSED)
class NoMessagePassing(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index, edge):
        rows = torch.stack([x, x * 2], 1)
        messages = self.lin(rows[edge_index[0, :]]).relu()
        return torch.zeros_like(rows).index_add_(0, edge_index[1, :], messages)


@layer(PARTLY)
class IntegersOfNodes(Sum):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, x, edge_index, edge):
        return self.propagate(edge_index, x=x, kind=(x[:, 0].abs() * 3).long().clamp(max=4))

    def message(self, kind_j, x_i):
        return self.table(kind_j) * x_i


@layer(FUSED)
class TypesOfEdges(Sum):
    def __init__(self):
        super().__init__()
        self.table, self.lin = nn.Parameter(torch.randn(3, WIDTH)), nn.Linear(3, WIDTH)

    def forward(self, x, edge_index, edge):
        return self.propagate(edge_index, x=x, kind=(edge[:, 0].abs() * 3).long().clamp(max=2))

    def message(self, x_j, kind):
        return x_j * self.table[kind] + self.lin(F.one_hot(kind, 3).to(x_j.dtype))


@layer(FUSED)
class OwnPropagate(Sum):
    def propagate(self, edge_index, x, edge):
        return scatter(x[edge_index[0]] * 2 - x[edge_index[1]], edge_index[1], 0, x.size(0), "mean")


@layer(FUSED)
class SeveralPropagates(Sum):
    def forward(self, x, edge_index, edge):
        outputs = []
        for self.kind in ("sum", "mean", "max", "min"):
            outputs.append(self.propagate(edge_index, x=x))
        return torch.cat(outputs, -1)

    def message(self, x_i, x_j):
        return (x_i - x_j).abs()

    def aggregate(self, inputs, index, dim_size=None):
        return scatter(inputs, index, 0, dim_size, self.kind)


@layer(FUSED)
class LargestIdAsSize(nn.Module):
    def forward(self, x, edge_index, edge):
        out = torch.zeros(int(edge_index.max()) + 1, WIDTH, dtype=x.dtype)
        return out.index_add_(0, edge_index[1], x[edge_index[0]] * edge[:, :1])


@layer(FUSED)
class SoftmaxOfUncountedNodes(Sum):
    def message(self, x_i, x_j, index):
        return softmax((x_i * x_j).sum(-1, keepdim=True), index) * x_j


@layer(FUSED)
class SumToUncountedNodes(Sum):
    def aggregate(self, inputs, index):
        return scatter(inputs, index, 0, reduce="sum")

    def message(self, x_i, x_j):
        return x_i * x_j


@layer(TORCH)
class SumToAsManyNodesAsATensorSays(Sum):
    def forward(self, x, edge_index, edge):
        return self.propagate(edge_index, x=x, count=torch.tensor(x.size(0) + 3))

    def aggregate(self, inputs, index, count):
        return scatter(inputs, index, 0, dim_size=int(count), reduce="sum")

    def message(self, x_i, x_j):
        return x_i * x_j


@layer(FUSED)
class MatrixPerEdge(Sum):
    def __init__(self):
        super().__init__("mean")
        self.net = nn.Sequential(nn.Linear(EDGE, 16), nn.ReLU(), nn.Linear(16, WIDTH * WIDTH))

    def message(self, x_j, edge):
        return torch.matmul(x_j.unsqueeze(1), self.net(edge).view(-1, WIDTH, WIDTH)).squeeze(1)


@layer(FUSED)
class VectorsAndDistances(Sum):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x, edge_index, edge):
        difference = x[edge_index[1], :3] - x[edge_index[0], :3]
        distance = difference.norm(dim=-1, keepdim=True).clamp(min=1e-3)
        vectors = x.unsqueeze(1).expand(-1, 3, -1).contiguous()
        return self.propagate(edge_index, x=self.lin(x), vectors=vectors, unit=difference / distance)

    def message(self, x_j, vectors_j, unit):
        a, b = x_j.chunk(2, -1)
        return a.unsqueeze(1) * vectors_j + b.unsqueeze(1) * unit.unsqueeze(-1)


@layer(FUSED)
class RadialBasis(Sum):
    def __init__(self):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0, 3, 12))
        self.net = nn.Sequential(nn.Linear(12, WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x, edge_index, edge):
        place = x[:, :3]
        distance = (place[edge_index[0]] - place[edge_index[1]]).pow(2).sum(-1).add(1e-6).sqrt()
        basis = torch.exp(-10 * (distance.view(-1, 1) - self.centers) ** 2)
        cutoff = 0.5 * (torch.cos(distance * 3.14159 / 3) + 1) * (distance < 3)
        return self.propagate(edge_index, x=x, edge=self.net(basis) * cutoff.view(-1, 1))

    def message(self, x_j, edge):
        return x_j * edge


@layer(PARTLY)
class OrdersEdges(Sum):
    def forward(self, x, edge_index, edge):
        order = (x[edge_index[0]] * x[edge_index[1]]).sum(-1).argsort()
        return self.propagate(edge_index[:, order[order.numel() // 2 :]], x=x)


@layer(FUSED)
class MaskPerRelation(Sum):
    def __init__(self):
        super().__init__("mean")
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, x, edge_index, edge):
        kind, out = (edge[:, 0].abs() * 3).long().clamp(max=2), 0
        for k in range(3):
            out = out + self.propagate(edge_index[:, kind == k], x=x) @ self.weight[k]
        return out


@layer(FUSED)
class NearestNeighbours(Sum):
    def __init__(self):
        super().__init__("max")
        self.lin = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, edge_index, edge):
        near = torch.cdist(x, x).topk(4, largest=False).indices
        targets = torch.arange(x.size(0)).repeat_interleave(4)
        return self.propagate(torch.stack([near.reshape(-1), targets]), x=x)

    def message(self, x_i, x_j):
        return self.lin(torch.cat([x_i, x_j - x_i], -1)).relu()


@layer(FUSED)
class AsksForTheType(Sum):
    def message(self, x_j):
        return x_j * 2 if type(x_j) is Tensor else x_j


@layer(PARTLY)
class ComputesWithSizes(Sum):
    def message(self, x_j, index, size_i):
        return x_j / size_i + index.numel()


@layer(FUSED)
class DecidesByNumbers(Sum):
    def forward(self, x, edge_index, edge):
        out = self.propagate(edge_index, x=x)
        return out * 2 if out.sum() > 0 else out - 1


@layer(FUSED)
class UnderNoGrad(Sum):
    def forward(self, x, edge_index, edge):
        with torch.no_grad():
            scale = torch.zeros_like(x) + x.mean()
        return self.propagate(edge_index, x=x, scale=scale)

    def message(self, x_i, x_j, scale_i):
        with torch.no_grad():
            largest = x_i.abs().amax(1, keepdim=True)
        return x_j * scale_i * largest + x_i


@layer(FUSED)
class RemakesSelfLoops(Sum):
    def forward(self, x, edge_index, edge):
        edge_index, _ = remove_self_loops(edge_index)
        return self.propagate(add_self_loops(edge_index, num_nodes=x.size(0))[0], x=x)

    def message(self, x_j):
        return x_j.relu()


@layer(FUSED)
class BothDirections(Sum):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index, edge):
        hidden = self.lin(self.propagate(edge_index, x=x)).relu()
        return self.propagate(edge_index.flip(0), x=hidden)

    def message(self, x_i, x_j):
        return x_j * x_i.sigmoid()


@layer(FUSED)
class SharesWeightsOfTheOtherDirection(Sum):
    """A layer whose weights of edges, of gathered rows and a softmax, are read with the edges reversed."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, edge):
        score = self.lin(x)[edge_index[0]] - 2 * self.lin(x)[edge_index[1]]
        share = softmax(score, edge_index[1], num_nodes=x.size(0))
        hidden = self.propagate(edge_index, x=x, edge=share * score)
        return self.propagate(edge_index.flip(0), x=hidden, edge=score.tanh())

    def message(self, x_j, edge):
        return x_j * edge


@layer(FUSED)
class OperandsByName(Sum):
    def message(self, x_i, x_j):
        both = torch.cat(tensors=[x_i[:, :4], x_j[:, 4:]], dim=-1)
        return torch.clamp(input=both, min=-0.5) * torch.sigmoid(input=x_j)


@layer(FUSED)
class EditsPartsOfTheResult(Sum):
    def forward(self, x, edge_index, edge):
        out = self.propagate(edge_index, x=x, edge=edge)
        out[:, 0] = 0.0
        out[x[:, 1] > 0] = 1.0
        out[0, 2:] = x[1, 2:]
        return out

    def message(self, x_i, x_j):
        return x_i * x_j.tanh()


@layer(FUSED)
class EditsPartsOfMessages(Sum):
    def message(self, x_i, x_j, edge):
        messages = x_i * x_j
        messages[:, :EDGE] = edge
        return messages.tanh()
