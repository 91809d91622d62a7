"""Linear layers of one input by kernels on a GPU: against float64 and torch's products, captured, on a stream."""

import pytest
import torch
import torch.nn.functional as F

from pyg_dfgnn.ops import gemm
from pyg_dfgnn.reference.tolerances import relative_error
from tests.ops.test_gemm import MAGNITUDES, check, check_magnitudes, draw, run

pytestmark = pytest.mark.cuda

SIZES = [
    (8193, 128, 128, 3, True),
    (19_717, 128, 128, 4, True),
    (19_717, 68, 100, 2, False),
    (120_000, 128, 128, 3, False),
    (300_000, 64, 128, 2, True),
    (65_537, 100, 84, 1, True),
    (70_001, 80, 80, 3, False),
    # More than 128 features or channels.
    (19_717, 500, 128, 1, True),
    (19_717, 500, 128, 3, False),
    (30_001, 160, 80, 2, True),
    (70_001, 80, 160, 1, True),
    (9000, 132, 260, 2, True),
    (20_001, 512, 512, 1, True),
]


@pytest.fixture(autouse=True)
def needs_kernels():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_float64(sizes):
    tensors = draw(*sizes, device="cuda")
    results = run(*tensors)
    check(tensors, *results)
    again = run(*tensors)
    assert all(map(torch.equal, (*results[0], results[1], *results[2]), (*again[0], again[1], *again[2])))


def test_errors_are_of_the_size_of_float32():
    """Rows of very different size, whose halves cancel; each error against what float32 could lose."""
    x, weights, biases, _ = draw(20_000, 128, 128, 2, False, device="cuda")
    x *= 10.0 ** torch.randint(-3, 4, (20_000, 1), device="cuda")
    x[:, 64:] = -x[:, :64] * (1 + 1e-3 * torch.randn(20_000, 64, device="cuda"))
    weights = [torch.cat([weight[:, :64], weight[:, :64]], 1) for weight in weights]
    for y, weight in zip(gemm.project(x, weights, biases), weights, strict=True):
        want, size = F.linear(x.double(), weight.double()), F.linear(x.double().abs(), weight.double().abs())
        own = ((F.linear(x, weight) - want).abs() / size).max()
        assert ((y - want).abs() / size).max() < 2 * own


@pytest.mark.parametrize("key", MAGNITUDES)
def test_numbers_of_any_magnitude(key):
    check_magnitudes(key, 20_000, "cuda")


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_errors_are_of_the_size_of_torchs(layers):
    x, weights, _, grads = draw(20_001, 128, 128, layers, False, device="cuda")
    results, grad_x, of_weights = run(x, weights, [], grads)

    def check_both(result, own, want):
        assert relative_error(result, want) < 2 * relative_error(own, want)

    for y, weight, grad, of_weight in zip(results, weights, grads, of_weights, strict=True):
        check_both(y, x @ weight.t(), x.double() @ weight.double().t())
        check_both(of_weight, grad.t() @ x, grad.double().t() @ x.double())
    side, below = torch.cat(grads, 1), torch.cat(weights)
    check_both(grad_x, side @ below, side.double() @ below.double())


def test_numbers_that_are_not_finite():
    x, weights, biases, _ = draw(20_000, 128, 128, 2, True, device="cuda")
    x[3, 5], x[19_999, 1], weights[1][7, 2] = float("nan"), float("inf"), float("-inf")
    first, second = gemm.project(x, weights, biases)
    touched = torch.zeros(20_000, 128, dtype=torch.bool, device="cuda")
    touched[[3, 19_999]] = True
    assert torch.equal(~first.isfinite(), touched)
    touched[:, 7] = True
    assert torch.equal(~second.isfinite(), touched)


@pytest.mark.parametrize("sizes", [(9000, 128, 128, 3, True), (9000, 256, 80, 1, True)], ids=str)
def test_capture_and_replay(sizes):
    tensors = draw(*sizes, device="cuda")
    run(*tensors)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = run(*tensors)
    tensors[0].mul_(2)
    captured.replay()
    check(tensors, *results)


def test_another_stream():
    stream = torch.cuda.Stream()
    tensors = draw(9000, 128, 128, 2, True, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        tensors[0].add_(1)
        results = run(*tensors)
    torch.cuda.current_stream().wait_stream(stream)
    check(tensors, *results)


def test_offsets_beyond_32_bits():
    rows, features, channels = 17_000_000, 128, 128
    if torch.cuda.mem_get_info()[0] < 64 << 30:
        pytest.skip("needs 64 GB of free memory")
    x = torch.randn(rows, features, device="cuda", requires_grad=True)
    weights = [torch.randn(channels, features, device="cuda", requires_grad=True)]
    (result,) = gemm.project(x, weights, ())
    assert result.numel() > 2**31
    tail = slice(rows - 1000, rows)
    exact = x[tail].detach().double(), weights[0].detach().double()
    assert relative_error(result[tail], exact[0] @ exact[1].t()) < 5e-6
    grad = torch.zeros_like(result)
    grad[tail] = 1.0
    grad_x, of_weight = torch.autograd.grad(result, [x, *weights], grad)
    assert relative_error(grad_x[tail], exact[1].sum(0).expand(1000, features)) < 5e-6
    assert not grad_x[: rows - 1000].any()
    assert relative_error(of_weight, exact[0].sum(0).expand(channels, features)) < 5e-6
    # Other processes may share the GPU.
    del x, result, grad, grad_x
    torch.cuda.empty_cache()
