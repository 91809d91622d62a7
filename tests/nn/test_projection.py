"""Projections of one input: under one node of autograd they give what each layer gives alone."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.utils.prune
from torch_geometric.nn.dense.linear import Linear

from pyg_dfgnn.nn.projection import project
from pyg_dfgnn.ops import gemm
from tests.kernels.emulated import emulated_device


@pytest.fixture
def products(monkeypatch):
    """Channels of the products that were taken."""
    taken = []
    function = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        taken.append(len(weight))
        return function(x, weight, bias)

    monkeypatch.setattr(gemm, "F", SimpleNamespace(linear=linear))
    return taken


def layers_of(count, bias=True, out=6):
    return [Linear(5, out, bias=bias) for _ in range(count)]


def apart(x, heads, layers):
    return [layer(x).view(len(x), heads, layer.out_channels // heads) for layer in layers]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("rows, most", [(9, 9), (9, 8), (1, 9), (0, 9), (0, -1)])
def test_values_and_gradients(count, bias, rows, most, products, monkeypatch):
    """Of few rows and of many, of one and of none."""
    monkeypatch.setattr(gemm, "MAX_ROWS", most)
    layers, x = layers_of(count, bias), torch.randn(rows, 5, requires_grad=True)
    leaves = [x, *(parameter for layer in layers for parameter in layer.parameters())]
    grads = [torch.randn(rows, 2, 3) for _ in layers]
    together = project(x, 2, *layers)
    assert products == [6] * count and len(together) == count
    assert all(out.is_contiguous() for out in together)
    assert len({out.grad_fn for out in together}) == 1
    expected = apart(x, 2, layers)
    torch.testing.assert_close(list(together), expected)
    torch.testing.assert_close(
        torch.autograd.grad(together, leaves, grads), torch.autograd.grad(expected, leaves, grads), rtol=1e-5, atol=1e-6
    )
    with torch.no_grad():
        found = project(x, 2, *layers)
    assert not any(out.requires_grad for out in found)
    torch.testing.assert_close(list(found), expected)


@pytest.mark.parametrize("most", [9, 8])
def test_gradients_that_are_not_wanted(most, monkeypatch):
    """A result that nothing reads, frozen parameters, an input without a gradient."""
    monkeypatch.setattr(gemm, "MAX_ROWS", most)
    layers, x = layers_of(3), torch.randn(9, 5)
    layers[0].weight.requires_grad_(False)
    layers[1].bias.requires_grad_(False)
    (project(x, 2, *layers)[1] ** 2).sum().backward()
    (weight,) = torch.autograd.grad((layers[1](x) ** 2).sum(), [layers[1].weight])
    torch.testing.assert_close(layers[1].weight.grad, weight)
    assert layers[0].weight.grad is None and layers[1].bias.grad is None
    assert layers[0].bias.grad is None and layers[2].weight.grad is None
    for parameter in (parameter for layer in layers for parameter in layer.parameters()):
        parameter.requires_grad_(False)
    x.requires_grad_()
    (project(x, 2, *layers)[2] ** 2).sum().backward()
    (grad,) = torch.autograd.grad((layers[2](x) ** 2).sum(), [x])
    torch.testing.assert_close(x.grad, grad)


@pytest.mark.parametrize("edited", ["input", "weight"])
def test_an_edit_after_the_forward_pass_is_noticed(edited):
    layers, x = [Linear(8, 12) for _ in range(2)], torch.randn(9, 8, requires_grad=True)
    with emulated_device():
        out = project(x, 2, *layers)
    with torch.no_grad():
        (x if edited == "input" else layers[0].weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out[0].sum().backward()


def test_a_weight_that_no_gradient_reads_may_be_edited():
    layers, x = [Linear(8, 12) for _ in range(2)], torch.randn(9, 8)
    with emulated_device():
        out = project(x, 2, *layers)
        with torch.no_grad():
            layers[0].weight.mul_(2)
        out[0].sum().backward()
    torch.testing.assert_close(layers[0].weight.grad, x.sum(0).expand(12, 8))


def test_what_is_called_layer_by_layer(products):
    """Other shapes, a bias here and there, subclasses, hooks of any kind, lazy layers."""
    x = torch.randn(9, 5)
    seen = []

    class Other(Linear):
        pass

    def hooked(register):
        layers = layers_of(2)
        getattr(layers[1], register)(lambda *given: seen.append(register))
        return layers

    replaced = layers_of(2)
    replaced[1].forward = lambda x: x.new_zeros(9, 6)
    cases = [
        [*layers_of(1), *layers_of(1, out=7)],
        [*layers_of(1), *layers_of(1, bias=False)],
        [*layers_of(1), Other(5, 6)],
        [*layers_of(1), Linear(-1, 6)],
        hooked("register_forward_hook"),
        hooked("register_forward_pre_hook"),
        replaced,
    ]
    for layers in cases:
        found = project(x, 1, *layers)
        assert all(map(torch.equal, found, apart(x, 1, layers)))
    assert seen == ["register_forward_hook"] * 2 + ["register_forward_pre_hook"] * 2
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *given: seen.append("global"))
    project(x, 1, *layers_of(2))
    handle.remove()
    assert seen[-2:] == ["global"] * 2
    assert products == []


def test_weights_kept_elsewhere_and_sparse_input(products):
    """Pruned and normalised layers, a weight that is set as a plain tensor, sparse features."""
    x = torch.randn(9, 5)
    pruned, normalised, plain = layers_of(2), layers_of(2), layers_of(2)
    torch.nn.utils.prune.l1_unstructured(pruned[0], "weight", 0.5)
    torch.nn.utils.weight_norm(normalised[0])
    weight = plain[0].weight.detach().clone()
    del plain[0].weight
    plain[0].weight = weight
    for layers in (pruned, normalised, plain):
        assert all(map(torch.equal, project(x, 2, *layers), apart(x, 2, layers)))
    layers = layers_of(2)
    for sparse in (x.to_sparse(), x.to_sparse_csr()):
        torch.testing.assert_close(list(project(sparse, 2, *layers)), apart(x, 2, layers))
    assert products == []


def test_torch_compile_sees_each_layer():
    layers, x = layers_of(2), torch.randn(9, 5)
    functions = []

    def record(module, inputs):
        functions.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    found = torch.compile(project, backend=record, fullgraph=True)(x, 2, *layers)
    torch.testing.assert_close(list(found), apart(x, 2, layers))
    assert functions == [torch.nn.functional.linear] * 2


def test_autocast():
    layers, x = layers_of(3), torch.randn(9, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = project(x, 2, *layers), apart(x, 2, layers)
    assert {out.dtype for out in found} == {torch.bfloat16}
    assert all(map(torch.equal, found, expected))


def test_what_torch_func_left_behind_is_called():
    """It seems a tensor, without memory of its own."""
    kept = []

    def function(v):
        kept.append(v * 2)
        return v.square().sum()

    torch.func.grad(function)(torch.randn(9, 8))
    layers = [Linear(8, 12) for _ in range(2)]
    with emulated_device() as launched:
        found = project(kept[0], 2, *layers)
    assert launched == [] and all(map(torch.equal, found, apart(kept[0], 2, layers)))


@pytest.mark.parametrize("count", [1, 3])
def test_by_kernel(count, monkeypatch):
    """Features and channels in multiples of four; one layer of many rows; a layer whose result nothing reads."""
    monkeypatch.setattr(gemm, "MAX_ROWS", 29)
    layers, x = [Linear(8, 12) for _ in range(count)], torch.randn(30, 8, requires_grad=True)
    leaves = [x, *(parameter for layer in layers for parameter in layer.parameters())]
    with emulated_device() as launched:
        found = project(x, 3, *layers)
        grads = torch.autograd.grad([each.square().sum() for each in found[:2]], leaves, allow_unused=True)
    assert launched == ["gemm_forward", "gemm_backward"]
    expected = apart(x, 3, layers)
    want = torch.autograd.grad([each.square().sum() for each in expected[:2]], leaves, allow_unused=True)
    torch.testing.assert_close(list(found), expected)
    for got, expected in zip(grads, want, strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
