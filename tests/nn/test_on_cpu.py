"""Calls of drop-ins on a CPU: PyG's numbers at once, and users are told what they are told elsewhere."""

import logging

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_dfgnn
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.fallback import ON_CPU
from pyg_dfgnn.nn import on_cpu
from tests.nn.convs import EDGES, FEATURES, NUM_NODES

LAYERS = {
    "GCNConv": lambda: pyg.GCNConv(FEATURES, 4),
    "GATConv": lambda: pyg.GATConv(FEATURES, 4, heads=2),
    "SAGEConv": lambda: pyg.SAGEConv(FEATURES, 4, aggr=["mean", "std"]),
    "FiLMConv": lambda: pyg.FiLMConv(FEATURES, 4),
    "SoftmaxAggregation": lambda: pyg.SoftmaxAggregation(),
}


def call(layer, x, edge_index):
    return layer(x[edge_index[0]], edge_index[1]) if isinstance(layer, pyg.Aggregation) else layer(x, edge_index)


@pytest.mark.parametrize("name", LAYERS)
def test_every_call_has_pygs_numbers_and_the_first_tells_so(name, forget_logged, caplog):
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(NUM_NODES, FEATURES)
    want = call(layer, x, EDGES)
    pyg_dfgnn.accelerate(layer)
    caplog.set_level(logging.INFO, "pyg_dfgnn")
    caplog.clear()
    for _ in range(3):
        torch.testing.assert_close(call(layer, x, EDGES), want, rtol=0, atol=0)
    assert [record.message for record in caplog.records].count(ON_CPU) == 1


@pytest.mark.parametrize("name", ["GCNConv", "GATConv"])
def test_wrong_edges_are_named_after_right_ones(name, forget_logged, caplog):
    layer, x = pyg_dfgnn.accelerate(LAYERS[name]()), torch.randn(NUM_NODES, FEATURES)
    layer(x, EDGES)
    with pytest.raises(Exception):  # noqa: B017
        layer(x, EDGES.float())
    assert "edge_index is no int64 or int32 tensor" in caplog.text


def test_calls_are_counted_and_described_after_others(forget_logged):
    layer, x = pyg_dfgnn.accelerate(LAYERS["GATConv"]()), torch.randn(NUM_NODES, FEATURES)
    layer(x, EDGES)
    assert on_cpu.is_on_cpu(x)
    with pyg_dfgnn.local_settings(profile=True):
        layer(x, EDGES)
        assert pyg_dfgnn.stats(layer)[0].pyg == 1
    layer.decomposed_layers = 2
    assert len(pyg_dfgnn.describe_plan(layer, x, EDGES).reasons) == 2


def test_an_error_is_raised_where_settings_ask_for_it(forget_logged, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    layer, x = pyg_dfgnn.accelerate(LAYERS["GCNConv"]()), torch.randn(NUM_NODES, FEATURES)
    layer(x, EDGES)
    with pyg_dfgnn.local_settings(fallback="error"), pytest.raises(UnsupportedError, match="not on a CUDA device"):
        layer(x, EDGES)
