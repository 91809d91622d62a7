"""Layers of which no program is made: later calls ask nothing again, and are still PyG's."""

import sys
from pathlib import Path

import pytest
import torch
from torch_geometric.nn import MessagePassing

import pyg_dfgnn
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.nn import messages

MOST_CALLS = 20
"""Functions of this package that a refused call may enter."""


class Branches(MessagePassing):
    """A branch on numbers."""

    def __init__(self):
        super().__init__()
        self.limit = 1e9

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return -x_j if x_j.sum() > self.limit else x_j


@pytest.fixture
def call():
    x, edge_index = torch.randn(6, 3), torch.randint(6, (2, 9))
    layer = pyg_dfgnn.accelerate(Branches())
    with messages.interpreted(), pyg_dfgnn.local_settings(fallback="silent"):
        layer(x, edge_index)
        yield layer, x, edge_index


def test_later_calls_ask_nothing_again(call):
    layer, x, edge_index = call
    layer(x, edge_index)
    root, entered = str(Path(pyg_dfgnn.__file__).parent / "nn" / "messages"), []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            entered.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        layer(x, edge_index)
    finally:
        sys.setprofile(None)
    assert len(entered) <= MOST_CALLS


def test_results_follow_the_layer(call):
    layer, x, edge_index = call
    for limit in (1e9, -1e9):
        layer.limit = limit
        assert torch.equal(layer(x, edge_index), pyg_dfgnn.restore(Branches().train())(x, edge_index) * (limit / 1e9))


def test_the_reason_stays(call):
    layer, x, edge_index = call
    before = str(pyg_dfgnn.report(layer))
    for _ in range(3):
        layer(x, edge_index)
    assert str(pyg_dfgnn.report(layer)) == before and "sum" in before
    with pyg_dfgnn.local_settings(fallback="error"), pytest.raises(UnsupportedError):
        layer(x, edge_index)
