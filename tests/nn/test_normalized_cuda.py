"""Convs on a normalised adjacency of few edges on a GPU: what a CUDA graph reads of a norm that is kept."""

import pytest
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import conv as pyg

import pyg_dfgnn
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.settings import Settings
from tests.new_edges import random_edges

pytestmark = pytest.mark.cuda
SETTINGS = Settings()
FEATURES, NODES, DEVICE = 8, 30, "cuda"


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize(("weighted", "width"), [(False, 4), (False, 600), (True, 4)])
def test_a_cuda_graph_follows_edits_of_features_and_weights(weighted, width, calls):
    upstream, edge_index = pyg.GCNConv(FEATURES, width).to(DEVICE), random_edges(NODES, NODES, 90).to(DEVICE)
    layer = pyg_dfgnn.nn.GCNConv(FEATURES, width).to(DEVICE)
    layer.load_state_dict(upstream.state_dict())
    x, weight = torch.randn(NODES, FEATURES, device=DEVICE), torch.rand(90, device=DEVICE) if weighted else None
    with torch.no_grad():
        for _ in range(calls):
            layer(x, edge_index, weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x, edge_index, weight)
        for _ in range(2):
            x.normal_()
            if weight is not None:
                weight.uniform_()
            graph.replay()
            torch.testing.assert_close(out, upstream(x, edge_index, weight), **elementwise("float32"))


class _OfSeries(nn.Module):
    """A conv on features [B, N, F] of one graph with weights."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv(FEATURES, FEATURES)

    def forward(self, x, edge_index, edge_weight):
        return self.conv(x, edge_index, edge_weight).tanh()


def test_a_captured_step_takes_a_batch_of_features_on_weighted_edges():
    plain = _OfSeries(pyg.GCNConv).to(DEVICE)
    model = pyg_dfgnn.accelerate(_OfSeries(pyg.GCNConv).to(DEVICE))
    model.load_state_dict(plain.state_dict())
    data = Data(
        x=torch.randn(3, NODES, FEATURES, device=DEVICE),
        edge_index=random_edges(NODES, NODES, 90).to(DEVICE),
        edge_weight=torch.rand(90, device=DEVICE),
        y=torch.randn(3, NODES, FEATURES, device=DEVICE),
    )

    def call(module, data):
        return module(data.x, data.edge_index, data.edge_weight)

    def loss(out, data):
        return (out - data.y).square().mean()

    optimizers = [torch.optim.Adam(each.parameters(), capturable=True) for each in (plain, model)]
    step = pyg_dfgnn.capture_step(model, loss, optimizers[1], data, forward=call)
    for k in range(8):
        data.x.normal_()
        optimizers[0].zero_grad()
        want = loss(call(plain, data), data)
        want.backward()
        optimizers[0].step()
        torch.testing.assert_close(
            step(), want.detach(), **elementwise("float32/steps"), msg=lambda text, k=k: f"{k}: {text}"
        )
