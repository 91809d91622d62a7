"""Captured layers equal PyG's, in float64, with every gradient; what is on edges runs in programs."""

import copy

import pytest
import torch

from pyg_dfgnn.reference.tolerances import elementwise
from tests.frontend.layers import EDGE, FUSED, LAYERS, PARTLY, TORCH, WIDTH
from tests.frontend.marks import compile_layer

SIZES = ((11, 37, True), (17, 60, True), (17, 61, False), (11, 37, False))
"""Nodes, edges and mode of calls one after another."""


def results(layer, inputs, args):
    """Outputs, gradients of all inputs and parameters, and buffers."""
    out = layer(*args)
    outputs = out if isinstance(out, tuple) else (out,)
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in outputs)
    wrt = [*inputs, *layer.parameters()]
    return [*outputs, *torch.autograd.grad(loss, wrt, materialize_grads=True, allow_unused=True), *layer.buffers()]


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b, **elementwise("float64/programs"))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_users_equal_pygs(name, captured):
    kind, what = LAYERS[name]
    torch.manual_seed(0)
    layer = kind().double()
    own = copy.deepcopy(layer)
    compile_layer(layer)
    for nodes, edges, training in SIZES:
        x = torch.randn(nodes, WIDTH, dtype=torch.float64, requires_grad=True)
        edge = torch.randn(edges, EDGE, dtype=torch.float64, requires_grad=True)
        edge_index = torch.randint(0, nodes, (2, edges))
        args = x, edge_index, edge
        expected = results(own.train(training), [x, edge], args)
        assert_equal(results(layer.train(training), [x, edge], args), expected)
    every = sum(graph.counts[0] for graph in captured[:1])
    inside = sum(graph.counts[1] for graph in captured[:1])
    assert every and {FUSED: inside == every, PARTLY: 0 < inside < every, TORCH: inside == 0}[what]
    assert all(not region.reasons for graph in captured for region in graph.regions)
