"""Products of linear layers of one input on a GPU: against float64 and torch's own, in a CUDA graph, on a stream."""

import pytest
import torch
import torch.nn.functional as F

from pyg_dfgnn.ops import products
from tests.ops.test_products import ALL, SIZES, check, draw, run
from tests.tolerances import relative_error

pytestmark = pytest.mark.cuda

LARGE = [
    (2708, 128, 128, 3, True),
    (19_717, 128, 128, 4, True),
    (70_001, 80, 80, 3, False),
    (300_000, 64, 128, 2, True),
]


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("sizes", SIZES + LARGE, ids=str)
def test_against_float64(sizes, beside):
    tensors = draw(*sizes, device="cuda")
    found = run(*tensors, beside)
    check(tensors, *found)
    again = run(*tensors, beside)
    assert all(map(torch.equal, (*found[0], found[1], *found[2]), (*again[0], again[1], *again[2])))


def test_errors_are_of_the_size_of_float32():
    """Rows of very different size, whose halves cancel; each against what float32 could lose of it."""
    x, weights, biases, _ = draw(5000, 128, 128, 2, False, device="cuda")
    x *= 10.0 ** torch.randint(-3, 4, (5000, 1), device="cuda")
    x[:, 64:] = -x[:, :64] * (1 + 1e-3 * torch.randn(5000, 64, device="cuda"))
    weights = [torch.cat([weight[:, :64], weight[:, :64]], 1) for weight in weights]
    for y, weight in zip(products.apart(x, weights, biases), weights, strict=True):
        want, size = F.linear(x.double(), weight.double()), F.linear(x.double().abs(), weight.double().abs())
        own = ((F.linear(x, weight) - want).abs() / size).max()
        assert ((y - want).abs() / size).max() < 2 * own


def test_capture_and_replay():
    tensors = draw(500, 64, 32, 3, True, device="cuda")
    run(*tensors, True)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = run(*tensors, True)
    tensors[0].mul_(2)
    captured.replay()
    check(tensors, *found)


def test_another_stream():
    stream = torch.cuda.Stream()
    tensors = draw(3000, 64, 64, 2, True, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        tensors[0].add_(1)
        found = run(*tensors, False)
    torch.cuda.current_stream().wait_stream(stream)
    check(tensors, *found)


def test_offsets_beyond_32_bits():
    rows, channels, layers = 4_300_000, 128, 4
    if torch.cuda.mem_get_info()[0] < 48 << 30:
        pytest.skip("needs 48 GB of free memory")
    x = torch.randn(rows, 4, device="cuda")
    weights = [torch.randn(channels, 4, device="cuda") for _ in range(layers)]
    found, kept = products.beside(x, weights, ())
    assert found.numel() > 2**31
    tail = slice(rows - 1000, rows)
    want = torch.cat([x[tail].double() @ weight.double().t() for weight in weights], 1)
    assert relative_error(found[tail], want) < 5e-6
    grads = torch.zeros_like(found)
    grads[tail] = 1.0
    grad_x, of_weights = products.gradients(x, layers, kept, weights, (grads,), ALL)
    assert relative_error(grad_x[tail], sum(weight.double().sum(0) for weight in weights).expand(1000, 4)) < 5e-6
    assert not grad_x[: rows - 1000].any()
    for grad in of_weights:
        assert relative_error(grad, x[tail].double().sum(0).expand(channels, 4)) < 5e-6
    # Other processes may share the GPU.
    del x, found, grads, grad_x
    torch.cuda.empty_cache()
