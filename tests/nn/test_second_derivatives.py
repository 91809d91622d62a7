"""Forces: gradients that a loss reads are differentiated again, against PyG's layers in float64."""

import copy
from functools import partial

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing

from pyg_dfgnn import accelerate, local_settings
from pyg_dfgnn.ops import eager
from pyg_dfgnn.reference.tolerances import BACKWARD, elementwise, relative_error, tolerance, worst_beside
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device

pytestmark = needs_compiler
NODES, FEATURES, CHANNELS = 12, 6, 4
# A hub (0), edges that are there twice, self-loops, and nodes without edges (10, 11).
_RING = torch.arange(10)
EDGES = torch.cat(
    [
        torch.stack([_RING, torch.zeros(10, dtype=torch.long)]),
        torch.stack([_RING, _RING.roll(1)]),
        torch.tensor([[3, 3, 5, 5, 0, 0], [4, 4, 5, 5, 7, 2]]),
    ],
    dim=1,
)
NUM_EDGES = EDGES.size(1)


def mlp(width):
    return nn.Sequential(nn.Linear(width, 8), nn.SiLU(), nn.Linear(8, CHANNELS))


class CFConv(MessagePassing):
    """SchNet's continuous filter of the distances of nodes."""

    def __init__(self, channels, centres=5):
        super().__init__(aggr="add")
        self.lin = nn.Linear(channels, channels, bias=False)
        self.filter = nn.Sequential(nn.Linear(centres, channels), nn.Softplus(), nn.Linear(channels, channels))
        self.register_buffer("centres", torch.linspace(0, 3, centres))

    def forward(self, x, edge_index, pos):
        source, target = edge_index
        # A self-loop has no direction.
        distance = ((pos[source] - pos[target]).square().sum(-1, keepdim=True) + 1e-2).sqrt()
        weight = self.filter((-((distance - self.centres) ** 2)).exp()) * (0.5 * distance).cos()
        return self.propagate(edge_index, x=self.lin(x), weight=weight)

    def message(self, x_j, weight):
        return x_j * weight


class Radial(MessagePassing):
    """Distances, and a map of functions of them, within the message."""

    def __init__(self):
        super().__init__(aggr="mean")
        self.lin = nn.Linear(5, FEATURES)
        self.register_buffer("centres", torch.linspace(0, 3, 5))

    def forward(self, x, edge_index, pos):
        return self.propagate(edge_index, x=x, pos=pos)

    def message(self, x_j, pos_i, pos_j):
        distance = ((pos_i - pos_j).square().sum(-1, keepdim=True) + 1e-2).sqrt()
        return self.lin(torch.exp(-2 * (distance - self.centres) ** 2)) * x_j


class SchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(FEATURES, 8)
        self.convs = nn.ModuleList(CFConv(8) for _ in range(2))
        self.out = mlp(8)

    def forward(self, x, edge_index, pos):
        x = self.embedding(x)
        for conv in self.convs:
            x = x + conv(x, edge_index, pos).tanh()
        return self.out(x)


DEGREES = torch.tensor([2, 4, 3, 1, 1, 1, 1, 0, 0, 0, 1])
TYPES = torch.arange(NUM_EDGES) % 3
LAYERS = {
    "gat": (lambda: pyg.GATConv(FEATURES, CHANNELS, heads=2, edge_dim=3), {"edge_attr": (NUM_EDGES, 3)}),
    "gatv2": (lambda: pyg.GATv2Conv(FEATURES, CHANNELS, heads=2), {}),
    "gatv2 edges": (lambda: pyg.GATv2Conv(FEATURES, CHANNELS, heads=2, edge_dim=3), {"edge_attr": (NUM_EDGES, 3)}),
    "transformer": (lambda: pyg.TransformerConv(FEATURES, CHANNELS, heads=2), {}),
    "transformer edges": (
        lambda: pyg.TransformerConv(FEATURES, 8, heads=2, edge_dim=3),
        {"edge_attr": (NUM_EDGES, 3)},
    ),
    "agnn": (lambda: pyg.AGNNConv(), {}),
    "sage mean": (lambda: pyg.SAGEConv(FEATURES, CHANNELS), {}),
    "sage max": (lambda: pyg.SAGEConv(FEATURES, CHANNELS, aggr="max"), {}),
    "gin": (lambda: pyg.GINConv(mlp(FEATURES), train_eps=True), {}),
    "gine": (lambda: pyg.GINEConv(mlp(FEATURES), edge_dim=3), {"edge_attr": (NUM_EDGES, 3)}),
    "gcn": (lambda: pyg.GCNConv(FEATURES, CHANNELS), {}),
    "gcn weights": (lambda: pyg.GCNConv(FEATURES, CHANNELS), {"edge_weight": (NUM_EDGES,)}),
    "graph conv": (lambda: pyg.GraphConv(FEATURES, CHANNELS), {"edge_weight": (NUM_EDGES,)}),
    "gated": (lambda: pyg.ResGatedGraphConv(FEATURES, CHANNELS), {}),
    "pna": (
        lambda: pyg.PNAConv(FEATURES, CHANNELS, ["mean", "min", "max", "std", "var"], ["identity", "linear"], DEGREES),
        {},
    ),
    "rgcn": (lambda: pyg.RGCNConv(FEATURES, CHANNELS, 3), {"edge_type": TYPES}),
    "rgat": (lambda: pyg.RGATConv(FEATURES, CHANNELS, 3, heads=2), {"edge_type": TYPES}),
    "radial": (Radial, {"pos": (NODES, 3)}),
    "schnet": (SchNet, {"pos": (NODES, 3)}),
}


OF_TORCH = ["sage max", "pna"]
"""Layers whose second derivatives torch's operators compute."""


def forces(layer, dtype, arguments):
    """Energy, its gradients, and the gradients of a loss of both in all inputs and parameters."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.rand(shape, generator=generator).add(0.1).to(dtype).requires_grad_()

    leaves = {"x": draw(NODES, FEATURES)}
    leaves |= {name: draw(*shape) for name, shape in arguments.items() if isinstance(shape, tuple)}
    energy = layer(leaves["x"], EDGES, **{n: leaves.get(n, given) for n, given in arguments.items()}).sin().sum()
    found = torch.autograd.grad(energy, list(leaves.values()), create_graph=True)
    loss = energy.square() + sum((force + 0.5).square().sum() for force in found)
    loss.backward()
    results = {f"force of {name}": force.detach() for name, force in zip(leaves, found)}
    every = leaves | dict(layer.named_parameters())
    return results | {f"grad {name}": leaf.grad for name, leaf in every.items() if leaf.grad is not None}


@pytest.mark.parametrize("name", LAYERS)
def test_forces(name, monkeypatch):
    make, arguments = LAYERS[name]
    monkeypatch.setattr(eager, "_told", told := set())
    torch.manual_seed(1)
    layer = make()
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.5)
    expected = forces(copy.deepcopy(layer).double(), torch.float64, arguments)
    pygs = forces(copy.deepcopy(layer), torch.float32, arguments)
    with emulated_device() as launched:
        actual = forces(accelerate(layer), torch.float32, arguments)
    assert launched and actual.keys() == expected.keys()
    assert bool(told) is (name in OF_TORCH)
    # A softmax does not see the key's bias.
    expected.pop("grad lin_key.bias", None)
    errors, own = (
        {name: relative_error(found[name], want) for name, want in expected.items()} for found in (actual, pygs)
    )
    worst = worst_beside(errors, tolerance(torch.float32, BACKWARD, "relational").relative, own)
    assert worst.is_right, worst


def twins(name):
    """A layer in float32 that is accelerated, and PyG's in float64."""
    torch.manual_seed(1)
    layer = LAYERS[name][0]()
    return accelerate(copy.deepcopy(layer)), layer.double()


SOME = ["gatv2", "gin", "rgcn", "gated"]


def rest_of(name):
    return {key: value for key, value in LAYERS[name][1].items() if not isinstance(value, tuple)}


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_hessians(name, vectorize):
    results, drawn = [], torch.randn(NODES, FEATURES)
    for layer in twins(name):
        x = drawn.to(next(layer.parameters()).dtype)
        with emulated_device(), local_settings(fallback="silent"):
            energy = partial(lambda layer, x: layer(x, EDGES, **rest_of(name)).sin().sum(), layer)
            results.append(torch.autograd.functional.hessian(energy, x, vectorize=vectorize).double())
    torch.testing.assert_close(*results, **elementwise("float32"))


@pytest.mark.parametrize("name", SOME)
def test_checkpointed_layers(name):
    results, drawn = [], torch.randn(NODES, FEATURES)
    for layer in twins(name):
        x = drawn.to(next(layer.parameters()).dtype).requires_grad_()
        with emulated_device(), local_settings(fallback="silent"):
            out = checkpoint(layer, x, EDGES, use_reentrant=False, **rest_of(name))
            (force,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
            results.append(torch.autograd.grad(force.square().sum(), x)[0].double())
    torch.testing.assert_close(*results, **elementwise("float32"))


def test_returned_weights():
    results, drawn = [], torch.randn(NODES, FEATURES)
    for layer in twins("gatv2"):
        x = drawn.to(next(layer.parameters()).dtype).requires_grad_()
        with emulated_device(), local_settings(fallback="silent"):
            out, (_, weights) = layer(x, EDGES, return_attention_weights=True)
            (force,) = torch.autograd.grad(out.sin().sum() + weights.sin().sum(), x, create_graph=True)
            results.append(torch.autograd.grad(force.square().sum(), x)[0].double())
    torch.testing.assert_close(*results, **elementwise("float32"))


def test_torchs_operators_are_told_once(caplog, monkeypatch):
    monkeypatch.setattr(eager, "_told", set())
    layer = accelerate(pyg.SAGEConv(FEATURES, CHANNELS, aggr="max"))
    x = torch.randn(NODES, FEATURES, requires_grad=True)
    with emulated_device():
        forces = [torch.autograd.grad(layer(x, EDGES).square().sum(), x, create_graph=True)[0] for _ in range(2)]
        assert caplog.messages == []
        sum(force.sum() for force in forces).backward()
    assert caplog.messages == [
        "torch's operators compute gradients of segment/copy/max, which are differentiated again"
    ]


@pytest.mark.parametrize("name", SOME)
def test_nothing_is_recorded_unless_asked_for(name, monkeypatch):
    monkeypatch.setattr(eager._Gradients, "apply", None)
    layer, _ = twins(name)
    x = torch.randn(NODES, FEATURES, requires_grad=True)
    with emulated_device(), local_settings(fallback="silent"):
        layer(x, EDGES, **rest_of(name)).sum().backward()
    assert x.grad is not None
