"""Layers of users that are left to PyG's code on a GPU: what is asked in each call, and how soon kernels take over."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import remove_self_loops

import pyg_dfgnn
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn import messages
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.settings import Settings
from tests.new_edges import random_edges

pytestmark = pytest.mark.cuda
SETTINGS = Settings()
DEVICE = "cuda"


def many_operators(x):
    """A message of so many operators that kernels take few edges too, once they are known."""
    return torch.tanh(x) * torch.sigmoid(x).exp().cos() / (x * x + 1).sqrt()


class _OfBatch(MessagePassing):
    """Sums of messages over the edges of a batch, as a layer of GraphGym takes one."""

    def forward(self, batch, edge_index=None):
        edge_index = batch.edge_index if edge_index is None else edge_index
        return self.propagate(edge_index, x=batch.x)

    def message(self, x_j):
        return many_operators(x_j)


class _Scaled(MessagePassing):
    """Sums of messages, after an argument that is no edges."""

    def forward(self, scale, x, edge_index):
        return self.propagate(edge_index, x=x * scale)

    def message(self, x_j):
        return torch.tanh(x_j).exp()


@pytest.fixture
def asked(monkeypatch):
    """A list with an entry for each call of a layer that is asked about."""
    asked, call = [], messages.Mark.call
    monkeypatch.setattr(messages.Mark, "call", lambda self, *rest: asked.append(1) or call(self, *rest))
    return asked


def edges(count=90):
    return random_edges(30, 30, count).to(DEVICE)


def test_few_edges_of_a_batch_are_found():
    layer, x = pyg_dfgnn.accelerate(_OfBatch()), torch.randn(30, 8, device=DEVICE)
    with pyg_dfgnn.local_settings(profile=True):
        for _ in range(4):
            layer(Data(x, edges()))
        (counts,) = [row for row in pyg_dfgnn.stats() if row.kind == "_OfBatch"]
    # Nothing was captured for them.
    assert counts.pyg == 4 and layer.__dict__[messages.MARK].forward is None


def test_edges_beside_a_batch_decide():
    layer, x, known = pyg_dfgnn.accelerate(_OfBatch()), torch.randn(30, 8, device=DEVICE), edges()
    with pyg_dfgnn.local_settings(profile=True):
        for _ in range(8):
            layer(Data(x, edges(20)), known)
        (counts,) = [row for row in pyg_dfgnn.stats() if row.kind == "_OfBatch"]
    assert counts.fused and counts.pyg < 8


class _Asked(dict):
    """A dictionary whose attributes are its items."""

    def __getattr__(self, name):
        return self[name]


class _Optional(MessagePassing):
    """Sums of messages, with options."""

    def forward(self, x, edge_index, options=None):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return many_operators(x_j)


def test_other_arguments_are_asked_nothing():
    layer, x = pyg_dfgnn.accelerate(_Optional()), torch.randn(30, 8, device=DEVICE)
    layer(x, edges(), _Asked(a=1))


def test_a_layer_whose_edges_stay_new_is_asked_seldom(asked):
    layer, x, scale = pyg_dfgnn.accelerate(_Scaled()), torch.randn(30, 8, device=DEVICE), torch.ones(1, device=DEVICE)
    plain = pyg_dfgnn.restore(copy.deepcopy(layer))
    for _ in range(80):
        layer(scale, x, edges())
    assert len(asked) < 30
    for _ in range(1000):
        layer(scale, x, edges())
    assert len(asked) < 130
    # More edges, and other settings, are asked about at once.
    before = len(asked)
    layer(scale, x, edges(900))
    assert len(asked) == before + 1
    with pyg_dfgnn.local_settings(fallback="silent"):
        layer(scale, x, edges())
    assert len(asked) == before + 2
    # Edges that come again are found to be known.
    known = edges()
    for _ in range(150):
        out = layer(scale, x, known)
    torch.testing.assert_close(out, plain(scale, x, known), **elementwise("float32"))
    assert layer.__dict__[messages.MARK].forward is not None


def test_edges_of_many_sizes_are_asked_about_as_seldom(asked):
    layer, x, scale = pyg_dfgnn.accelerate(_Scaled()), torch.randn(30, 8, device=DEVICE), torch.ones(1, device=DEVICE)
    sizes = torch.randint(50, 150, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    for size in sizes:
        layer(scale, x, edges(size))
    assert len(asked) < 150


def test_the_batches_of_a_fixed_list_become_known(asked):
    layer, x = pyg_dfgnn.accelerate(_Optional()), torch.randn(30, 8, device=DEVICE)
    batches = [edges(60 + count) for count in range(40)]
    for _ in range(8):
        before = len(asked)
        for batch in batches:
            layer(x, batch)
    assert len(asked) - before == len(batches)


class _Filtered(MessagePassing):
    """Sums over the edges that remain without self-loops."""

    def forward(self, x, edge_index):
        return self.propagate(remove_self_loops(edge_index)[0], x=x)

    def message(self, x_j):
        return x_j


@pytest.mark.parametrize(("width", "is_left"), [(8, True), (160, False)])
def test_many_new_edges_of_the_layer_itself_are_sorted_for_wide_rows(width, is_left):
    messages.clear()
    layer, plain, x = pyg_dfgnn.accelerate(_Filtered()), _Filtered(), torch.rand(300, width, device=DEVICE)
    for _ in range(4):
        edge_index = random_edges(300, 300, 1_200_000).to(DEVICE)
        torch.testing.assert_close(layer(x, edge_index), plain(x, edge_index), **elementwise("float32/gradients"))
    (graph,) = layer.__dict__[messages.MARK].forward.compiler.graphs
    assert [bool(region.reasons) for region in graph.regions] == [is_left]


class _TwoEdges(MessagePassing):
    """Sums of messages over edges, and over others."""

    def forward(self, x, edge_index, other):
        return self.propagate(edge_index, x=x) + self.propagate(other, x=x)

    def message(self, x_j):
        return torch.tanh(x_j)


def test_a_graph_beside_edges_that_stay_new_is_seen():
    layer, x, other = pyg_dfgnn.accelerate(_TwoEdges()), torch.randn(30, 8, device=DEVICE), edges()
    for _ in range(8):
        layer(x, edges(), other)
    new = edges()
    want, out = layer(x, new, other), layer(x, new, Graph.of(other, 30, 30))
    torch.testing.assert_close(out, want, **elementwise("float32"))


@pytest.mark.parametrize("news", [40, 41])
def test_a_checkpoint_computes_what_it_computed_before(news):
    """Edges that kernels take are known before others, that stay new, end the questions in all calls but a few."""
    layer, x, known = pyg_dfgnn.accelerate(_Optional()).eval(), torch.randn(30, 8, device=DEVICE), edges()
    for _ in range(6):
        layer(x, known)
    layer.train()
    for _ in range(news):
        layer(x, edges())
    for _ in range(20):
        inputs = x.clone().requires_grad_()
        checkpoint(layer, inputs, known, use_reentrant=False).sum().backward()
        assert inputs.grad is not None
