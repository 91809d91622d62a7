"""Programs that make rows of edges, of all at once and in chunks: numbers and gradients, and the memory of chunks."""

import math

import pytest
import torch
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn import conv as pyg
from torch_geometric.utils import softmax

import pyg_dfgnn
from pyg_dfgnn.ops.relational import chunked
from pyg_dfgnn.settings import local_settings
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device

F, EDGE, NODES, EDGES = 8, 4, 40, 800


def mlp(inputs, layers=2):
    parts = [nn.Linear(inputs, F), nn.SiLU()]
    for _ in range(layers - 1):
        parts += [nn.Linear(F, F), nn.SiLU()]
    return nn.Sequential(*parts[:-1])


class Filter(MessagePassing):
    """A filter of each edge, as in SchNet."""

    def __init__(self):
        super().__init__(aggr="add")
        self.net, self.lin = mlp(EDGE), nn.Linear(F, F)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=self.lin(x), edge_attr=edge_attr)

    def message(self, x_j, edge_attr):
        return x_j * self.net(edge_attr)


class Block(MessagePassing):
    """A network on joined rows, as in mesh networks."""

    def __init__(self):
        super().__init__(aggr="mean")
        self.net = mlp(2 * F + EDGE, 3)

    def forward(self, x, edge_index, edge_attr):
        return x + self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i, x_j, edge_attr):
        return torch.tanh(self.net(torch.cat([x_i, x_j, edge_attr], dim=-1)))


class Shifted(MessagePassing):
    """Numbers in between, as in the shifted softplus of SchNet."""

    def __init__(self):
        super().__init__(aggr="add")
        self.net, self.second = mlp(EDGE), mlp(F)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_j, edge_attr):
        return x_j * self.second(torch.nn.functional.softplus(self.net(edge_attr)) - math.log(2.0)) * 0.5


class Attention(MessagePassing):
    """Weights that a network makes, normalised over the edges of a target."""

    def __init__(self):
        super().__init__(aggr="add")
        self.net, self.score = mlp(2 * F + EDGE), nn.Linear(F, 1)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i, x_j, edge_attr, index, ptr, size_i):
        hidden = self.net(torch.cat([x_i, x_j, edge_attr], dim=-1))
        share = softmax(self.score(torch.tanh(hidden)).squeeze(-1), index, ptr, size_i)
        return hidden * share.view(-1, 1)


class Gates(MessagePassing):
    """Two networks on the same rows."""

    def __init__(self):
        super().__init__(aggr="add")
        self.gate, self.net = mlp(2 * F), mlp(2 * F)

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        both = torch.cat([x_i, x_j], dim=-1)
        return torch.sigmoid(self.gate(both)) * self.net(both)


LAYERS = {
    "filter": Filter,
    "block": Block,
    "attention": Attention,
    "shifted": Shifted,
    "edge_conv": lambda: pyg.EdgeConv(mlp(2 * F)),
    "gates": Gates,
}


def edges(kind):
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(NODES - 3, (2, EDGES), generator=generator)
    if kind == "hub":
        edge_index[1, : EDGES // 2] = 5
    return edge_index[:, edge_index[1].argsort(stable=True)] if kind == "sorted" else edge_index


def results(layer, x, edge_index, edge_attr, out_grad):
    args = (x, edge_index) if isinstance(layer, pyg.EdgeConv) else (x, edge_index, edge_attr)
    out = layer(*args)
    leaves = {"x": x, "edge_attr": edge_attr, **dict(layer.named_parameters())}
    found = torch.autograd.grad(out, list(leaves.values()), out_grad.to(out.dtype), allow_unused=True)
    return {"out": out.detach(), **{name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None}}


@pytest.fixture
def counted(monkeypatch):
    """The chunks that ran, which are of few edges."""
    ran = []
    monkeypatch.setattr(chunked, "_CHUNK", 3_200)
    monkeypatch.setattr(chunked, "_LEAST_EDGES", 16)
    walk = chunked.Chunked.walk
    monkeypatch.setattr(chunked.Chunked, "walk", lambda self, rows: ran.extend(walk(self, rows)) or walk(self, rows))
    with local_settings(edge_chunks=True):
        yield ran


@needs_compiler
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "hub") for name in LAYERS), ("block", "sorted"), ("filter", "random")]
)
def test_numbers_and_gradients_are_pygs(name, kind, counted):
    compare(name, kind)
    assert len(counted) > 2


@needs_compiler
@pytest.mark.parametrize("name", LAYERS)
def test_numbers_and_gradients_of_all_edges_at_once_are_pygs(name):
    assert "relational_traversal" in compare(name, "hub")


def compare(name, kind):
    """Compare a layer and its gradients with PyG's in float64; return the kernels that ran."""
    torch.manual_seed(0)
    layer, edge_index = LAYERS[name](), edges(kind)
    x, edge_attr = torch.randn(NODES, F), torch.randn(EDGES, EDGE)
    out_grad = torch.randn(NODES, F)
    twins = [tensor.double().requires_grad_() for tensor in (x, edge_attr)]
    want = results(layer.double(), twins[0], edge_index, twins[1], out_grad)
    layer = pyg_dfgnn.accelerate(nn.ModuleList([layer.float()]))[0]
    leaves = [tensor.requires_grad_() for tensor in (x, edge_attr)]
    with emulated_device() as launched:
        for _ in range(3):
            got = results(layer, leaves[0], edge_index, leaves[1], out_grad)
    assert got.keys() == want.keys()
    for place in want:
        # The gradient of what is added to all logits is zero.
        most = want[place].abs().max().clamp(min=1)
        torch.testing.assert_close(got[place].double(), want[place], rtol=1e-4, atol=1e-5 * most)
    return launched


@needs_compiler
def test_gradients_can_be_differentiated(counted):
    torch.manual_seed(0)
    layer, edge_index = Filter(), edges("random")
    x, edge_attr = torch.randn(NODES, F), torch.randn(EDGES, EDGE)

    def forces(layer, x, edge_attr):
        edge_attr = edge_attr.requires_grad_()
        energy = layer(x, edge_index, edge_attr).square().sum()
        (force,) = torch.autograd.grad(energy, edge_attr, create_graph=True)
        return torch.autograd.grad(force.square().sum(), list(layer.parameters()), allow_unused=True)

    want = forces(layer.double(), x.double(), edge_attr.double())
    layer = pyg_dfgnn.accelerate(nn.ModuleList([layer.float()]))[0]
    with emulated_device():
        for _ in range(3):
            got = forces(layer, x, edge_attr.clone())
    assert counted
    for mine, other in zip(got, want, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine.double(), other, rtol=1e-3, atol=1e-4 * other.abs().max())


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_a_chunk(dtype):
    """Forward and backward of a network on 600,000 edges take at most half of what PyG's code takes."""
    width, nodes, count = 64, 70_000, 600_000
    net = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()).cuda()
    layer = pyg.EdgeConv(net, aggr="add").to(dtype)
    x = torch.randn(nodes, width, device="cuda", dtype=dtype, requires_grad=True)
    edge_index = torch.randint(nodes, (2, count), device="cuda")

    def peak():
        for _ in range(4):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = layer(x, edge_index)
            out.sum().backward()
        return torch.cuda.max_memory_allocated() - before, out.detach().float()

    theirs, want = peak()
    pyg_dfgnn.accelerate(nn.ModuleList([layer]))
    with local_settings(edge_chunks=True):
        mine, got = peak()
    assert mine < theirs / 2
    torch.testing.assert_close(got, want, rtol=5e-2, atol=2e-2 * want.abs().max().item())


@needs_compiler
def test_chunks_are_asked_for(monkeypatch):
    monkeypatch.setattr(chunked, "_CHUNK", 3_200)
    monkeypatch.setattr(chunked, "_LEAST_EDGES", 16)
    layer, edge_index = Filter(), edges("random")
    pyg_dfgnn.accelerate(nn.ModuleList([layer]))
    x, edge_attr = torch.randn(NODES, F), torch.randn(EDGES, EDGE)
    with emulated_device() as launched:
        counts = []
        for asks in (False, True, False):
            with local_settings(edge_chunks=asks, check_ids="now"):
                before = len(launched)
                layer(x, edge_index, edge_attr)
                counts.append(len(launched) - before)
    assert counts[0] == counts[2] < counts[1]
