"""Messages that a map makes of radial functions of positions: two short rows meet in the gradient of its weight."""

import copy

import pytest
import torch
from torch import nn
from torch_geometric.nn import MessagePassing

from pyg_dfgnn import accelerate, local_settings
from pyg_dfgnn.reference.tolerances import assert_all_close
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.nn.message_cases import watched

NODES, EDGES = 12, 20
pytestmark = needs_compiler


class Radial(MessagePassing):
    """Maps Gaussians or powers of the distance, whose weights are multiplied with what `form` says."""

    def __init__(self, centres, channels, form, learns, is_apart):
        super().__init__(aggr="mean")
        self.centres = nn.Parameter(torch.linspace(0, 3, centres), requires_grad=bool(learns))
        self.is_apart = is_apart
        self.lin, self.form = nn.Linear(centres, channels, bias=False), form

    def forward(self, pos, x, edge_index):
        weight = self.edge_updater(edge_index, pos=pos) if self.is_apart else None
        return self.propagate(edge_index, pos=pos, x=x, weight=weight)

    def edge_update(self, pos_i, pos_j):
        distance = (pos_i - pos_j).norm(dim=-1, keepdim=True)
        if self.form == "powers":
            return self.lin(torch.cat([distance**k for k in range(self.lin.in_features)], dim=-1))
        return self.lin(torch.exp(-2 * (distance - self.centres) ** 2))

    def message(self, pos_i, pos_j, x_j, weight):
        difference = pos_i - pos_j
        weight = self.edge_update(pos_i, pos_j) if weight is None else weight
        if self.form == "weights":
            return weight
        return difference * weight.mean(-1, keepdim=True) if self.form == "vectors" else x_j * weight


def results(layer, is_asked, dtype):
    generator = torch.Generator().manual_seed(0)
    pos = torch.randn(NODES, 3, generator=generator).to(dtype).requires_grad_(is_asked)
    x = torch.randn(NODES, 1, generator=generator).to(dtype)
    out = layer(pos, x, torch.randint(NODES, (2, EDGES), generator=generator))
    out.square().sum().backward()
    leaves = {"pos": pos, **dict(layer.named_parameters())}
    return {"out": out, **{f"d_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}}


@pytest.mark.parametrize("is_asked", [True, False], ids=["positions", "fixed"])
@pytest.mark.parametrize("form, learns", [("weights", 0), ("vectors", 1), ("features", 0), ("powers", 0)])
@pytest.mark.parametrize("is_apart", [True, False], ids=["apart", "inside"])
@pytest.mark.parametrize("centres, channels", [(8, 32), (32, 8)])
def test_radial_functions(centres, channels, form, learns, is_apart, is_asked):
    torch.manual_seed(1)
    layer = Radial(centres, channels, form, learns, is_apart)
    expected = results(copy.deepcopy(layer).double(), is_asked, torch.float64)
    with emulated_device(), local_settings(fallback="silent"), watched() as calls:
        actual = results(accelerate(layer), is_asked, torch.float32)
    assert actual.keys() == expected.keys()
    assert_all_close({name: (actual[name], expected[name]) for name in expected}, op="gemm")
    assert all(trace.program is not None for _, _, trace, _ in calls) and calls
