"""Linear layers of one input on a GPU: against float64 and torch's products, in a CUDA graph, on a stream."""

import pytest
import torch
import torch.nn.functional as F

from pyg_dfgnn.ops import gemm
from pyg_dfgnn.reference.tolerances import assert_close, relative_error
from tests.ops.test_gemm import ALL, MAGNITUDES, PRECISIONS, SIZES, check, check_magnitudes, draw, run

pytestmark = pytest.mark.cuda

LARGE = [
    (2708, 128, 128, 3, True),
    (19_717, 128, 128, 4, True),
    (70_001, 80, 80, 3, False),
    (300_000, 64, 128, 2, True),
    # By warpgroups where there are such.
    (8193, 128, 128, 3, True),
    (19_717, 128, 128, 3, True),
    (19_717, 68, 100, 2, False),
    (120_000, 128, 128, 3, False),
    (65_537, 100, 84, 1, True),
    (70_001, 128, 128, 4, True),
    # The same of more than 128 features or channels.
    (19_717, 500, 128, 1, True),
    (19_717, 500, 128, 3, False),
    (30_001, 160, 80, 2, True),
    (70_001, 80, 160, 1, True),
    (9000, 132, 260, 4, True),
    (20_001, 512, 512, 1, True),
]


@PRECISIONS
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("sizes", SIZES + LARGE, ids=str)
def test_against_float64(sizes, interleaved, tf32):
    tensors = draw(*sizes, device="cuda")
    results = run(*tensors, interleaved)
    check(tensors, *results, tf32)
    again = run(*tensors, interleaved)
    assert all(map(torch.equal, (*results[0], results[1], *results[2]), (*again[0], again[1], *again[2])))


@pytest.mark.parametrize("rows", [5000, 20_000])
def test_errors_are_of_the_size_of_float32(rows):
    """Rows of very different size, whose halves cancel; each error against what float32 could lose."""
    x, weights, biases, _ = draw(rows, 128, 128, 2, False, device="cuda")
    x *= 10.0 ** torch.randint(-3, 4, (rows, 1), device="cuda")
    x[:, 64:] = -x[:, :64] * (1 + 1e-3 * torch.randn(rows, 64, device="cuda"))
    weights = [torch.cat([weight[:, :64], weight[:, :64]], 1) for weight in weights]
    for y, weight in zip(gemm.separate(x, weights, biases), weights, strict=True):
        want, size = F.linear(x.double(), weight.double()), F.linear(x.double().abs(), weight.double().abs())
        own = ((F.linear(x, weight) - want).abs() / size).max()
        assert ((y - want).abs() / size).max() < 2 * own


@pytest.mark.parametrize("rows", [5000, 20_000])
@pytest.mark.parametrize("key", MAGNITUDES)
def test_numbers_of_any_magnitude(key, rows):
    check_magnitudes(key, rows, "cuda")


def needs_warpgroups():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_warpgroups_are_used(layers):
    """With errors of the size of torch's products."""
    needs_warpgroups()
    x, weights, _, grads = draw(20_001, 128, 128, layers, False, device="cuda")
    sizes = 20_001, 128, 128, True, layers, False, x.device
    forward, backward = gemm._forward(*sizes), gemm._backward(*sizes)
    assert forward.kernel.entry == "gemm_forward_strips" and backward.weights_plan.kernel.entry == "gemm_weight_grad"
    assert backward.x_plan.kernel.entry == "gemm_forward_strips"
    results, grad_x, of_weights = run(x, weights, [], grads, False)

    def check(result, own, want):
        assert relative_error(result, want) < 2 * relative_error(own, want)

    for y, weight, grad, of_weight in zip(results, weights, grads, of_weights, strict=True):
        check(y, x @ weight.t(), x.double() @ weight.double().t())
        check(of_weight, grad.t() @ x, grad.double().t() @ x.double())
    side, below = torch.cat(grads, 1), torch.cat(weights)
    check(grad_x, side @ below, side.double() @ below.double())


def test_warpgroups_with_numbers_that_are_not_finite():
    needs_warpgroups()
    x, weights, biases, _ = draw(20_000, 128, 128, 2, True, device="cuda")
    x[3, 5], x[19_999, 1], weights[1][7, 2] = float("nan"), float("inf"), float("-inf")
    first, second = gemm.separate(x, weights, biases)
    touched = torch.zeros(20_000, 128, dtype=torch.bool, device="cuda")
    touched[[3, 19_999]] = True
    assert torch.equal(~first.isfinite(), touched)
    touched[:, 7] = True
    assert torch.equal(~second.isfinite(), touched)


@pytest.mark.parametrize(
    "sizes",
    [(500, 64, 32, 3, True), (4000, 128, 128, 3, True), (9000, 128, 128, 3, True), (9000, 256, 80, 1, True)],
    ids=str,
)
def test_capture_and_replay(sizes):
    """Also where a capture has splits to add, whose kernel no call before has launched."""
    torch.cuda.synchronize()
    gemm._column_sum_kernel(torch.float32)._loaded.clear()
    gemm._backward.cache_clear()
    tensors = draw(*sizes, device="cuda")
    run(*tensors, True)
    assert gemm._column_sum_kernel(torch.float32)._loaded
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = run(*tensors, True)
    tensors[0].mul_(2)
    captured.replay()
    check(tensors, *results)


@pytest.mark.parametrize("sizes", [(3000, 64, 64, 2, True), (9000, 128, 128, 2, True)], ids=str)
def test_another_stream(sizes):
    stream = torch.cuda.Stream()
    tensors = draw(*sizes, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        tensors[0].add_(1)
        results = run(*tensors, False)
    torch.cuda.current_stream().wait_stream(stream)
    check(tensors, *results)


# By tiles, and by warpgroups where there are such.
@pytest.mark.parametrize(("features", "channels", "layers"), [(4, 128, 4), (68, 128, 4)])
def test_offsets_beyond_32_bits(features, channels, layers):
    rows = 4_300_000
    if torch.cuda.mem_get_info()[0] < 48 << 30:
        pytest.skip("needs 48 GB of free memory")
    x = torch.randn(rows, features, device="cuda")
    weights = [torch.randn(channels, features, device="cuda") for _ in range(layers)]
    results, kept = gemm.interleaved(x, weights, ())
    assert results.numel() > 2**31
    tail = slice(rows - 1000, rows)
    want = torch.cat([x[tail].double() @ weight.double().t() for weight in weights], 1)
    assert relative_error(results[tail], want) < 5e-6
    grads = torch.zeros_like(results)
    grads[tail] = 1.0
    grad_x, of_weights = gemm.gradients(x, layers, kept, weights, (grads,), ALL)
    assert relative_error(grad_x[tail], sum(weight.double().sum(0) for weight in weights).expand(1000, features)) < 5e-6
    assert not grad_x[: rows - 1000].any()
    for grad in of_weights:
        assert relative_error(grad, x[tail].double().sum(0).expand(channels, features)) < 5e-6
    # Other processes may share the GPU.
    del x, results, grads, grad_x
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4097, 8), (19_717, 384), (300_001, 520), (9000, 4096)], ids=str)
def test_sums_over_rows(shape, dtype):
    rows = torch.randn(shape, device="cuda").to(dtype)
    results = gemm.column_sums(rows, torch.float32)
    assert_close("sums", results, rows.double().sum(0), torch.float32, op="gemm")
    assert torch.equal(gemm.column_sums(rows, torch.float32), results)
