"""Regions of captured layers on kernels, which the emulator runs."""

import copy

import pytest
import torch

from pyg_dfgnn.ops.relational.backend import KERNELS, running
from pyg_dfgnn.reference.tolerances import elementwise
from tests.frontend.forms import FORMS
from tests.frontend.layers import EDGE, WIDTH
from tests.frontend.marks import compile_layer
from tests.frontend.test_layers import results
from tests.frontend.wide import WIDE, arguments
from tests.kernels.emulated import emulated_device


@pytest.mark.parametrize("name", ["CGConv", "EGConv", "FAConv", "GATConv", "GCNConv", "ResGatedGraphConv"])
def test_regions_on_kernels_equal_pygs(name, captured):
    layer = WIDE[name][0](16)
    own = copy.deepcopy(layer)
    compile_layer(layer)
    edge_index, x = torch.randint(0, 9, (2, 31)), torch.randn(9, 16).requires_grad_()
    results = []
    for each in (layer, own):
        with emulated_device() as launched, running(KERNELS):
            out = each(*arguments(name, x, edge_index))
            grads = torch.autograd.grad(out.sin().sum(), [x, *each.parameters()])
        results.append([out, *grads])
        assert (len(launched) > 0) == (each is layer)
    torch.testing.assert_close(*results, **elementwise("float32"))
    assert captured[0].regions and not any(region.reasons for region in captured[0].regions)


ON_KERNELS = (
    "RowsOfParts RowsOfResults SoftmaxOfThePackage BatchOfMaps BatchOfGates BatchOfSoftmaxes BatchOfNetworks "
    "BatchOfEdges BatchBehindNodes SumOfAStack MeanOfHeads JoinOfHeads SetsColumns FillsParts EditsARowInAnotherShape "
    "ReadsBeforeAndAfter SetsAPartToAnother"
)


@pytest.mark.parametrize("name", ON_KERNELS.split())
def test_forms_on_kernels_equal_pygs(name, captured):
    torch.manual_seed(1)
    kind, _ = FORMS[name]
    layer = kind()
    own = copy.deepcopy(layer)
    compile_layer(layer)
    x = torch.randn(*getattr(kind, "batch", ()), 9, WIDTH).requires_grad_()
    edge, edge_index = torch.randn(31, EDGE).requires_grad_(), torch.randint(0, 9, (2, 31))
    found = []
    for each in (layer, own):
        with emulated_device() as launched, running(KERNELS):
            found.append(results(each, [x, edge], (x, edge_index, edge)))
        assert (len(launched) > 0) == (each is layer)
    torch.testing.assert_close(*found, **elementwise("float32"))
    assert captured[0].regions and not any(region.reasons for region in captured[0].regions)
