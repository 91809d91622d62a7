"""HeteroLinear and HeteroDictLinear on one product equal PyG's in float64, in outputs and all gradients."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.nn.to_hetero_module import ToHeteroLinear

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference.tolerances import elementwise
from tests.nn.convs import both, reasons_of
from tests.nn.relational import results_of

pytestmark = pytest.mark.usefixtures("fused_on_cpu", "forget_logged")

ROWS = {
    "any order": torch.tensor([2, 0, 3, 0, 2, 2, 0]),
    "sorted": torch.tensor([0, 0, 2, 2, 2, 3]),
    "int32": torch.tensor([3, 1], dtype=torch.int32),
    "none": torch.tensor([], dtype=torch.int64),
}
"""No row has type 4."""


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def assert_same(layers, *args):
    assert layers[0]._reasons(*args) == []
    with pyg_dfgnn.local_settings(fallback="error"):
        actual, expected = (results_of(layer, *args) for layer in layers)
    assert list(actual) == list(expected)
    for name, want in expected.items():
        torch.testing.assert_close(
            actual[name], want, **elementwise("float64"), msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", ROWS)
def test_hetero_linear(rows, bias):
    type_vec = ROWS[rows].clone()
    layers = both("HeteroLinear", 3, 5, 5, bias=bias)
    # PyG's index_sort and bincount of types take int64.
    assert layers[0]._reasons(draw(type_vec.numel(), 3), type_vec) == []
    assert_same(layers, draw(type_vec.numel(), 3), type_vec)


def names(count):
    return [f"t{i}" for i in range(count)]


@pytest.mark.parametrize("bias", [True, False])
def test_hetero_dict_linear(bias):
    keys = names(12)
    layers = both("HeteroDictLinear", 3, 5, keys, bias=bias)
    x_dict = {key: draw(i, 3) for i, key in enumerate(reversed(keys))}
    assert_same(layers, x_dict)
    del x_dict["t4"]
    assert_same(layers, x_dict)


def test_few_types_take_a_product_each():
    keys = names(3)
    layers = both("HeteroDictLinear", 3, 5, keys)
    x_dict = {key: draw(4, 3) for key in keys}
    with pyg_dfgnn.local_settings(fallback="error"):
        torch.testing.assert_close(layers[0](x_dict), layers[1](x_dict), rtol=0, atol=0)
    assert reasons_of(layers[0], x_dict) == ["3 types take a product each, 10 and more are one"]


def test_reasons():
    layer, x, type_vec = ours.HeteroLinear(3, 5, 4), torch.randn(6, 3), torch.arange(6) % 4
    cases = [
        ((x[None], type_vec), "x is no matrix [N, F] ([1, 6, 3])"),
        ((x.double(), type_vec), "x is in torch.float64 and the parameters in torch.float32"),
        ((x, type_vec.float()), "type_vec is no int64 or int32 vector (torch.float32, [6])"),
    ]
    for args, reason in cases:
        assert reason in reasons_of(layer, *args)
        with pyg_dfgnn.local_settings(fallback="error"), pytest.raises(UnsupportedError) as error:
            layer(*args)
        assert reason in error.value.reasons
    wide = ours.HeteroDictLinear({key: 3 + (key == "t0") for key in names(10)}, 5)
    x_dict = {key: torch.randn(2, lin.in_channels) for key, lin in wide.lins.items()}
    assert reasons_of(wide, x_dict) == ["the features have several widths"]
    assert wide(x_dict)["t0"].shape == (2, 5)


def test_refused_types():
    layer, x = ours.HeteroLinear(3, 5, 4), torch.randn(6, 3)
    with pytest.raises(ValueError, match=r"'type_vec' needs .*\[0, num_types=4\) \(got 0 to 5\)"):
        layer(x, torch.arange(6))
    with pytest.raises(ValueError, match=r"'type_vec' needs shape \[N=6\] \(got \[5\]\)"):
        layer(x, torch.zeros(5, dtype=torch.int64))


def test_lazy_sizes():
    """PyG's code initialises the weight in the first call, as the same seed does there."""
    results = []
    for library in (ours, pyg):
        torch.manual_seed(0)
        layer = library.HeteroLinear(-1, 5, 4)
        results.append([layer(torch.ones(6, 3), torch.arange(6) % 4) for _ in range(2)])
    torch.testing.assert_close(results[0], results[1])


def test_nothing_is_built_again(monkeypatch):
    layer, x, type_vec = ours.HeteroLinear(3, 5, 4), torch.randn(6, 3), torch.tensor([3, 0, 1, 0, 3, 3])
    expected = layer(x, type_vec)
    with monkeypatch.context() as patch:
        patch.setattr(Graph, "__init__", None)
        torch.testing.assert_close(layer(x, type_vec), expected)
    type_vec[0] = 2
    other = pyg.HeteroLinear(3, 5, 4)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x, type_vec), other(x, type_vec))


def test_describe_and_accelerate():
    model = torch.nn.ModuleList([pyg.HeteroLinear(3, 5, 4), pyg.HeteroDictLinear(3, 5, names(10))])
    pyg_dfgnn.accelerate(model)
    assert [type(layer) for layer in model] == [ours.HeteroLinear, ours.HeteroDictLinear]
    assert all(row.drop_in and row.why == "" for row in pyg_dfgnn.report(model))
    typed = pyg_dfgnn.describe_plan(model[0], torch.randn(6, 3), torch.arange(6) % 4)
    assert typed.fused and typed.graph == "6 rows of 4 types" and "Ts[3, 5]" in str(typed.plan)
    joint = pyg_dfgnn.describe_plan(model[1], {name: torch.randn(2, 3) for name in names(10)})
    assert joint.fused and joint.graph == "20 rows of 10 types"


def test_tables_and_tensors_of_to_hetero_linear_agree():
    types = ["a", "b", "c"]
    module = ToHeteroLinear(nn.Linear(16, 32), types)
    pyg_dfgnn.accelerate(module)
    tables = {name: torch.randn(size, 16) for name, size in zip(types, (5, 1, 9), strict=True)}
    index = torch.arange(3).repeat_interleave(torch.tensor([5, 1, 9]))
    apart, together = module(tables), module(torch.cat(list(tables.values())), index)
    assert type(module.hetero_module) is pyg.HeteroLinear
    assert torch.allclose(torch.cat(list(apart.values())), together)
    assert "ToHeteroLinear" in str(pyg_dfgnn.report(module))
