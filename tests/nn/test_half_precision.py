"""Gradients in 16 bits are at most twice as far from float64 as PyG's: no rounding moves a number beyond a kink."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.nn import MessagePassing

import pyg_dfgnn
from pyg_dfgnn.reference.tolerances import largest_errors, worst_beside
from tests.covering import over
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device

NODES, EDGES, CHANNELS, NUMBERS, RELATIONS = 50, 300, 32, 6, 5


class Joined(MessagePassing):
    """A linear layer of both ends and the edge, under a function with kinks."""

    def __init__(self, function, aggr="add"):
        super().__init__(aggr=aggr)
        self.lin, self.function = nn.Linear(2 * CHANNELS + NUMBERS, CHANNELS), function

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i, x_j, e):
        return self.function(self.lin(torch.cat([x_i, x_j, e], dim=-1)))


class Separate(MessagePassing):
    """Layers of nodes that the messages add up, one of them in parts."""

    def __init__(self, aggr="add"):
        super().__init__(aggr=aggr)
        self.lin_i, self.lin_j = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, 2 * CHANNELS)
        self.lin_e = nn.Linear(NUMBERS, CHANNELS)

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i, x_j, e):
        value, shift = self.lin_j(x_j).chunk(2, dim=-1)
        return F.leaky_relu(self.lin_i(x_i) + self.lin_e(e) + shift, 0.2) * value


USERS = {
    "relu": lambda: Joined(F.relu),
    "leaky_relu": lambda: Joined(F.leaky_relu, "mean"),
    "abs": lambda: Joined(torch.abs),
    "clamp": lambda: Joined(lambda x: x.clamp(-0.5, 0.5)),
    "max": lambda: Joined(F.leaky_relu, "max"),
    "parts": lambda: Separate(),
    "parts max": lambda: Separate("max"),
}
LAYERS = {
    **{f"film {aggr}": lambda aggr=aggr: pyg.FiLMConv(CHANNELS, 16, RELATIONS, aggr=aggr) for aggr in ("add", "max")},
    "rgat": lambda: pyg.RGATConv(CHANNELS, 16, RELATIONS, heads=2),
    "rgcn max": lambda: pyg.RGCNConv(CHANNELS, 16, RELATIONS, aggr="max"),
    "gatv2": lambda: pyg.GATv2Conv(CHANNELS, 16, heads=2, edge_dim=NUMBERS, add_self_loops=False),
    "gine": lambda: pyg.GINEConv(nn.Linear(CHANNELS, 16), edge_dim=NUMBERS),
}
MAKE = {**USERS, **LAYERS}


def results(layer, call, grad):
    """Output and all gradients of a call, without what torch leaves out."""
    leaves = {f"input {n}": t.clone().requires_grad_() for n, t in enumerate(call) if t.is_floating_point()}
    arguments = [leaves.get(f"input {n}", t) for n, t in enumerate(call)]
    leaves |= dict(layer.named_parameters())
    out = layer(*arguments)
    grads = torch.autograd.grad(out, list(leaves.values()), grad[:, : out.size(1)].to(out), allow_unused=True)
    return {"out": out, **{f"grad {n}": g for n, g in zip(leaves, grads, strict=True) if g is not None}}


def assert_is_as_exact_as_pyg(name, dtype, sparse, device):
    torch.manual_seed(0)
    nodes = 20 * NODES if sparse else NODES
    layer = MAKE[name]()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    layer = layer.to(device, dtype)
    x, edge_index = torch.randn(nodes, CHANNELS), torch.randint(nodes, (2, EDGES))
    of_edges = torch.randint(RELATIONS, (EDGES,)) if name[:2] in ("fi", "rg") else torch.randn(EDGES, NUMBERS)
    call = [t.to(device, dtype) if t.is_floating_point() else t.to(device) for t in (x, edge_index, of_edges)]
    grad = torch.randn(nodes, CHANNELS).to(device, dtype).double()
    wide = [t.double() if t.is_floating_point() else t for t in call]
    expected = results(copy.deepcopy(layer).double(), wide, grad)
    with pyg_dfgnn.local_settings(fallback="silent"):
        pygs = results(copy.deepcopy(layer), call, grad)
        own = pyg_dfgnn.accelerate(copy.deepcopy(layer))
    with pyg_dfgnn.local_settings(fallback="error"):
        actual = results(own, call, grad)
    errors, beside = (largest_errors(r, expected) for r in (actual, pygs))
    worst = worst_beside(errors, torch.finfo(dtype).eps, beside)
    assert worst.is_right, worst


@needs_compiler
@over([("name", "dtype")], name=tuple(MAKE), dtype=(torch.bfloat16, torch.float16), sparse=(False, True))
def test_gradients(name, dtype, sparse):
    with emulated_device() as launched:
        assert_is_as_exact_as_pyg(name, dtype, sparse, "cpu")
    assert launched


@pytest.mark.cuda
@over([("name", "dtype")], name=tuple(MAKE), dtype=(torch.bfloat16, torch.float16), sparse=(False, True))
def test_gradients_on_a_gpu(name, dtype, sparse):
    assert_is_as_exact_as_pyg(name, dtype, sparse, "cuda")
