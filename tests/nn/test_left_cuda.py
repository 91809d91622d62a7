"""Layers of users that are left to PyG's code on a GPU: what is asked in each call, and how soon kernels take over."""

import copy

import pytest
import torch
from torch_geometric.nn import MessagePassing

import pyg_dfgnn
from pyg_dfgnn.nn import messages
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.settings import Settings
from tests.new_edges import random_edges

pytestmark = pytest.mark.cuda
SETTINGS = Settings()
DEVICE = "cuda"


class _Batch:
    """What a layer of GraphGym takes."""

    def __init__(self, x, edge_index):
        self.x, self.edge_index = x, edge_index


class _OfBatch(MessagePassing):
    """Sums of messages over the edges of a batch."""

    def forward(self, batch):
        return self.propagate(batch.edge_index, x=batch.x)

    def message(self, x_j):
        return torch.tanh(x_j)


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
            layer(_Batch(x, edges()))
        (counts,) = [row for row in pyg_dfgnn.stats() if row.kind == "_OfBatch"]
    # Nothing was captured for them.
    assert counts.pyg == 4 and layer.__dict__[messages.MARK].forward is None


def test_a_layer_whose_edges_stay_new_is_asked_seldom(asked, monkeypatch):
    monkeypatch.setattr(messages, "_PERSISTENT", 20)
    layer, x, scale = pyg_dfgnn.accelerate(_Scaled()), torch.randn(30, 8, device=DEVICE), torch.ones(1, device=DEVICE)
    plain = pyg_dfgnn.restore(copy.deepcopy(layer))
    for _ in range(20):
        layer(scale, x, edges())
    assert len(asked) == 20
    for _ in range(100):
        layer(scale, x, edges())
    assert len(asked) < 40
    # More edges, and other settings, are asked about at once.
    before = len(asked)
    layer(scale, x, edges(900))
    assert len(asked) == before + 1
    with pyg_dfgnn.local_settings(fallback="silent"):
        layer(scale, x, edges())
    assert len(asked) == before + 2
    # Edges that come again are found to be known.
    known, before = edges(), len(asked)
    for _ in range(100):
        out = layer(scale, x, known)
    torch.testing.assert_close(out, plain(scale, x, known), **elementwise("float32"))
    assert layer.__dict__[messages.MARK].forward is not None
