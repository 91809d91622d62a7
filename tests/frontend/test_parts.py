"""Layers that cut rows of edges in parts, on kernels that the emulator runs: no row of an edge is stored for a part."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

from pyg_dfgnn.ops.relational.backend import KERNELS, running
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.settings import local_settings
from tests.frontend.marks import compile_layer
from tests.kernels.emulated import emulated_device

BASIS = 20


class Vectors(MessagePassing):
    """Messages of numbers and of vectors [N, 3, F], each of a third of a filter of the edge (PaiNN)."""

    def __init__(self, width):
        super().__init__(aggr="add", node_dim=0)
        self.width = width
        self.net, self.mlp = nn.Linear(width, 3 * width), nn.Sequential(nn.Linear(BASIS, 24), nn.SiLU())
        self.filter = nn.Linear(24, 3 * width)

    def forward(self, x, vectors, edge_index, basis, unit):
        out = self.propagate(edge_index, x=self.net(x), v=vectors, filter=self.filter(self.mlp(basis)), unit=unit)
        return x + out[0], vectors + out[1]

    def parts(self, rows):
        return torch.split(rows, self.width, dim=-1)

    def message(self, x_j, v_j, filter, unit):
        a, b, c = self.parts(filter * x_j)
        return a, v_j * b.unsqueeze(1) + c.unsqueeze(1) * unit.unsqueeze(2)

    def aggregate(self, inputs, index, dim_size=None):
        return tuple(scatter(each, index, 0, dim_size, "sum") for each in inputs)

    def update(self, inputs):
        return inputs


class Thirds(Vectors):
    """Thirds as entries of a dimension of their own."""

    def parts(self, rows):
        return rows.view(-1, 3, self.width).unbind(1)


class Rows(MessagePassing):
    """Messages of rows of edges and sources, of any width."""

    def __init__(self, width, aggr="add"):
        super().__init__(aggr=aggr)
        self.width = width

    def forward(self, x, edge_index, edge):
        return self.propagate(edge_index, x=x, edge=edge)


class Overlapping(Rows):
    def message(self, x_j, edge):
        rows = edge * x_j
        return rows[:, 1:-2] * rows[:, 2:-1].sigmoid()


class Rest(Rows):
    def message(self, x_j, edge):
        return (edge * x_j)[:, 3 : self.width - 2].tanh()


class Apart(Rows):
    def message(self, x_j, edge):
        rows, half = torch.sigmoid(edge) + x_j, (self.width - 3) // 2
        return rows[:, 1 : half + 1] * rows[:, half + 2 : 2 * half + 2]


class Uneven(Rows):
    """Chunks of which the last is smaller; of the many the parts of the others are added in turn."""

    def message(self, x_j, edge):
        first, second, third = (edge * x_j).chunk(3, -1)
        return first * second + third[:, :1]


class Rejoined(Rows):
    """Halves that change places, beside the row as a whole."""

    def message(self, x_j, edge):
        rows, half = edge * x_j, self.width // 2
        return rows * edge[:, :1] + torch.cat([rows[:, half:], rows[:, :half]], -1)


class Returned(Rows):
    """Rows of edges that are returned, and cut."""

    def forward(self, x, edge_index, edge):
        out = self.propagate(edge_index, x=x, edge=edge)
        rows, self.rows = self.rows, None
        return out, rows

    def message(self, x_i, x_j, edge):
        self.rows = edge * x_j + x_i
        gate, value = self.rows.chunk(2, -1)
        return gate.sigmoid() * value


class Attention(Rows):
    """A softmax whose keys and values are halves of a row."""

    def message(self, x_i, x_j, edge, index, size_i):
        key, value = (edge * x_j).chunk(2, -1)
        score = (x_i[:, : self.width // 2] * key).sum(-1)
        return softmax(score, index, num_nodes=size_i).view(-1, 1) * value


class Unlike(Rows):
    """Parts of several sizes, of one of which the sum is a factor of the other."""

    def message(self, x_j, edge):
        first, second = torch.split(edge * x_j, [40, 36], -1)
        return first * second.sum(-1, keepdim=True)


class Mapped(Rows):
    """A map of few features of the edge, which lanes compute part by part."""

    def __init__(self, width):
        super().__init__(width, "mean")
        self.lin = nn.Linear(width, 2 * width)

    def message(self, x_j, edge):
        scale, shift = self.lin(edge).chunk(2, -1)
        return x_j * scale.tanh() + shift


GRAPHS = {
    "random": torch.randint(0, 9, (2, 31), generator=torch.Generator().manual_seed(0)),
    "hub": torch.stack([torch.arange(300) % 9, torch.zeros(300, dtype=torch.int64)]),
    "duplicates": torch.tensor([[0, 1, 1, 1, 2, 2], [3, 3, 3, 4, 4, 4]]),
    "isolated": torch.tensor([[0, 1], [8, 7]]),
    "empty": torch.empty(2, 0, dtype=torch.int64),
}
ROWS = {
    "overlapping": (Overlapping, (12, 43)),
    "rest": (Rest, (9, 64, 129)),
    "apart": (Apart, (13, 35, 70)),
    "uneven": (Uneven, (14, 98)),
    "rejoined": (Rejoined, (6, 68)),
    "returned": (Returned, (10, 66)),
    "attention": (Attention, (16, 34)),
    "mapped": (Mapped, (5, 8)),
    "unlike": (Unlike, (76,)),
}


def vector_arguments(width, graph):
    edges = GRAPHS[graph].size(1)
    generator = torch.Generator().manual_seed(width)
    shapes = (9, width), (9, 3, width), (edges, BASIS), (edges, 3)
    x, vectors, basis, unit = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, vectors, GRAPHS[graph], basis, unit


def row_arguments(width, graph):
    generator = torch.Generator().manual_seed(width)
    x, edge = (torch.randn(rows, width, generator=generator) for rows in (9, GRAPHS[graph].size(1)))
    return x, GRAPHS[graph], edge


def results(layer, arguments, dtype, twice):
    """Outputs and gradients of all inputs and parameters, the second ones of a function of the first."""
    arguments = [x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in arguments]
    inputs = [x for x in arguments if x.is_floating_point()]
    out = layer(*arguments)
    outputs = out if isinstance(out, tuple) else (out,)
    loss = sum(
        (x.sin() * torch.linspace(0.5, 1.5, x.numel(), dtype=dtype).to(x.device).view_as(x)).sum() for x in outputs
    )
    options = {"allow_unused": True, "materialize_grads": True}
    if not twice:
        return [*outputs, *torch.autograd.grad(loss, [*inputs, *layer.parameters()], **options)]
    first = torch.autograd.grad(loss, inputs, create_graph=True, **options)
    loss = sum(x.square().sum() for x in first)
    return [*outputs, *first, *torch.autograd.grad(loss, [*inputs, *layer.parameters()], **options)]


def compare(layer, arguments, captured, twice=False, device="cpu"):
    """Compare a layer on kernels with itself in float64; returns the names of the kernels that the emulator ran."""
    expected = results(copy.deepcopy(layer).double(), arguments, torch.float64, twice)
    compile_layer(layer).to(device)
    # Few and new edges are left to torch, unless ids are checked as they come.
    with local_settings(fallback="error", check_ids="now"):
        with nullcontext([]) if device == "cuda" else emulated_device() as launched, running(KERNELS):
            actual = [x.cpu() for x in results(layer, [x.to(device) for x in arguments], torch.float32, twice)]
    assert captured[0].regions and not any(region.reasons for region in captured[0].regions)
    for got, want in zip(actual, expected, strict=True):
        scale = want.abs().max().clamp(min=1.0) if want.numel() else 1.0
        torch.testing.assert_close(got.double() / scale, want / scale, **elementwise("float32"))
    return launched


@pytest.mark.parametrize(
    ("kind", "width"), [*((Vectors, width) for width in (3, 5, 17, 64, 128)), (Thirds, 5), (Thirds, 64)]
)
def test_numbers_and_vectors_of_thirds_are_one_kernel_each_way(kind, width, captured):
    torch.manual_seed(0)
    assert compare(kind(width), vector_arguments(width, "random"), captured) == ["relational_traversal"] * 2


@pytest.mark.parametrize("graph", [name for name in GRAPHS if name != "empty"])
@pytest.mark.parametrize("kind", [Vectors, Overlapping, Apart])
def test_parts_on_every_graph(kind, graph, captured):
    torch.manual_seed(0)
    arguments = vector_arguments(5, graph) if kind is Vectors else row_arguments(13, graph)
    compare(kind(5 if kind is Vectors else 13), arguments, captured)


@pytest.mark.parametrize(("name", "width"), [(name, width) for name, (_, widths) in ROWS.items() for width in widths])
def test_parts_of_any_place_and_size(name, width, captured):
    torch.manual_seed(0)
    compare(ROWS[name][0](width), row_arguments(width, "random"), captured)


@pytest.mark.parametrize(("kind", "width"), [(Vectors, 5), (Vectors, 64), (Overlapping, 12), (Apart, 13), (Uneven, 14)])
def test_second_derivatives_run_on_kernels(kind, width, captured, caplog):
    torch.manual_seed(0)
    arguments = vector_arguments(width, "random") if kind is Vectors else row_arguments(width, "random")
    compare(kind(width), arguments, captured, twice=True)
    assert "derivative" not in caplog.text


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "width"), [("vectors", 64), ("thirds", 17), *((n, w[-1]) for n, (_, w) in ROWS.items())]
)
def test_on_a_gpu(name, width, captured):
    torch.manual_seed(0)
    kinds = {"vectors": Vectors, "thirds": Thirds}
    arguments = (vector_arguments if name in kinds else row_arguments)(width, "random")
    compare(kinds[name](width) if name in kinds else ROWS[name][0](width), arguments, captured, device="cuda")


def test_no_edges(captured):
    torch.manual_seed(0)
    layer, full = Vectors(5), vector_arguments(5, "random")
    compile_layer(layer)
    with emulated_device(), running(KERNELS):
        layer(*full)
        empty = vector_arguments(5, "empty")
        out = layer(*empty)
    assert torch.equal(out[0], empty[0]) and torch.equal(out[1], empty[1])


def test_vectors_that_fit_no_lanes_are_named(captured):
    """Gradients of vectors wider than what a group of lanes holds are PyTorch's; the reason names the value."""
    layer, (x, *others) = compile_layer(Vectors(192)), vector_arguments(192, "random")
    with emulated_device() as launched, running(KERNELS):
        layer(x.requires_grad_(), *others)
    (reason,) = captured[0].regions[0].reasons
    assert not launched and reason.endswith("joins heads of more than 512 numbers (H=3, C=192)")
