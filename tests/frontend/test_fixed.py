"""Layers that fix their number of nodes, as a number or by a parameter, and rows as long as there are nodes."""

import copy

import pytest
import torch
from torch import nn
from torch_geometric.utils import scatter, softmax

from tests.frontend.layers import EDGE, WIDTH, Sum
from tests.frontend.marks import compile_layer
from tests.frontend.test_layers import assert_equal, results

NODES = 11
GRAPHS = {
    "random": torch.randint(0, NODES, (2, 37), generator=torch.Generator().manual_seed(2)),
    "larger": torch.randint(0, NODES, (2, 60), generator=torch.Generator().manual_seed(3)),
    "isolated": torch.tensor([[0, 1, 2, 2], [1, 1, 0, 2]]),
    "duplicates": torch.tensor([[3, 3, 3, 1, 1, 5, 5], [2, 2, 2, 2, 2, 0, 0]]),
    "as-many-edges": torch.arange(2 * NODES).view(2, -1) % NODES,
    "empty": torch.zeros(2, 0, dtype=torch.int64),
}


class Table(Sum):
    """Features that are a parameter, as in recommendation."""

    def __init__(self):
        super().__init__("mean")
        self.table = nn.Embedding(NODES, WIDTH)

    def forward(self, x, edge_index, edge):
        return self.propagate(edge_index, x=x + self.table.weight, edge=edge)

    def message(self, x_i, x_j, edge):
        return x_i * x_j.tanh() + edge[:, :1]


class OnlyATable(Table):
    def forward(self, x, edge_index, edge):
        hidden = self.propagate(edge_index, x=self.table.weight, edge=edge)
        return torch.stack([hidden, self.propagate(edge_index, x=hidden, edge=edge)]).mean(0)


class Named(Sum):
    def forward(self, x, edge_index, edge):
        return self.propagate(edge_index, x=x, edge=edge, size=(NODES, NODES))

    def message(self, x_i, x_j, index):
        return softmax((x_i * x_j).sum(-1), index, num_nodes=NODES).unsqueeze(-1) * x_j / NODES


class Counted(Sum):
    """A network on edges of a batch, reduced to a number of receivers that is a number of the layer."""

    def __init__(self):
        super().__init__(node_dim=-2)
        self.receivers = NODES
        self.net = nn.Sequential(nn.Linear(2 * WIDTH + EDGE, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, edge_index, edge):
        edge = edge.unsqueeze(0).expand(2, -1, -1)
        return self.propagate(edge_index, x=torch.stack([x, 2 * x]), edge=edge)

    def message(self, x_i, x_j, edge):
        return self.norm(self.net(torch.cat([edge, x_j, x_i], -1)))

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return scatter(inputs, index, dim=self.node_dim, dim_size=self.receivers, reduce="sum")


class Receivers(Sum):
    """Targets that are a parameter, and as many sources as there are."""

    def __init__(self):
        super().__init__("max")
        self.table = nn.Parameter(torch.randn(7, WIDTH))

    def forward(self, x, edge_index, edge):
        edge_index = torch.stack([edge_index[0], edge_index[1] % 7])
        return self.propagate(edge_index, x=(x, self.table), edge=edge, size=(x.size(0), 7))

    def message(self, x_i, x_j):
        return x_i - x_j


@pytest.mark.parametrize("kind", [Table, OnlyATable, Named, Counted, Receivers])
def test_fixed_numbers_of_nodes_equal_pygs(kind, captured):
    torch.manual_seed(0)
    layer = kind().double()
    own = copy.deepcopy(layer)
    compile_layer(layer)
    for edge_index in GRAPHS.values():
        x = torch.randn(NODES, WIDTH, dtype=torch.float64, requires_grad=True)
        edge = torch.randn(edge_index.size(1), EDGE, dtype=torch.float64, requires_grad=True)
        assert_equal(*(results(each, [x, edge], (x, edge_index, edge)) for each in (layer, own)))
    every, inside = captured[0].counts
    assert every == inside > 0
    assert all(not region.reasons for graph in captured for region in graph.regions)


def test_another_number_of_nodes_is_captured_anew(captured):
    class Reduced(Sum):
        def aggregate(self, inputs, index, ptr=None, dim_size=None):
            return scatter(inputs, index, dim=0, dim_size=NODES, reduce="sum")

        def message(self, x_i, x_j):
            return x_i * x_j

    layer, own = compile_layer(Reduced().double()), Reduced().double()
    for nodes in (NODES, NODES - 2, NODES + 3, NODES):
        x = torch.randn(nodes, WIDTH, dtype=torch.float64, requires_grad=True)
        edge_index = torch.randint(0, min(nodes, NODES), (2, 30))
        assert_equal(*(results(each, [x], (x, edge_index, None)) for each in (layer, own)))
    assert len(captured) == 2 and captured[0].counts == (3, 3)


class AsWide(Sum):
    """Rows with as many features as there are nodes."""

    def __init__(self):
        super().__init__()
        self.table, self.lin = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index, edge):
        return self.propagate(edge_index, x=x[:WIDTH] + self.table, edge=edge)

    def message(self, x_i, x_j):
        return self.lin(x_i) * x_j


class Basis(Table):
    """As many functions of a distance, and vectors, as there are nodes."""

    def __init__(self):
        super().__init__()
        self.centers, self.vectors = nn.Parameter(torch.randn(NODES)), nn.Parameter(torch.randn(NODES, WIDTH))
        self.lin = nn.Linear(NODES, WIDTH)

    def message(self, x_i, x_j, edge):
        basis = torch.exp(-((edge[:, :1] - self.centers) ** 2))
        return self.lin(basis) * x_i + (x_j.unsqueeze(1) * self.vectors).sum(1)


class RowsOfNodes(nn.Module):
    """Rows of results that are as long as there are nodes."""

    def forward(self, x, edge_index, edge):
        count = x.size(0)
        rows = (edge[:, :1] * x[edge_index[0], :1]).expand(-1, count)
        return x.new_zeros(count, count).index_add(0, edge_index[1], rows) @ x


class RowsOfFixedNodes(nn.Module):
    def forward(self, x, edge_index, edge):
        rows = (edge[:, :1] * x[edge_index[0], :1]).expand(-1, NODES)
        return torch.zeros(NODES, NODES, dtype=x.dtype).index_add(0, edge_index[1], rows) @ x


@pytest.mark.parametrize("kind", [AsWide, Basis, RowsOfNodes, RowsOfFixedNodes])
def test_rows_as_long_as_there_are_nodes_are_pygs(kind, captured):
    torch.manual_seed(0)
    layer = kind().double()
    own = copy.deepcopy(layer)
    compile_layer(layer)
    for edges in (37, 60):
        x = torch.randn(NODES, WIDTH, dtype=torch.float64, requires_grad=True)
        edge = torch.randn(edges, EDGE, dtype=torch.float64, requires_grad=True)
        edge_index = torch.randint(0, WIDTH, (2, edges))
        assert_equal(*(results(each, [x, edge], (x, edge_index, edge)) for each in (layer, own)))
    reasons = captured[0].reasons
    assert any("rows meet another dimension" in reason for reason in reasons)
    assert not any("10000000" in reason for reason in reasons)
