"""Layers at which capture or gradients may go wrong run as PyG's."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing

from pyg_dfgnn import report
from pyg_dfgnn.nn import accelerate
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.settings import local_settings
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device


class Narrow(MessagePassing):
    """Messages of rows of 64 numbers alone."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j.view(-1, 64) * 2.0 + x_j


class Deleted(MessagePassing):
    """A row of edges that is kept between two methods, and that TorchDynamo loses."""

    def __init__(self):
        super().__init__(aggr="add")
        self.rows = None

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        self.rows = x_i + x_j
        return torch.sigmoid(self.rows) * x_j

    def update(self, out):
        rows = self.rows
        del self.rows
        return out, rows


def test_a_layer_that_dynamo_breaks_runs_as_it_is():
    layer, x, edge_index = Deleted(), torch.randn(5, 8), torch.randint(5, (2, 9))
    marked = accelerate(copy.deepcopy(layer))
    with emulated_device(), local_settings(fallback="silent"):
        for _ in range(4):
            torch.testing.assert_close(marked(x, edge_index), layer(x, edge_index))
        assert "its captured forward fails" in str(report(marked))


def test_errors_of_a_layers_own_are_raised_as_they_are():
    marked = accelerate(Narrow())
    with emulated_device(), local_settings(fallback="silent"):
        with pytest.raises(RuntimeError, match="shape"):
            marked(torch.randn(5, 60), torch.randint(5, (2, 9)))
        assert marked(torch.randn(5, 64), torch.randint(5, (2, 9))).shape == (5, 64)
        assert not any("captured forward fails" in row.why for row in report(marked))


class Guarded(MessagePassing):
    """Distances without those of 0, below the infinite slope of a root."""

    def __init__(self, guard):
        super().__init__(aggr="add")
        self.guard = guard

    def forward(self, x, position, edge_index):
        return self.propagate(edge_index, x=x, position=position)

    def message(self, x_j, position_i, position_j):
        return self.guard((position_i - position_j).square().sum(-1, keepdim=True)).sqrt() * x_j


GUARDS = {
    "where": lambda d: torch.where(d > 0, d, torch.zeros_like(d)),
    "masked_fill": lambda d: d.masked_fill(d == 0, 0.0),
    "relu": lambda d: (d - 0.5).relu(),
    "clamp": lambda d: (d - 0.5).clamp(min=0),
    "maximum": lambda d: torch.maximum(d - 0.5, torch.zeros_like(d)),
}


@needs_compiler
@pytest.mark.parametrize("name", GUARDS)
def test_gradients_below_an_infinite_slope_are_pygs(name):
    torch.manual_seed(0)
    layer, edge_index = Guarded(GUARDS[name]), torch.randint(9, (2, 40))
    edge_index[:, :3] = torch.arange(3)
    marked = accelerate(copy.deepcopy(layer))
    x, position = torch.randn(9, 4), torch.randn(9, 3, requires_grad=True)
    (want,) = torch.autograd.grad(layer(x, position, edge_index).sum(), position)
    with emulated_device() as launched:
        for _ in range(3):
            (found,) = torch.autograd.grad(marked(x, position, edge_index).sum(), position)
    assert launched and want.isfinite().all()
    torch.testing.assert_close(found, want, **elementwise("float32"))


@needs_compiler
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("name", ["LEConv", "NNConv"])
def test_a_checkpoint_runs_again_what_it_has_run(name, is_warm):
    """It ends its second forward by an exception; and of NNConv it is found meanwhile that no kernel takes it."""
    edge_index, attributes = torch.randint(6, (2, 20)), torch.randn(20, 3)
    network = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 16))
    layer = pyg.LEConv(4, 4) if name == "LEConv" else pyg.NNConv(4, 4, network)
    rest = (edge_index,) if name == "LEConv" else (edge_index, attributes)
    results, drawn = [], torch.randn(6, 4)
    for each, dtype in ((accelerate(copy.deepcopy(layer)), torch.float32), (layer.double(), torch.float64)):
        x, *arguments = (t.to(dtype) if t.is_floating_point() else t for t in (drawn, *rest))
        x = x.detach().clone().requires_grad_()
        with emulated_device(), local_settings(fallback="silent"):
            if is_warm:
                each(x, *arguments)
            out = checkpoint(each, x, *arguments, use_reentrant=False)
            out.sin().sum().backward()
        results.append([x.grad.double(), *(p.grad.double() for p in each.parameters())])
    torch.testing.assert_close(*results, **elementwise("float32"))
