"""TransformerConv with edge features whose terms are taken at the targets, its kernels emulated, against PyG's conv."""

from contextlib import nullcontext

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_dfgnn.nn as ours
from pyg_dfgnn import describe_plan
from pyg_dfgnn.ops.attention import functional
from pyg_dfgnn.reference.tolerances import relative_error
from pyg_dfgnn.reference.zoo import ZOO
from pyg_dfgnn.settings import settings
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device

pytestmark = needs_compiler
HEADS, CHANNELS, FEATURES = 4, 4, 6


@pytest.fixture(autouse=True, params=["few rows", "many rows"])
def no_fallback(request, default_settings, monkeypatch):
    """Few rows are multiplied by torch, many by kernels."""
    settings(fallback="error")
    if request.param == "many rows":
        monkeypatch.setattr(functional, "_MANY_ROWS", 0)


def build(edge_dim, **options):
    """Our conv, and PyG's with its parameters in float64."""
    conv = ours.TransformerConv(FEATURES, CHANNELS, heads=HEADS, edge_dim=edge_dim, **options)
    other = pyg.TransformerConv(FEATURES, CHANNELS, heads=HEADS, edge_dim=edge_dim, **options).double()
    other.load_state_dict(conv.state_dict())
    return conv, other


def results(conv, x, edge_index, edge_attr, called=None, cast=None):
    """Output and gradients by name."""
    x, edge_attr = x.clone().requires_grad_(), edge_attr.clone().requires_grad_()
    conv.zero_grad(set_to_none=True)
    with nullcontext() if cast is None else torch.autocast("cpu", dtype=cast):
        out = (conv if called is None else called)(x, edge_index, edge_attr)
    torch.manual_seed(1)
    (out * torch.randn(out.shape, dtype=torch.float64).to(out.dtype)).sum().backward()
    grads = {name: parameter.grad for name, parameter in conv.named_parameters() if parameter.grad is not None}
    # The bias of the keys shifts all logits of a target alike.
    grads.pop("lin_key.bias", None)
    return {"out": out.detach(), "x": x.grad, "edge_attr": edge_attr.grad, **grads}


def assert_close(actual, expected, bound):
    assert {*actual} == {*expected}
    errors = {name: relative_error(tensor, expected[name]) for name, tensor in actual.items()}
    assert max(errors.values()) < bound, errors


def inputs_on(case, edge_dim):
    return torch.randn(case.num_src, FEATURES), case.edge_index, torch.randn(case.edge_index.size(1), edge_dim)


@pytest.mark.parametrize("options", [{}, {"beta": True, "concat": False}, {"root_weight": False}], ids=str)
@pytest.mark.parametrize("edge_dim", [3, 8])
@pytest.mark.parametrize("graph", ["batch", "hub"])
def test_against_pyg_in_float64(graph, edge_dim, options):
    case = ZOO[graph]()
    conv, other = build(edge_dim, **options)
    x, edge_index, edge_attr = inputs_on(case, edge_dim)
    with emulated_device() as launched:
        actual = results(conv, x, edge_index, edge_attr)
        plan = describe_plan(conv, x, edge_index, edge_attr)
    assert "attention_backward_sources" in launched and plan.problem.edge_channels == edge_dim
    assert_close(actual, results(other, x.double(), edge_index, edge_attr.double()), 5e-6)


def test_compiled():
    conv, other = build(8)
    x, edge_index, edge_attr = inputs_on(ZOO["batch"](), 8)
    torch._dynamo.reset()
    called = torch.compile(conv, backend="aot_eager", fullgraph=True)
    with emulated_device() as launched:
        actual = results(conv, x, edge_index, edge_attr, called)
    assert "attention_backward_sources" in launched
    assert_close(actual, results(other, x.double(), edge_index, edge_attr.double()), 5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    """The dtypes of PyG, and no further from float64 than its own autocast."""
    conv, other = build(8)
    x, edge_index, edge_attr = inputs_on(ZOO["batch"](), 8)
    plain = pyg.TransformerConv(FEATURES, CHANNELS, heads=HEADS, edge_dim=8)
    plain.load_state_dict(conv.state_dict())
    expected = results(other, x.double(), edge_index, edge_attr.double())
    pygs = results(plain, x, edge_index, edge_attr, cast=dtype)
    with emulated_device() as launched:
        actual = results(conv, x, edge_index, edge_attr, cast=dtype)
    assert "attention_backward_sources" in launched
    assert {name: tensor.dtype for name, tensor in actual.items()} == {name: t.dtype for name, t in pygs.items()}
    for name, tensor in actual.items():
        assert relative_error(tensor, expected[name]) < 2 * relative_error(pygs[name], expected[name]), name


@pytest.mark.parametrize("change", ["wide", "hook", "bias", "frozen"])
def test_which_layers_are_taken_apart(change):
    """A layer that is more than its product is called; one that is frozen gets no gradient."""
    edge_dim = HEADS * CHANNELS if change == "wide" else 3
    conv, other = build(edge_dim)
    x, edge_index, edge_attr = inputs_on(ZOO["batch"](), edge_dim)
    calls = []
    if change == "hook":
        conv.lin_edge.register_forward_hook(lambda *_: calls.append(1))
    if change == "bias":
        for each in (conv, other):
            each.lin_edge.bias = torch.nn.Parameter(torch.ones(HEADS * CHANNELS, dtype=each.lin_edge.weight.dtype))
    if change == "frozen":
        conv.lin_edge.requires_grad_(False)
        other.lin_edge.requires_grad_(False)
    with emulated_device():
        plan = describe_plan(conv, x, edge_index, edge_attr)
        actual = results(conv, x, edge_index, edge_attr)
    assert (plan.problem.edge_channels > 0) == (change == "frozen")
    assert calls == [1] * (change == "hook")
    assert_close(actual, results(other, x.double(), edge_index, edge_attr.double()), 5e-6)


def test_edge_features_of_another_dtype_are_refused_as_by_pyg():
    conv, _ = build(3)
    x, edge_index, edge_attr = inputs_on(ZOO["batch"](), 3)
    with emulated_device(), pytest.raises(RuntimeError, match="dtype"):
        conv(x, edge_index, edge_attr.double())
