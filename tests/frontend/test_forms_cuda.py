"""Forms of layers on a GPU: those that kernels take give the outputs and gradients of float64, with no region left."""

import copy

import pytest
import torch

from pyg_dfgnn.ops.relational.backend import KERNELS, running
from pyg_dfgnn.reference.tolerances import BACKWARD, largest_errors, tolerance, worst_beside
from pyg_dfgnn.settings import local_settings
from tests.frontend.forms import FORMS
from tests.frontend.layers import EDGE, WIDTH
from tests.frontend.marks import compile_layer
from tests.frontend.test_kernels import ON_KERNELS

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("name", ON_KERNELS.split())
def test_forms_on_a_gpu_equal_float64(name, captured):
    torch.manual_seed(0)
    kind, _ = FORMS[name]
    exact = kind().double()
    layer = compile_layer(copy.deepcopy(exact).to("cuda", torch.float32))
    own = copy.deepcopy(exact).to("cuda", torch.float32)
    nodes, edges = 300, 6000
    x = torch.randn(*getattr(kind, "batch", ()), nodes, WIDTH, dtype=torch.float64)
    edge, edge_index = torch.randn(edges, EDGE, dtype=torch.float64), torch.randint(0, nodes, (2, edges))

    def run(each, device, dtype):
        leaves = [tensor.to(device, dtype).requires_grad_() for tensor in (x, edge)]
        out = each(leaves[0], edge_index.to(device), leaves[1])
        outputs = out if isinstance(out, tuple) else (out,)
        generator = torch.Generator().manual_seed(1)
        drawn = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in outputs]
        loss = sum((part * number.to(part)).sum() for part, number in zip(outputs, drawn))
        gradients = torch.autograd.grad(loss, [*leaves, *each.parameters()], materialize_grads=True, allow_unused=True)
        found = [(f"out_{k}", part) for k, part in enumerate(outputs)]
        found += [(f"grad_{k}", part) for k, part in enumerate(gradients)]
        return {key: part.detach().cpu() for key, part in found}

    expected = run(exact, "cpu", torch.float64)
    with local_settings(deterministic=True, check_ids="now"), running(KERNELS):
        actual = run(layer, "cuda", torch.float32)
    errors, bound = largest_errors(actual, expected), tolerance("float32", BACKWARD, "relational").largest
    pygs = largest_errors(run(own, "cuda", torch.float32), expected)
    assert worst_beside(errors, bound, pygs).is_right, (errors, pygs)
    regions = [region for graph in captured for region in graph.regions]
    assert regions and not any(region.reasons for region in regions)
