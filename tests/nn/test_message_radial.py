"""Messages that a map makes of radial functions of positions: two short rows meet in the gradient of its weight."""

import copy

import torch
from torch import nn
from torch_geometric.nn import MessagePassing

from pyg_dfgnn import accelerate, local_settings
from pyg_dfgnn.reference.tolerances import assert_all_close
from tests.covering import over
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.nn.message_cases import watched

NODES, EDGES = 12, 20
FORMS, BOTH = ("weights", "vectors", "features", "powers"), (True, False)
pytestmark = needs_compiler


class Radial(MessagePassing):
    """Maps Gaussians or powers of the distance, whose weights are multiplied with what `form` says."""

    def __init__(self, centres, form, is_apart):
        super().__init__(aggr="mean")
        self.centres = nn.Parameter(torch.linspace(0, 3, centres), requires_grad=form == "vectors")
        self.lin, self.form, self.is_apart = nn.Linear(centres, 256 // centres, bias=False), form, is_apart

    def forward(self, pos, x, edge_index):
        weight = self.edge_updater(edge_index, pos=pos) if self.is_apart else None
        return self.propagate(edge_index, pos=pos, x=x, weight=weight)

    def edge_update(self, pos_i, pos_j):
        distance = (pos_i - pos_j).norm(dim=-1, keepdim=True)
        if self.form == "powers":
            return self.lin(torch.cat([distance**k for k in range(self.lin.in_features)], dim=-1))
        return self.lin(torch.exp(-2 * (distance - self.centres) ** 2))

    def message(self, pos_i, pos_j, x_j, weight):
        weight = self.edge_update(pos_i, pos_j) if weight is None else weight
        if self.form == "vectors":
            return (pos_i - pos_j) * weight.mean(-1, keepdim=True)
        return weight if self.form == "weights" else x_j * weight


def results(layer, is_asked, dtype):
    generator = torch.Generator().manual_seed(0)
    pos = torch.randn(NODES, 3, generator=generator).to(dtype).requires_grad_(is_asked)
    x = torch.randn(NODES, 1, generator=generator).to(dtype)
    out = layer(pos, x, torch.randint(NODES, (2, EDGES), generator=generator))
    out.square().sum().backward()
    leaves = {"pos": pos, **dict(layer.named_parameters())}
    return {"out": out, **{f"d_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}}


@over([("form", "centres", "is_apart", "is_asked")], form=FORMS, centres=(8, 32), is_apart=BOTH, is_asked=BOTH)
def test_radial_functions(form, centres, is_apart, is_asked):
    torch.manual_seed(1)
    layer = Radial(centres, form, is_apart)
    expected = results(copy.deepcopy(layer).double(), is_asked, torch.float64)
    with emulated_device(), local_settings(fallback="silent"), watched() as graphs:
        actual = results(accelerate(layer), is_asked, torch.float32)
    assert actual.keys() == expected.keys()
    assert_all_close({name: (actual[name], expected[name]) for name in expected}, op="gemm")
    assert graphs.programs and (form != "features" or graphs.is_fused)
