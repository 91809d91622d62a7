"""Compiled messages on sparse adjacencies of torch: the entries are the edges, and their values are weights."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

import pyg_dfgnn
from pyg_dfgnn.nn import messages
from tests.kernels.emulated import emulated_device
from tests.nn.message_cases import watched

pytestmark = pytest.mark.filterwarnings("ignore")
SOURCES, TARGETS, CHANNELS = 6, 4, 8
EDGES = torch.tensor([[0, 1, 5, 3, 4, 2, 0], [0, 0, 2, 2, 2, 3, 1]])


class Weighted(MessagePassing):
    """A user's layer that takes the weight of an edge, and of an edge that is none."""

    def __init__(self):
        super().__init__(aggr="add")

    def forward(self, x, edge_index, edge_weight=None):
        return self.propagate(edge_index, x=x, edge_weight=edge_weight)

    def message(self, x_i, x_j, edge_weight):
        out = (x_i - x_j).tanh()
        return out if edge_weight is None else edge_weight.view(-1, 1) * out


class Asking(Weighted):
    def message(self, x_j, edge_weight, adj_t):
        return x_j if adj_t is None else 2 * x_j


class Updating(Weighted):
    """Asks for weights after the messages alone."""

    def message(self, x_i, x_j):
        return (x_i - x_j).tanh()

    def update(self, out, x, edge_weight):
        return (out if edge_weight is None else edge_weight.sum() * out) + x[1]


class Refused(Updating):
    def message(self, x_i, x_j):
        return (x_i - x_j) / x_j.max()


class Fused(Weighted):
    def message_and_aggregate(self, adj_t, x):
        return adj_t @ x[0]


def adjacency(layout, values):
    if layout == "coo":
        return torch.sparse_coo_tensor(EDGES.flip(0), values, (TARGETS, SOURCES, *values.shape[1:])).coalesce()
    order = EDGES[1].argsort(stable=True)
    ends = torch.searchsorted(EDGES[1][order], torch.arange(TARGETS + 1))
    return torch.sparse_csr_tensor(ends, EDGES[0][order], values, (TARGETS, SOURCES))


def twins(layer):
    return layer, pyg_dfgnn.accelerate(copy.deepcopy(layer))


def run(layer, x, matrix, values):
    out = layer((x, x[:TARGETS]), matrix)
    leaves = [leaf for leaf in (x, values, *layer.parameters()) if leaf.requires_grad]
    return [out, *torch.autograd.grad((out * torch.arange(out.numel()).view_as(out)).sum(), leaves)]


def features(dtype=torch.float64, *shape):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("kind", [Weighted, Updating])
def test_values_are_weights(kind, layout):
    x, values = features(torch.float64, SOURCES, CHANNELS), features(torch.float64, EDGES.size(1))
    results = []
    for layer in twins(kind()):
        with messages.interpreted(), watched() as calls:
            results.append(run(layer, x, adjacency(layout, values), values))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-11)
    assert len(results[0]) == 3 and [reasons for *_, reasons in calls] == [[]]


@pytest.mark.parametrize("name", ["float64", "kernels"])
def test_values_of_several_numbers_are_features_of_edges(name):
    dtype = torch.float64 if name == "float64" else torch.float32
    x, values = features(dtype, SOURCES, CHANNELS), features(dtype, EDGES.size(1), 3).detach()
    pair = twins(pyg.GENConv(CHANNELS, CHANNELS, edge_dim=3).to(dtype).eval())
    with messages.interpreted() if name == "float64" else emulated_device(), watched() as calls:
        actual = run(pair[1], x, adjacency("coo", values), values)
    bound = {"rtol": 1e-9, "atol": 1e-11} if name == "float64" else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(actual, run(pair[0], x, adjacency("coo", values), values), **bound)
    assert [reasons for *_, reasons in calls] == [[]]


class Attentive(Weighted):
    """Asks for weights of the edges before the messages."""

    def forward(self, x, edge_index):
        gate = self.edge_updater(edge_index, x=x, edge_weight=None)
        return self.propagate(edge_index, x=x, edge_weight=gate, edge_attr=None)

    def edge_update(self, x_i, x_j, edge_weight, index, size_i):
        return softmax((x_i * x_j).sum(-1) * edge_weight, index, num_nodes=size_i)

    def message(self, x_j, edge_weight, edge_attr):
        return x_j * edge_weight.view(-1, 1) if edge_attr is None else edge_attr


@pytest.mark.parametrize("way", ["float64", "kernels", "cpu"])
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_attention_before_the_messages(layout, way):
    dtype = torch.float32 if way == "kernels" else torch.float64
    x, values = features(dtype, SOURCES, CHANNELS), features(dtype, EDGES.size(1))
    contexts = {"float64": messages.interpreted, "kernels": emulated_device, "cpu": nullcontext}
    matrix = adjacency(layout, values.detach().sigmoid())
    version = matrix._version
    with contexts[way](), pyg_dfgnn.local_settings(fallback="silent"):
        # One matrix for both: neither edits it behind the back of the other's backward.
        outs = [layer((x, x[:TARGETS]), matrix) for layer in twins(Attentive())]
        results = [[out, *torch.autograd.grad(out.square().sum(), x)] for out in outs]
    assert matrix._version == version
    bound = {"rtol": 1e-4, "atol": 1e-5} if way == "kernels" else {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(*results, **bound)


class Both(Weighted):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, edge_weight=None, edge_attr=None)

    def message(self, x_j, edge_weight, edge_attr):
        return x_j * edge_weight if edge_attr is None else x_j + edge_attr


def test_values_go_to_the_first_argument_that_pyg_gives_them_to():
    x, values = features(torch.float64, SOURCES, CHANNELS), torch.rand(EDGES.size(1), CHANNELS).double()
    with messages.interpreted(), watched() as calls:
        results = [layer((x, x[:TARGETS]), adjacency("coo", values)) for layer in twins(Both())]
    torch.testing.assert_close(*results)
    assert [reasons for *_, reasons in calls] == [[]]


def test_edges_are_read_once_while_they_are_unedited():
    x, values = torch.randn(SOURCES, CHANNELS), torch.rand(EDGES.size(1))
    layer, ours = twins(Weighted())
    matrix = adjacency("csr", values)
    with messages.interpreted(), watched() as calls:
        for edit in (
            lambda: None,
            lambda: None,
            lambda: matrix.values().mul_(2),
            lambda: matrix.col_indices().fill_(1),
        ):
            edit()
            torch.testing.assert_close(ours((x, x[:TARGETS]), matrix), layer((x, x[:TARGETS]), matrix))
    assert all(outcome is not None for _, _, outcome, _ in calls) and len(calls) == 4


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Asking, "adj_t is not that of a tensor of edges"),
        (Fused, "edge_index is a sparse tensor that message_and_aggregate takes"),
        (Refused, "`max` has no meaning in a program"),
    ],
)
def test_what_is_left_to_pyg(kind, reason):
    x, matrix = torch.randn(SOURCES, CHANNELS), adjacency("coo", torch.rand(EDGES.size(1)))
    layer, ours = twins(kind())
    with messages.interpreted(), watched() as calls:
        torch.testing.assert_close(ours((x, x[:TARGETS]), matrix), layer((x, x[:TARGETS]), matrix))
    assert len(calls) == 1 and calls[0][3][0].endswith(reason)


def test_matrices_that_are_not_coalesced_are_pygs():
    x, matrix = torch.randn(SOURCES, CHANNELS), adjacency("coo", torch.rand(EDGES.size(1)))
    errors = []
    for layer in twins(Weighted()):
        twice = torch.sparse_coo_tensor(matrix.indices(), matrix.values(), matrix.shape)
        with messages.interpreted(), pytest.raises(RuntimeError) as raised:
            layer((x, x[:TARGETS]), twice)
        assert not twice.is_coalesced()
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_errors_are_pygs():
    x, square = torch.randn(SOURCES, CHANNELS), torch.eye(SOURCES)
    for edges, flow in ((square.to_sparse_coo(), "target_to_source"), (square.to_sparse_csc(), "source_to_target")):
        messages_of = []
        for layer in twins(Weighted()):
            layer.flow = flow
            with messages.interpreted(), pytest.raises(ValueError) as raised:
                layer(x, edges)
            messages_of.append(str(raised.value))
        assert messages_of[0] == messages_of[1]
