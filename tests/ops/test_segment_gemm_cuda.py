"""Products by type on a GPU: against float64, in a CUDA graph, on a stream, beyond 32 bits, with errors of float32."""

import pytest
import torch

from pyg_dfgnn.graph.derived import Derived
from pyg_dfgnn.graph.typed_rows import one_type
from pyg_dfgnn.ops.relational.segment_gemm import SegmentLinear, SegmentOuter
from pyg_dfgnn.reference import segment_gemm as reference
from pyg_dfgnn.reference.tolerances import assert_close, relative_error
from tests.ops.test_segment_gemm import LENGTHS, LINEAR, OUTER, check_linear, check_outer, typed_rows

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
# Types of several items, of one, of few rows and of none.
MANY = [0, 3000, 1, 5000, 64, 0, 129, 513, 20_000, 0]


@pytest.fixture(autouse=True)
def on_the_gpu():
    """Tensors are made there."""
    with torch.device(DEVICE):
        yield


@pytest.mark.parametrize("key", LINEAR)
def test_linear(key):
    sizes, options = LINEAR[key]
    check_linear(MANY, sizes, **options)


@pytest.mark.parametrize("key", OUTER)
def test_outer(key):
    sizes, options = OUTER[key]
    check_outer(MANY, sizes, **options)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_types(lengths):
    check_linear(LENGTHS[lengths], (64, 64, 2))
    check_outer(LENGTHS[lengths], (64, 64, 2))


@pytest.mark.parametrize("tf32", [True], indirect=True)
def test_tf32(tf32):
    for check in (check_linear, check_outer):
        assert relative_error(*check(MANY, (64, 64, 1), bound="tf32")) > 1e-5


@pytest.mark.parametrize("num_rows", [300, 20_000])
def test_errors_are_of_the_size_of_float32(num_rows):
    """Rows of very different size, whose halves cancel; each error against what float32 could lose."""
    rows = typed_rows([num_rows])
    x, half = torch.randn(num_rows, 128), torch.randn(64, 128)
    x *= 10.0 ** torch.randint(-3, 4, (num_rows, 1))
    x[:, 64:] = -x[:, :64] * (1 + 1e-3 * torch.randn(num_rows, 64))
    weight = torch.cat([half, half])
    y = SegmentLinear(rows, 128, 128, torch.float32)(x[:, None], weight[None, None])[:, 0]
    want, size = x.double() @ weight.double(), x.double().abs() @ weight.double().abs()
    assert ((y - want).abs() / size).max() < 2 * ((x @ weight - want).abs() / size).max()
    dw = SegmentOuter(rows, 128, 128, torch.float32)(x[:, None], x[:, None])[0, 0]
    want = x.double().t() @ x.double()
    assert relative_error(dw, want) < 2 * relative_error(x.t() @ x, want)


def test_capture_and_replay():
    """No call waits for the device, and a captured one reads what its tensors hold then."""
    rows = typed_rows(MANY)
    x, weight = torch.randn(rows.num_rows, 1, 64), torch.randn(rows.num_types, 1, 64, 64)
    linear, outer = SegmentLinear(rows, 64, 64, torch.float32), SegmentOuter(rows, 64, 64, torch.float32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear(x, weight), outer(x, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y, dw = linear(x, weight), outer(x, x)
    x.mul_(2)
    weight.neg_()
    captured.replay()
    assert_close("y", y, reference.segment_linear(x.double(), weight.double(), 1, rows.type_ptr), op="gemm")
    want = reference.segment_outer(x.double(), x.double(), 1, rows.type_ptr, None, None)
    assert_close("grad weight", dw, want, op="gemm")


def test_another_stream():
    rows, stream = typed_rows(MANY), torch.cuda.Stream()
    x, weight = torch.randn(rows.num_rows, 1, 64), torch.randn(rows.num_types, 1, 64, 64)
    linear = SegmentLinear(rows, 64, 64, torch.float32)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        rows.holder.on_this_stream()
        torch.cuda._sleep(20_000_000)
        x.add_(1)
        y = linear(x, weight)
    torch.cuda.current_stream().wait_stream(stream)
    assert_close("y", y, reference.segment_linear(x.double(), weight.double(), 1, rows.type_ptr), op="gemm")


def test_offsets_beyond_32_bits():
    num_rows = 4_300_000
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free memory")
    rows = one_type(Derived(DEVICE), num_rows)
    x, weight = torch.randn(num_rows, 1, 4), torch.randn(1, 1, 4, 512)
    y = SegmentLinear(rows, 4, 512, torch.float32)(x, weight)
    assert y.numel() > 2**31
    tail = slice(num_rows - 1000, num_rows)
    assert_close("y", y[tail], (x[tail, 0].double() @ weight[0, 0].double())[:, None], op="gemm")
    y[: tail.start] = 0
    dw = SegmentOuter(rows, 4, 512, torch.float32)(x, y)
    assert_close("grad weight", dw[0, 0], x[tail, 0].double().t() @ y[tail, 0].double(), op="gemm")
    grad_x = SegmentLinear(rows, 4, 512, torch.float32, transposed=True)(y, weight)
    assert_close("grad x", grad_x[tail, 0], y[tail, 0].double() @ weight[0, 0].double().t(), op="gemm")
    assert not grad_x[: tail.start].any()
    # Other processes may share the GPU.
    del x, y, grad_x
    torch.cuda.empty_cache()
