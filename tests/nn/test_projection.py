"""Linear layers of one input: as one product they give what each gives alone."""

import pytest
import torch
import torch.nn.utils.prune
from torch_geometric.nn.dense.linear import Linear

from pyg_dfgnn.nn import projection
from pyg_dfgnn.nn.projection import project


@pytest.fixture
def products(monkeypatch):
    """The batched products that were taken."""
    taken = []
    for name in ("bmm", "baddbmm"):
        function = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *tensors, name=name, function=function: taken.append(name) or function(*tensors)
        )
    return taken


def layers_of(count, bias=True, out=6):
    return [Linear(5, out, bias=bias) for _ in range(count)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [2, 4])
def test_values_and_gradients(count, bias, products):
    layers, x = layers_of(count, bias), torch.randn(9, 5, requires_grad=True)
    leaves = [x, *(parameter for layer in layers for parameter in layer.parameters())]
    grads = [torch.randn(9, 6) for _ in layers]
    together = project(x, *layers)
    assert products == ["baddbmm" if bias else "bmm"] and len(together) == count
    assert all(out.is_contiguous() for out in together)
    apart = [layer(x) for layer in layers]
    torch.testing.assert_close(list(together), apart)
    torch.testing.assert_close(
        torch.autograd.grad(together, leaves, grads), torch.autograd.grad(apart, leaves, grads), rtol=1e-5, atol=1e-6
    )


def test_what_is_called_layer_by_layer(products, monkeypatch):
    """Other shapes, a bias here and there, subclasses, hooks of any kind, lazy layers, many rows."""
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
        found = project(x, *layers)
        assert all(map(torch.equal, found, [layer(x) for layer in layers]))
    assert seen == ["register_forward_hook"] * 2 + ["register_forward_pre_hook"] * 2
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *given: seen.append("global"))
    project(x, *layers_of(2))
    handle.remove()
    assert seen[-2:] == ["global"] * 2
    monkeypatch.setattr(projection, "_MAX_ROWS", 8)
    project(x, *layers)
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
        assert all(map(torch.equal, project(x, *layers), [layer(x) for layer in layers]))
    layers = layers_of(2)
    for sparse in (x.to_sparse(), x.to_sparse_csr()):
        torch.testing.assert_close(list(project(sparse, *layers)), [layer(x) for layer in layers])
    assert products == []


def test_torch_compile_sees_each_layer():
    layers, x = layers_of(2), torch.randn(9, 5)
    functions = []

    def record(module, inputs):
        functions.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    found = torch.compile(project, backend=record, fullgraph=True)(x, *layers)
    torch.testing.assert_close(list(found), [layer(x) for layer in layers])
    assert functions == [torch.nn.functional.linear] * 2


def test_autocast():
    layers, x = layers_of(3), torch.randn(9, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        together, apart = project(x, *layers), [layer(x) for layer in layers]
    assert {out.dtype for out in together} == {torch.bfloat16}
    torch.testing.assert_close(list(together), apart, rtol=2e-2, atol=2e-2)
