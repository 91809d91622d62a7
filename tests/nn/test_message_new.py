"""Compiled layers on many edges that are new: families of kernels take them without measuring their graph."""

import copy

import pytest
import torch
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

import pyg_dfgnn
from pyg_dfgnn.errors import IdRangeError
from pyg_dfgnn.frontend import run
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops import visits
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.settings import Settings
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.new_edges import random_edges

pytestmark = needs_compiler
FEATURES = 8
SETTINGS = Settings()


class _Sum(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


class _Weighted(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, weight=x[edge_index[0], 0].sigmoid())

    def message(self, x_j, weight):
        return weight.view(-1, 1) * x_j


class _Dot(MessagePassing):
    def __init__(self):
        super().__init__(aggr="add")
        self.query, self.key = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, q=self.query(x), k=self.key(x), x=x)

    def message(self, q_i, k_j, x_j, index, ptr, size_i):
        return softmax((q_i * k_j).sum(dim=-1), index, ptr, size_i).view(-1, 1) * x_j


@pytest.fixture
def any_are_many(monkeypatch):
    for module in (visits, run):
        monkeypatch.setattr(module, "MANY_EDGES", 8)


@pytest.mark.parametrize(("kind", "is_family"), [(_Sum, True), (_Dot, True), (_Weighted, False)])
def test_graphs_that_come_again_are_measured(kind, is_family, any_are_many):
    layer = kind()
    double, compiled = copy.deepcopy(layer).double(), pyg_dfgnn.accelerate(copy.deepcopy(layer))
    for seed in range(3):
        edge_index, x = random_edges(30, 30, 90, seed=seed), torch.randn(30, FEATURES)
        measured = []
        for _ in range(4):
            results = []
            for each, inputs in ((compiled, x.clone()), (double, x.double())):
                inputs.requires_grad_()
                with emulated_device() as launched:
                    out = each(inputs, edge_index)
                    results.append([out.detach(), *torch.autograd.grad(out.sin().sum(), inputs)])
                assert bool(launched) is (each is compiled)
            for own, want in zip(*results, strict=True):
                torch.testing.assert_close(own, want.float(), **elementwise("float32"))
            graph = Graph.known(edge_index, 30, 30, False, False)
            measured.append(graph is not None and graph.is_measured)
        assert measured[-1] and not (is_family and measured[0])


def test_wrong_ids_are_named_in_the_next_call_at_the_latest(any_are_many):
    layer, x = pyg_dfgnn.accelerate(_Sum()), torch.randn(30, FEATURES)
    edge_index = random_edges(30, 30, 90)
    with emulated_device():
        layer(x, edge_index.clone())
        edge_index[0, 5] = 31
        with pytest.raises(IdRangeError, match="source id 31 of 30 nodes"):
            for _ in range(2):
                layer(x, edge_index)
