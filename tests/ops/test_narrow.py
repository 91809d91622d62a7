"""Layers of few channels by kernels of their own: float64, every gradient, rows and features that fill nothing."""

import pytest
import torch
import torch.nn.functional as F

from pyg_dfgnn.dispatch import gemm as rule
from pyg_dfgnn.ops import gemm
from tests.kernels.emulated import emulated_device
from tests.tolerances import assert_all_close


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(rule, "_FEW_ROWS", 0)
    gemm._narrow.cache_clear()
    yield
    gemm._narrow.cache_clear()


SHAPES = [(1, 4, 1), (3, 128, 3), (37, 132, 8), (200, 500, 4), (1500, 64, 2), (1027, 8, 7)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients(shape, bias):
    rows, features, channels = shape
    torch.manual_seed(0)
    x, weight = torch.randn(rows, features), torch.randn(channels, features)
    layer = (weight, torch.randn(channels)) if bias else (weight,)
    grad = torch.randn(rows, channels)
    with emulated_device("random") as launched:
        (out,) = gemm.apart(x, (weight,), layer[1:])
        grad_x, found = gemm.gradients(x, 1, (weight,), layer, (grad,), (True, True, bias))
        alone, nothing = gemm.gradients(x, 1, (weight,), layer, (grad,), (True, False, False))
        none, again = gemm.gradients(x, 1, (weight,), layer, (grad,), (False, True, bias))
    assert set(launched) <= {"gemm_narrow_forward", "gemm_narrow_backward", "gemm_sums"}
    assert none is None and torch.equal(alone, grad_x) and nothing == [None] * len(layer)
    assert all(map(torch.equal, found, again))
    exact = [each.double().requires_grad_() for each in (x, *layer)]
    want = F.linear(*exact)
    grads = torch.autograd.grad(want, exact, grad.double())
    pairs = zip(("x", "weight", "bias"), zip((grad_x, *found), grads))
    assert_all_close({"out": (out, want), **dict(pairs)})


def test_what_is_narrow():
    assert rule.is_narrow(10_000, 128, 8) and rule.is_narrow(10_000, 512, 4) and rule.is_narrow(10_000, 256, 8)
    # Weights that registers would not hold, features in no whole float4, no channel.
    assert not any(rule.is_narrow(10_000, *sizes) for sizes in ((512, 8), (128, 9), (126, 3), (128, 0), (0, 3)))


def test_tensors_that_lie_elsewhere():
    """Strided and misaligned inputs are torch's."""
    with emulated_device() as launched:
        assert gemm.apart(torch.randn(8, 40).t(), (torch.randn(3, 8),), ()) is None
        memory = torch.randn(9 * 8 + 1)
        assert gemm.apart(memory[1:].view(9, 8), (torch.randn(3, 8),), ()) is None
    assert launched == []
