"""Layers of a user's own on parts of a graph: captured, with programs that fetch what they read of remote sources."""

import copy

import pytest
import torch
import torch_geometric
from torch import nn
from torch_geometric.utils import add_self_loops, degree

import pyg_dfgnn
from pyg_dfgnn.distributed import Group, partition, wrap
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.reference.tolerances import relative_error
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.new_edges import random_edges

NODES, EDGES, FEATURES = 40, 200, 8
ERROR = 5e-6
"""Relative error of float32 by the Frobenius norm."""


class Mapped(torch_geometric.nn.MessagePassing):
    """Sums of messages of a linear map."""

    def __init__(self, aggr="add"):
        super().__init__(aggr=aggr)
        self.lin = nn.Linear(FEATURES, FEATURES)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i, x_j):
        return (x_i - x_j).tanh() * x_j


class WithEdges(Mapped):
    """A layer that also returns its edges."""

    def forward(self, x, edge_index):
        return super().forward(x, edge_index), edge_index


class Twice(nn.Module):
    """Two layers, of which the second gets the edges from the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = WithEdges(), WithEdges("max")

    def forward(self, x, edge_index):
        x, edge_index = self.first(x, edge_index)
        return self.second(x.tanh(), edge_index)[0]


class WithLoops(Mapped):
    """A layer that adds self-loops in its forward."""

    def forward(self, x, edge_index):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        return super().forward(x, edge_index)


class InParts(Mapped):
    """A layer in which TorchDynamo finds more than one graph."""

    def forward(self, x, edge_index):
        received = degree(edge_index[1], x.size(0), dtype=x.dtype).clamp(min=1)
        print(end="")
        return super().forward(x / received.view(-1, 1), edge_index)


class Weighted(Mapped):
    """Messages with a factor of each edge, and degrees of sources."""

    def forward(self, x, edge_index):
        sent = degree(edge_index[0], x.size(0), dtype=x.dtype).clamp(min=1)
        return self.propagate(edge_index, x=self.lin(x) / sent.view(-1, 1), weight=sent[edge_index[0]])

    def message(self, x_j, weight):
        return x_j * weight.rsqrt().view(-1, 1)


class WeightedGCN(nn.Module):
    """A drop-in whose kernels take no part, with a factor of each edge."""

    def __init__(self):
        super().__init__()
        self.conv = torch_geometric.nn.GCNConv(FEATURES, FEATURES)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index, x[edge_index[0], 0].sigmoid())


class Normed(nn.Module):
    """A layer with batch norm inside, whose statistics are those of all processes."""

    def __init__(self):
        super().__init__()
        self.conv = torch_geometric.nn.GENConv(FEATURES, FEATURES, norm="batch")

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


LAYERS = {each.__name__: each for each in (Mapped, Twice, WithLoops, InParts, Weighted, WeightedGCN, Normed)}


def compare(edge_index, runs_kernels):
    """Outputs and gradients of layers on a part, in float32 on emulated kernels, and of float64 on the whole graph."""
    group = Group.of_environment("cpu")
    part = partition(edge_index, NODES, group)
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(NODES, FEATURES, generator=generator, dtype=torch.float64) for _ in range(2))
    for name, make in LAYERS.items():
        torch.manual_seed(1)
        single = make()
        model = wrap(pyg_dfgnn.accelerate(copy.deepcopy(single)), group)
        given, own = x.clone().requires_grad_(), part.local(x).float().requires_grad_()
        want = single.double()(given, edge_index)
        want.backward(grad)
        with emulated_device() as launched:
            out = model(own, part)
            out.backward(part.local(grad).float())
        assert bool(launched) or not runs_kernels, name
        pairs = [(out, part.local(want)), (own.grad, part.local(given.grad))]
        pairs += [(p.grad * group.size, q.grad) for p, q in zip(model.parameters(), single.parameters(), strict=True)]
        for got, expected in pairs:
            assert relative_error(got.detach(), expected.detach()) < ERROR or not expected.any(), name


@needs_compiler
@pytest.mark.parametrize("size", [2, 3])
def test_layers_equal_one_process(launch, size):
    launch(size, compare, random_edges(NODES, NODES, EDGES), True)


@needs_compiler
def test_a_process_may_have_no_edge(launch):
    launch(2, compare, torch.stack([torch.arange(NODES), torch.zeros(NODES, dtype=torch.int64)]), False)


class Dropped(nn.Module):
    """A layer on some of the edges."""

    def __init__(self):
        super().__init__()
        self.conv = Mapped()

    def forward(self, x, edge_index):
        return self.conv(x, edge_index[:, torch.arange(edge_index.size(1)) % 2 == 0])


class Kept(Mapped):
    """A layer that keeps the edges of its last call, and can read them in the next one."""

    def forward(self, x, edge_index):
        self.last = edge_index
        return super().forward(x, edge_index)


class Scaled(Mapped):
    """A layer with a number that TorchDynamo compiles in."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * self.scale


class Backwards(Mapped):
    """A layer whose messages go to sources."""

    def __init__(self):
        super().__init__()
        self.flow = "target_to_source"


def of_part(edge_index):
    """A part and features of its nodes."""
    part = partition(edge_index, NODES, Group.of_environment("cpu"))
    return part, torch.randn(part.num_nodes, FEATURES)


def run(layer, *args):
    """Output of a call, and whether kernels of programs ran; those of aggregations have other names."""
    with emulated_device() as launched, torch.no_grad():
        return layer(*args), "relational_traversal" in launched


def drop_edges(edge_index):
    part, x = of_part(edge_index)
    torch.manual_seed(0)
    plain = Dropped()
    model = wrap(pyg_dfgnn.accelerate(copy.deepcopy(plain)), part.group)
    assert torch.equal(run(model, x, part)[0], plain(x, part.edges))


def err_once(edge_index):
    part, x = of_part(edge_index)
    layer = pyg_dfgnn.accelerate(Mapped())
    out, is_compiled = run(layer, x, part.edges)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(part.num_nodes, FEATURES + 1), part.edges)
    again, is_still_compiled = run(layer, x, part.edges)
    assert is_compiled and is_still_compiled and torch.equal(out, again)


def keep_edges(edge_index):
    part, x = of_part(edge_index)
    layer = pyg_dfgnn.accelerate(Kept())
    for _ in range(2):
        run(layer, x, part.edges)
        assert layer.last.part is part
    (row, _) = pyg_dfgnn.report(layer)
    assert "it keeps its edges, which are those of a part" in row.why and not row.compiled


def have_many_graphs(edge_index):
    part, x = of_part(edge_index)
    layers = [pyg_dfgnn.accelerate(Scaled(1 / (1 + k))) for k in range(10)]
    for _ in range(2):
        are_compiled = [run(layer, x, part.edges)[1] for layer in layers]
        assert any(are_compiled) and are_compiled == sorted(are_compiled, reverse=True)
    assert not all(are_compiled), "this test needs more layers than TorchDynamo keeps graphs"


def tell_why(edge_index):
    part, x = of_part(edge_index)
    layer = pyg_dfgnn.accelerate(Backwards())
    assert not run(layer, x, part.edges)[1]
    assert "gives numbers to sources" in pyg_dfgnn.report(layer)[0].why
    assert "on all processes together" in str(pyg_dfgnn.describe_plan(layer, x, part.edges))
    with pyg_dfgnn.local_settings(fallback="error"), pytest.raises(UnsupportedError, match="gives numbers to sources"):
        run(layer, x, part.edges)


HUB = torch.stack([torch.arange(NODES), torch.zeros(NODES, dtype=torch.int64)])


@needs_compiler
@pytest.mark.parametrize("check", [drop_edges, err_once, keep_edges, have_many_graphs, tell_why])
def test_calls_that_are_not_as_others(launch, check):
    launch(2, check, HUB if check is drop_edges else random_edges(NODES, NODES, EDGES))
