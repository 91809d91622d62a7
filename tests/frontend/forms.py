"""Forms of gathers, reductions and rows that layers of public repositories have, one small layer each."""

import importlib
from importlib.util import find_spec

import torch
from torch import nn
from torch.nn.functional import embedding
from torch_geometric.utils import scatter, softmax

from tests.frontend import scatter_stand_in
from tests.frontend.layers import EDGE, FUSED, PARTLY, WIDTH, Sum

scatter_package = importlib.import_module("torch_scatter") if find_spec("torch_scatter") else scatter_stand_in
FORMS: dict[str, tuple[type[nn.Module], str]] = {}
"""Name -> the layer, and what becomes of the gathers and reductions of its first graph."""


def form(what):
    def register(kind):
        FORMS[kind.__name__] = kind, what
        return kind

    return register


# Rows that a forward gathers beside propagate -------------------------------------------------------------------------


class Scaled(Sum):
    """A sum of sources, each scaled by an input of the edge."""

    def message(self, x_j, edge):
        return x_j * edge


@form(FUSED)
class DistancesBesidePropagate(Sum):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1, 16), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, x, edge_index, edge):
        place = x[:, :3]
        distance = ((place[edge_index[0]] - place[edge_index[1]]) ** 2).sum(-1, keepdim=True)
        return self.propagate(edge_index, x=x, edge=self.mlp(distance))

    def message(self, x_j, edge):
        return x_j * edge


@form(FUSED)
class RowsOfParts(Scaled):
    def forward(self, x, edge_index, edge):
        row, col = edge_index
        share = x[row, :] * x[col, 1:2] + x[col, 2].unsqueeze(1) + x[..., row, -1:]
        return self.propagate(edge_index, x=x, edge=share)


@form(FUSED)
class RowsByGather(Scaled):
    def forward(self, x, edge_index, edge):
        rows = x.gather(0, edge_index[0].unsqueeze(-1).expand(-1, x.size(1)))
        other = torch.gather(x, 0, edge_index[1].view(-1, 1).expand_as(rows))
        return self.propagate(edge_index, x=x, edge=rows.tanh() - other)


@form(FUSED)
class RowsOfAPart(Scaled):
    """A gather of a part of each row, which is no row."""

    def forward(self, x, edge_index, edge):
        part = x.gather(0, edge_index[0].view(-1, 1).expand(-1, 3))
        return self.propagate(edge_index, x=x, edge=part.sum(-1, keepdim=True))


@form(FUSED)
class RowsOfAnEmbedding(Scaled):
    def forward(self, x, edge_index, edge):
        return self.propagate(edge_index, x=x, edge=embedding(edge_index[0], x) * embedding(edge_index[1], x))


@form(FUSED)
class RowsOfBothEnds(Scaled):
    def forward(self, x, edge_index, edge):
        source, target = x[edge_index]
        both = x.relu()[edge_index]
        return self.propagate(edge_index, x=x, edge=source - target + both[-1] * both[0])


@form(FUSED)
class RowsByCopiesOfTheEdges(Scaled):
    def forward(self, x, edge_index, edge):
        row, _ = edge_index.long()
        _, col = edge_index.clone()
        first = edge_index.contiguous().detach()[0]
        return self.propagate(edge_index, x=x, edge=x[row] * x[col] - x.tanh()[first])


@form(PARTLY)
class RowsByEditedCopies(Scaled):
    def forward(self, x, edge_index, edge):
        other = edge_index.clone()
        other[0] = other[1]
        return self.propagate(edge_index, x=x, edge=x[other[0]])


@form(FUSED)
class RowsOfResults(Scaled):
    """An input of the edge that only the second sum reads, made of the result of the first one."""

    def forward(self, x, edge_index, edge):
        first = self.propagate(edge_index, x=x, edge=x[edge_index[0]])
        change = (first[edge_index[1]] - x[edge_index[0]]).tanh()
        return self.propagate(edge_index, x=first, edge=change * edge[:, :1]), change


@form(FUSED)
class RowsOfTwoTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x, edge_index, edge):
        table = self.lin(x)
        rows = table.index_select(0, edge_index[0])[:, :WIDTH] * torch.index_select(table, 0, edge_index[1])[:, WIDTH:]
        return scatter(torch.cat([rows, x[edge_index[0]], edge], -1), edge_index[1], 0, x.size(0), "mean")


class RowsOfPairs(nn.Module):
    """Rows of two sets of nodes, taken by index in a bipartite graph."""

    def forward(self, sources, targets, edge_index, edge):
        row, col = edge_index
        messages = sources[row, :] * targets[col, :1] + targets.gather(0, col.view(-1, 1).expand(-1, WIDTH))
        both = torch.cat([messages, edge, sources[row, 1:3]], -1)
        return scatter(both, col, 0, targets.size(0), "sum")


# Functions of torch_scatter -------------------------------------------------------------------------------------------


@form(FUSED)
class LargestOfThePackage(nn.Module):
    def forward(self, x, edge_index, edge):
        row, col = edge_index
        messages = torch.cat([x[row] * x[col].tanh(), edge], -1)
        return scatter_package.scatter_max(messages, col, dim=0, dim_size=x.size(0))[0]


@form(FUSED)
class LargestOfAsManyAsThereAre(nn.Module):
    def forward(self, x, edge_index, edge):
        row, col = edge_index
        found, _ = scatter_package.scatter_max(x[row] * x[col], col, dim=0)
        return found.relu()


@form(FUSED)
class SmallestOfThePackage(Sum):
    def aggregate(self, inputs, index, dim_size=None):
        return scatter_package.scatter_min(inputs, index, dim=self.node_dim, dim_size=dim_size)[0]

    def message(self, x_i, x_j, edge):
        return (x_i - x_j) * edge[:, :1]


@form(FUSED)
class SoftmaxOfThePackage(Sum):
    def message(self, x_i, x_j, index, size_i):
        score = (x_i * x_j).sum(-1)
        return scatter_package.scatter_softmax(score, index, dim=0, dim_size=size_i).unsqueeze(-1) * x_j


@form(FUSED)
class SoftmaxOfChannels(Sum):
    def message(self, x_i, x_j, index):
        return scatter_package.scatter_softmax(x_i - x_j, index, dim=0) * x_j


@form(PARTLY)
class PlacesOfTheLargest(nn.Module):
    def forward(self, x, edge_index, edge):
        row, col = edge_index
        found, place = scatter_package.scatter_max(x[row] * edge[:, :1], col, dim=0, dim_size=x.size(0))
        return found * place


# Batches before the nodes ---------------------------------------------------------------------------------------------


class Batched(Sum):
    """A layer of features [B, N, F]."""

    batch: tuple[int, ...] = (3,)

    def __init__(self, aggr="add"):
        super().__init__(aggr, node_dim=-2)


@form(FUSED)
class BatchOfMaps(Batched):
    def __init__(self):
        super().__init__("mean")
        self.lin = nn.Linear(2 * WIDTH, WIDTH)

    def message(self, x_i, x_j):
        return self.lin(torch.cat([x_i, x_j - x_i], -1)).relu()


@form(FUSED)
class BatchOfGates(Batched):
    def __init__(self):
        super().__init__()
        self.lin, self.gate = nn.Linear(2 * WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 1), nn.Sigmoid())

    def forward(self, x, edge_index, edge):
        return self.propagate(edge_index, x=x, edge=edge[:, 0], size=(x.size(1), x.size(1)))

    def message(self, x_i, x_j, edge):
        hidden = torch.nn.functional.silu(self.lin(torch.cat([x_i, x_j], -1)))
        return self.gate(hidden) * hidden * edge.view(-1, 1)


@form(FUSED)
class BatchBySlices(nn.Module):
    batch = (3,)

    def forward(self, x, edge_index, edge):
        row, col = edge_index
        messages = x[:, row] * x[..., col, :].tanh() + edge[None, :, :1]
        means = scatter(messages[:, :, :2], col, dim=1, dim_size=x.size(1), reduce="mean")
        return torch.zeros_like(x).index_add_(1, col, messages), means


@form(FUSED)
class BatchOfSoftmaxes(Batched):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index, edge):
        return self.propagate(edge_index, x=x, query=self.query(x), size=(x.size(1), x.size(1)))

    def message(self, x_j, query_i, query_j, index, size_i):
        score = (query_i * query_j).sum(-1, keepdim=True)
        return softmax(score, index, num_nodes=size_i, dim=-2) * x_j


@form(FUSED)
class BatchOfNetworks(Batched):
    """A network on rows of edges that are the same for the items of a batch, whose results are returned too."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * WIDTH + EDGE, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, edge_index, edge):
        total, change = self.propagate(edge_index, x=x, edge=edge.unsqueeze(0).expand(x.size(0), -1, -1))
        return x + total, change

    def message(self, x_i, x_j, edge):
        return self.norm(self.net(torch.cat([edge, x_j, x_i], -1)))

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return super().aggregate(inputs, index, ptr, dim_size), inputs


@form(FUSED)
class BatchOfSteps(Batched):
    batch = (2, 3)

    def __init__(self):
        super().__init__("max")
        self.lin = nn.Linear(WIDTH, WIDTH)

    def message(self, x_i, x_j):
        return self.lin(x_i - x_j).softmax(-1) * x_j.norm(dim=-1, keepdim=True)


@form(FUSED)
class BatchOfEdges(Batched):
    """Inputs of edges that differ in the items of a batch."""

    def forward(self, x, edge_index, edge):
        return self.propagate(edge_index, x=x, edge=edge.unsqueeze(0) * x[:, :1, :1])

    def message(self, x_j, edge):
        return torch.cat([x_j, edge], -1).relu()


@form(FUSED)
class BatchBehindNodes(Sum):
    batch = (3,)

    def forward(self, x, edge_index, edge):
        return self.propagate(edge_index, x=x.transpose(0, 1)).transpose(0, 1)

    def message(self, x_i, x_j):
        both = torch.stack([x_i.transpose(0, 1), x_j.transpose(0, 1)])
        return both.amax(0).movedim(1, 0) + both[1, 2].unsqueeze(1)


@form(PARTLY)
class BatchOverEdges(Batched):
    """A product over the edges themselves, which no program has."""

    def message(self, x_i, x_j, edge):
        return x_j + (x_i.transpose(1, 2) @ edge).sum()


# Lists of results -----------------------------------------------------------------------------------------------------


class Heads(Sum):
    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])


@form(FUSED)
class SumOfAStack(Heads):
    def message(self, x_i, x_j):
        return torch.stack([lin(x_i) * x_j for lin in self.maps]).sum(0)


@form(FUSED)
class MeanOfHeads(Heads):
    def message(self, x_i, x_j, index, size_i):
        heads = []
        for lin in self.maps:
            rows = lin(x_j)
            heads.append(rows * softmax((rows * x_i).sum(-1), index, num_nodes=size_i).unsqueeze(-1))
        return torch.stack(heads, dim=0).mean(dim=0)


@form(FUSED)
class JoinOfHeads(Heads):
    def message(self, x_i, x_j):
        heads = torch.stack([lin(x_i) * x_j for lin in self.maps], 1)
        return torch.cat([heads.flatten(1), torch.cat([lin(x_j) for lin in self.maps], -1)], 1)


@form(FUSED)
class JoinSeenAsHeads(Sum):
    """Joins of parts whose numbers other sizes of a row mix."""

    def message(self, x_i, x_j):
        joined = torch.cat([x_i[:, :2], x_j[:, :2], x_i[:, 2:4], x_j[:, 2:4]], -1)
        heads = joined.view(-1, 2, 4)
        sums = torch.cat([heads.sum(-1), heads.sum(1), joined.view(-1, 4, 2).sum(1), heads[..., 1]], -1)
        columns = torch.cat([x_i[:, :1], x_j[:, :1]], -1)
        return sums + columns.sum(-1, keepdim=True) * columns.view(-1, 1, 2).sum(2) + columns[:, 1:]


# Edits of parts -------------------------------------------------------------------------------------------------------


@form(FUSED)
class SetsColumns(Sum):
    def message(self, x_i, x_j, edge):
        x_j[:, 0] = x_i[:, 1]
        x_j[:, 2:4] = edge[:, :1]
        x_j[..., -1] = 2.0
        return x_j.tanh() * x_i


@form(FUSED)
class FillsParts(Sum):
    def message(self, x_i, x_j):
        half = WIDTH // 2
        rows, sums = torch.empty_like(x_j), torch.zeros_like(x_j)
        rows[:, :half] = x_j[:, half:] * x_i[:, :half]
        rows[:, half:] = -x_j[:, :half]
        sums[..., 3] = x_i.sum(-1)
        return rows + sums


@form(FUSED)
class SetsPartsOfHeads(Sum):
    def message(self, x_i, x_j):
        heads = (x_i * x_j).view(-1, 2, WIDTH // 2) + 0.0
        heads[:, 1, 1:3] = x_j[:, :2]
        heads[:, 0] = heads[:, 1] * 2
        return heads.flatten(1)


@form(FUSED)
class EditsParts(Sum):
    def message(self, x_i, x_j, edge):
        heads = x_j.view(-1, 2, WIDTH // 2)
        heads[:, 0] *= 2
        first = x_j[:, 0]
        first.add_(edge[:, 0])
        x_j.narrow(1, 2, 3).mul_(x_i[:, :3])
        heads[..., -1].sub_(first.unsqueeze(-1))
        return x_j + x_i * heads.flatten(1)


@form(FUSED)
class EditsARowInAnotherShape(Sum):
    def message(self, x_i, x_j):
        row = x_j.unsqueeze(1)
        row += x_i.unsqueeze(1)
        return x_j * row.squeeze(1).select(1, 2).view(-1, 1)


@form(FUSED)
class ReadsBeforeAndAfter(Sum):
    def message(self, x_i, x_j):
        half = x_j[:, : WIDTH // 2]
        before = half * 1.0
        half *= 3.0
        middle = x_j.tanh()
        half += x_i[:, WIDTH // 2 :]
        return torch.cat([before, half], -1) * x_j + middle


@form(FUSED)
class SetsAPartToAnother(Sum):
    def message(self, x_i, x_j):
        x_j[:, :3] = x_j[:, 2:5]
        x_j[:, 0] = x_j[:, 0]
        x_j[:, 1:3][:, 0] = x_i[:, 0]
        return x_j


@form(PARTLY)
class EditsATransposedView(Sum):
    def message(self, x_i, x_j):
        columns = (x_i * x_j).t()
        columns[1] += 1.0
        return columns.t().sort(-1).values + x_j


@form(PARTLY)
class EditsEverySecond(Sum):
    def message(self, x_i, x_j):
        x_j[:, ::2] *= 2.0
        return x_j + x_i


@form(PARTLY)
class EditsSomeEdges(Sum):
    def message(self, x_i, x_j):
        x_j[1:].mul_(2.0)
        return x_j + x_i
