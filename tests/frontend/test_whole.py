"""Whole models by `torch.compile(model, backend="pyg_dfgnn")`: regions are operators, all else is another backend's."""

import copy

import pytest
import torch

from pyg_dfgnn.ops.relational.backend import KERNELS, running
from pyg_dfgnn.reference.tolerances import elementwise
from tests.frontend.wide import WIDE, arguments
from tests.kernels.emulated import emulated_device
from tests.nn.message_users import NodeGatedGCN

NODES, CHANNELS = 17, 8
EAGER = {"backend": "aot_eager"}


class Net(torch.nn.Module):
    """Two layers with what is no layer around them."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = (
            NodeGatedGCN(CHANNELS),
            NodeGatedGCN(CHANNELS),
            torch.nn.BatchNorm1d(CHANNELS),
        )

    def forward(self, x, edge_index):
        return self.second(self.norm(self.first(x, edge_index)).relu(), edge_index).log_softmax(dim=-1)


def results(model, x, edge_index):
    leaf = x.clone().requires_grad_()
    out = model(leaf, edge_index)
    return [out, *torch.autograd.grad(out.sin().sum(), [leaf, *model.parameters()])]


def test_a_model_is_one_graph_for_all_sizes(captured):
    net, x = Net().double(), torch.randn(NODES, CHANNELS).double()
    own = copy.deepcopy(net)
    net.compile(backend="pyg_dfgnn", dynamic=True, fullgraph=True, options=EAGER)
    numbers = set()
    for edges in (40, 71, 90):
        edge_index = torch.randint(0, NODES, (2, edges))
        torch.testing.assert_close(
            results(net, x, edge_index), results(own, x, edge_index), **elementwise("float64/programs")
        )
        numbers.add(len(captured))
    # What TorchDynamo begins anew in its first call is compiled twice.
    assert len(numbers) == 1 and {graph.counts for graph in captured} == {(8, 8)}


@pytest.mark.parametrize("name", ["GATv2Conv", "GINEConv"])
def test_layers_equal_pygs(name, captured):
    layer = WIDE[name][0](16).double()
    own = copy.deepcopy(layer)
    layer.compile(backend="pyg_dfgnn", dynamic=True, options=EAGER)
    x, edge_index = torch.randn(NODES, 16).double(), torch.randint(0, NODES, (2, 60))
    for _ in range(2):
        found = []
        for each in (layer, own):
            leaf = x.clone().requires_grad_()
            out = each(*arguments(name, leaf, edge_index))
            found.append([out, *torch.autograd.grad(out.sin().sum(), [leaf, *each.parameters()])])
        torch.testing.assert_close(*found, **elementwise("float64/programs"))
    assert any(graph.regions for graph in captured)


def test_kernels_run_and_what_they_do_not_take_is_torchs(captured):
    net = Net()
    own, x, edge_index = copy.deepcopy(net), torch.randn(NODES, CHANNELS), torch.randint(0, NODES, (2, 60))
    net.compile(backend="pyg_dfgnn", dynamic=True, options=EAGER)
    with emulated_device() as launched, running(KERNELS):
        found = results(net, x, edge_index)
    torch.testing.assert_close(found, results(own, x, edge_index), **elementwise("float32"))
    assert launched and captured[0].counts == (8, 8)


def test_random_numbers_on_edges_are_torchs(captured):
    layer = WIDE["GATConv"][0](16).double()
    layer.dropout = 0.5
    layer.compile(backend="pyg_dfgnn", dynamic=True, options=EAGER)
    layer(torch.randn(NODES, 16).double(), torch.randint(0, NODES, (2, 60)))
    assert not any(region.has_seed for graph in captured for region in graph.regions)


def test_without_kernels_all_is_the_other_backends(captured):
    net = Net()
    own, x, edge_index = copy.deepcopy(net), torch.randn(NODES, CHANNELS), torch.randint(0, NODES, (2, 60))
    net.compile(backend="pyg_dfgnn", dynamic=True, options=EAGER)
    with running(KERNELS):
        torch.testing.assert_close(results(net, x, edge_index), results(own, x, edge_index), **elementwise("float32"))
    assert not captured
