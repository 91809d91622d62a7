"""Regions of captured layers on kernels, which the emulator runs."""

import copy

import pytest
import torch

from benchmarks.cases.messages import MessageCase
from pyg_dfgnn.ops.relational.backend import KERNELS, running
from pyg_dfgnn.reference.tolerances import elementwise
from tests.frontend.marks import compile_layer
from tests.kernels.emulated import emulated_device


@pytest.mark.parametrize("op", ["gated_gcn", "my_gat", "my_gcn", "eg", "edge_gate", "fa"])
def test_regions_on_kernels_equal_pygs(op, captured):
    case = MessageCase.of(op, "16")
    layer = case.module(torch.device("cpu"))
    own = copy.deepcopy(layer)
    compile_layer(layer)
    edge_index, x = torch.randint(0, 9, (2, 31)), torch.randn(9, 16).requires_grad_()
    edge = None
    if case.spec.edge:
        edge = torch.rand(31, *((8,) if case.spec.edge == "attr" else ())) + 0.1
    results = []
    for each in (layer, own):
        with emulated_device() as launched, running(KERNELS):
            out = each(*case.arguments(edge_index, x, edge))
            grads = torch.autograd.grad(out.sin().sum(), [x, *each.parameters()])
        results.append([out, *grads])
        assert (len(launched) > 0) == (each is layer)
    torch.testing.assert_close(*results, **elementwise("float32"))
    assert captured[0].regions and not any(region.reasons for region in captured[0].regions)
