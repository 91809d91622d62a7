"""GINEConv on edges of few features, which the kernel maps to the width of the nodes itself."""

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_dfgnn
from pyg_dfgnn import nn as ours
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.reference.zoo import hub, random
from pyg_dfgnn.utils import scatter
from tests.covering import over
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device

pytestmark = needs_compiler

WIDTH, FEW, MANY = 6, 3, 40
GRAPHS = {"random": random(33, 33, 140), "hub": hub(70), "bipartite": random(20, 30, 90)}


def twins(numbers, **options):
    convs = [module.GINEConv(torch.nn.Linear(WIDTH, 4), edge_dim=numbers, **options) for module in (ours, pyg)]
    convs[1].load_state_dict(convs[0].state_dict())
    return convs[0], convs[1].double()


def call(conv, x, edge_index, edge_attr, dtype):
    """The output and all gradients, and whether backward keeps a row of the nodes' width for each edge."""
    leaves = [*(each.to(dtype).requires_grad_() for each in x), edge_attr.to(dtype).requires_grad_()]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        out = conv(tuple(leaves[:-1]) if len(x) > 1 else leaves[0], edge_index, leaves[-1])
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(dtype)
    parameters = list(conv.parameters())
    results = [out.detach(), *torch.autograd.grad((out * weights).sum(), [*leaves, *parameters])]
    return results, (edge_attr.size(0), WIDTH) in map(tuple, kept)


@over(
    [("aggr", "numbers")],
    aggr=("sum", "mean", "max", "std"),
    numbers=(1, FEW, MANY),
    graph=tuple(GRAPHS),
    train_eps=(False, True),
)
def test_outputs_and_gradients(aggr, numbers, graph, train_eps):
    torch.manual_seed(0)
    case = GRAPHS[graph]
    conv, other = twins(numbers, aggr=aggr, train_eps=train_eps)
    x = [torch.randn(case.num_src, WIDTH)]
    if case.num_src != case.num_dst:
        x.append(torch.randn(case.num_dst, WIDTH))
    edge_attr = torch.randn(case.num_edges, numbers)
    with pyg_dfgnn.local_settings(fallback="error"), emulated_device() as launched:
        actual, is_wide = call(conv, x, case.edge_index, edge_attr, torch.float32)
    assert "segment_backward_sources" in launched and is_wide is (numbers == MANY)
    expected, _ = call(other, x, case.edge_index, edge_attr, torch.float64)
    for got, want in zip(actual, expected, strict=True):
        assert (got.double() - want).norm() <= 1e-5 * want.norm().clamp(min=1e-2)


def test_a_layer_that_does_more_is_called():
    """By a hook, by another class, and without the bias that PyG gives it."""
    torch.manual_seed(0)
    x, edge_attr, edge_index = torch.randn(33, WIDTH), torch.randn(140, FEW), GRAPHS["random"].edge_index
    conv, calls = twins(FEW)[0], []
    conv.lin.register_forward_hook(lambda *_: calls.append(1))
    other = twins(FEW)[0]
    other.lin = torch.nn.Sequential(other.lin, torch.nn.Tanh())
    bare = twins(FEW)[0]
    bare.lin.bias = None
    for each in (conv, other, bare):
        with emulated_device() as launched:
            out = each(x, edge_index, edge_attr)
        assert launched
        sent = (x[edge_index[0]] + each.lin(edge_attr)).relu()
        torch.testing.assert_close(
            out, each.nn(x + scatter(sent, edge_index[1], dim_size=33)), **elementwise("float32")
        )
    assert len(calls) == 2


def test_the_layer_is_part_of_the_plan():
    case = GRAPHS["random"]
    conv, x = twins(FEW)[0], torch.randn(33, WIDTH)
    with emulated_device():
        plan = pyg_dfgnn.describe_plan(conv, x, case.edge_index, torch.randn(140, FEW))
        wide = pyg_dfgnn.describe_plan(conv, x, case.edge_index, torch.randn(140, MANY))
    assert plan.fused and (plan.problem.message, plan.problem.edge_channels) == ("relu_linear", FEW)
    assert wide.fused and (wide.problem.message, wide.problem.edge_channels) == ("relu_add", 0)


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.parametrize("numbers", [FEW, MANY])
def test_compile(numbers):
    torch.manual_seed(0)
    case, (conv, _) = GRAPHS["random"], twins(numbers)
    x, edge_attr = [torch.randn(33, WIDTH)], torch.randn(140, numbers)
    expected, _ = call(conv, x, case.edge_index, edge_attr, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    with emulated_device() as launched:
        actual, _ = call(compiled, x, case.edge_index, edge_attr, torch.float32)
    assert launched
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, **elementwise("float32"))
