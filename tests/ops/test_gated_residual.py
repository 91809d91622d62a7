"""The end of a layer of HGT equals torch's functions one by one, and saves nothing but its inputs."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from pyg_dfgnn.ops.gated_residual import gated_residual
from pyg_dfgnn.reference.tolerances import direction_of, largest_errors, tolerance

NAMES = ("h", "weight", "bias", "skip", "x")


def one_by_one(h, weight, bias, skip, x):
    share = skip.sigmoid()
    return share * linear(gelu(h), weight, bias) + (1 - share) * x


def operands(rows: int, features: int, channels: int, dtype: torch.dtype, device="cpu") -> dict[str, Tensor]:
    shapes = ((rows, features), (channels, features), (channels,), (1,), (rows, channels))
    generator = torch.Generator().manual_seed(rows)
    return {
        name: torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for name, shape in zip(NAMES, shapes, strict=True)
    }


def run(function, leaves):
    out = function(**leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), torch.linspace(-1, 1, out.numel()).to(out).view_as(out))
    return dict(zip(("out", *(f"grad_{name}" for name in leaves)), (out.detach(), *grads), strict=True))


def check(rows, features, channels, dtype, device="cpu"):
    leaves = operands(rows, features, channels, dtype, device)
    results = run(gated_residual, leaves)
    assert all(result.dtype == dtype for result in results.values())
    exact = run(one_by_one, {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()})
    # Both take cuBLAS, whose sums over many rows are less exact than those of the kernels that the table is for.
    torchs = largest_errors(run(one_by_one, leaves), exact)
    for name, error in largest_errors(results, exact).items():
        row = tolerance(dtype, direction_of(name), "gemm" if dtype == torch.float64 else "relational")
        assert error <= max(row.largest or row.relative, 2 * torchs[name]), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "features", "channels"), [(0, 4, 4), (1, 3, 5), (300, 16, 8), (40, 64, 64)])
def test_it_equals_torch_one_by_one(rows, features, channels, dtype, fused):
    check(rows, features, channels, dtype)


@pytest.mark.parametrize("wanted", [("h",), ("skip",), ("weight", "x"), ("bias",)], ids=str)
def test_gradients_of_some_inputs(wanted):
    leaves = operands(20, 6, 4, torch.float64)
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in wanted)
    results = [
        torch.autograd.grad(function(**leaves).square().sum(), [leaves[name] for name in wanted])
        for function in (gated_residual, one_by_one)
    ]
    torch.testing.assert_close(*results)


def test_nothing_but_the_inputs_is_saved():
    leaves, saved = operands(20, 6, 4, torch.float64), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        gated_residual(**leaves)
    assert {tensor.data_ptr() for tensor in saved} == {leaf.data_ptr() for leaf in leaves.values()}


def test_a_dot_product_of_more_elements_than_one_call_takes(monkeypatch):
    monkeypatch.setattr("pyg_dfgnn.ops.gated_residual._DOT_ELEMENTS", 7)
    check(20, 6, 4, torch.float64)


def test_second_derivatives():
    leaves = operands(5, 3, 4, torch.float64)
    assert torch.autograd.gradgradcheck(lambda *given: gated_residual(*given), [*leaves.values()])
