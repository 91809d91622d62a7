"""Layers of every family on a GPU that is not the current one: the results of the first GPU, bit by bit."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_dfgnn.nn as ours
from pyg_dfgnn import accelerate
from pyg_dfgnn.reference.zoo import ZOO
from pyg_dfgnn.settings import local_settings

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

RELATIONS = 3
LAYERS = {
    "attention": lambda: ours.GATv2Conv(16, 8, heads=2),
    "aggregation": lambda: ours.PNAConv(16, 16, ["mean", "max", "std"], ["identity"], torch.tensor([0, 1, 2])),
    "product": lambda: ours.GCNConv(16, 16),
    "relational": lambda: ours.RGCNConv(16, 16, RELATIONS),
    "relational attention": lambda: ours.RGATConv(16, 16, RELATIONS),
    "messages": lambda: accelerate(pyg.GENConv(16, 16)),
}


def results(layer, edges, device):
    """The output and all gradients on a device, on the CPU."""
    layer = copy.deepcopy(layer).to(device)
    x = torch.randn(edges.num_src, 16, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    edge_index = edges.edge_index.to(device)
    types = (torch.arange(edges.num_edges, device=device) % RELATIONS,)
    out = layer(x, edge_index, *(types if isinstance(layer, (ours.RGCNConv, ours.RGATConv)) else ()))
    gradients = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], allow_unused=True)
    assert out.device == torch.device(device)
    return [tensor.cpu() for tensor in (out.detach(), *gradients) if tensor is not None]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_runs_where_its_inputs_are(name):
    layer, edges = LAYERS[name](), ZOO["hub"]()
    with local_settings(fallback="error"):
        # The other device first, so that nothing is there from the current one.
        with torch.cuda.device(0):
            there = results(layer, edges, "cuda:1")
        here = results(layer, edges, "cuda:0")
    assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))
