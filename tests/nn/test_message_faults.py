"""Layers at which capture or gradients may go wrong run as PyG's."""

import copy

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import degree

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
    """A row of edges that is kept between two methods, and deleted before the call ends, beside batch norm."""

    def __init__(self):
        super().__init__(aggr="add")
        self.norm = torch.nn.BatchNorm1d(8)
        self.rows = None

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        self.rows = x_i + x_j
        return torch.sigmoid(self.rows) * x_j

    def update(self, out):
        rows = self.rows
        del self.rows
        return self.norm(out), rows


class Stopped(Deleted):
    """A layer whose forward may end with an error after its batch norm, in another graph."""

    fails = False

    def forward(self, x, edge_index):
        out, _ = super().forward(x, edge_index)
        print(end="")
        if self.fails:
            raise ValueError(torch.rand(()).item())
        return out


def test_a_layer_may_delete_what_it_keeps_between_methods():
    layer, x, edge_index = Deleted(), torch.randn(5, 8), torch.randint(5, (2, 9))
    marked = accelerate(copy.deepcopy(layer))
    with emulated_device(), local_settings(fallback="silent"):
        for _ in range(4):
            torch.testing.assert_close(marked(x, edge_index), layer(x, edge_index))
            assert not hasattr(marked, "rows")
        torch.testing.assert_close(dict(marked.named_buffers()), dict(layer.named_buffers()))
        assert report(marked)[0].compiled


def test_what_a_failed_call_has_changed_is_undone_before_it_runs_again():
    layer, x, edge_index = Stopped(), torch.randn(5, 8), torch.randint(5, (2, 9))
    marked, said = accelerate(copy.deepcopy(layer)), []
    with emulated_device(), local_settings(fallback="silent"):
        for each in (layer, marked):
            torch.manual_seed(0)
            each(x, edge_index)
            each.fails = True
            with pytest.raises(ValueError) as error:
                each(x, edge_index)
            said.append(str(error.value))
    assert said[0] == said[1]
    torch.testing.assert_close(dict(marked.named_buffers()), dict(layer.named_buffers()))


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


class Forces(MessagePassing):
    """The gradient of an energy, which the forward itself computes."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, x, edge_index):
        x = x.detach().requires_grad_()
        energy = self.propagate(edge_index, x=x).tanh().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    def message(self, x_i, x_j):
        return self.lin(x_j - x_i).tanh()


@needs_compiler
def test_gradients_that_a_forward_computes_have_gradients():
    layer, x, edge_index = Forces(), torch.randn(7, 4), torch.randint(7, (2, 20))
    marked = accelerate(copy.deepcopy(layer))
    results = []
    with emulated_device() as launched, local_settings(fallback="silent"):
        for each in (marked, layer.double()):
            forces = each(x.to(each.lin.weight.dtype), edge_index)
            results.append(torch.autograd.grad(forces.square().sum(), each.lin.weight)[0].double())
    assert launched
    torch.testing.assert_close(*results, **elementwise("float32"))


class Scaled(MessagePassing):
    """Scores divided by a root that NumPy takes, and another one of a tensor of the forward's own."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x) / torch.tensor(3.0).sqrt()

    def message(self, x_i, x_j):
        return ((x_i * x_j).sum(-1, keepdim=True) / np.sqrt(x_j.dim() + 3)).tanh() * x_j


@needs_compiler
def test_numbers_of_numpy_and_of_tensors_are_numbers():
    layer, x, edge_index = Scaled(), torch.randn(7, 4), torch.randint(7, (2, 20))
    marked = accelerate(copy.deepcopy(layer))
    with emulated_device() as launched, local_settings(fallback="silent"):
        torch.testing.assert_close(marked(x, edge_index), layer(x, edge_index), **elementwise("float32"))
        assert launched == ["relational_traversal"]


class Normalised(MessagePassing):
    """Messages over a degree of their source, which is infinite at nodes that send none."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, x, edge_index):
        factor = degree(edge_index[0], x.size(0), x.dtype).reciprocal().view(-1, 1)
        return self.propagate(edge_index, x=x, factor=factor) + self.propagate(edge_index, x=x, factor=factor.sqrt())

    def message(self, x_j, factor_j):
        return self.lin(factor_j * x_j)


@needs_compiler
def test_an_infinite_factor_of_a_node_without_edges_reaches_no_gradient():
    layer, x, edge_index = Normalised(), torch.randn(9, 4), torch.randint(5, (2, 20))
    marked, results = accelerate(copy.deepcopy(layer)), []
    for each in (marked, layer.double()):
        given = x.to(each.lin.weight.dtype).requires_grad_()
        with emulated_device() as launched:
            out = each(given, edge_index)
            gradients = torch.autograd.grad(out.square().sum(), [given, *each.parameters()])
        results.append([out.double(), *(gradient.double() for gradient in gradients)])
        assert launched or each is layer
    torch.testing.assert_close(*results, **elementwise("float32"))
