"""Products by type: the kernels emulated and the plain torch that stands for them, against float64."""

import re
from dataclasses import replace

import pytest
import torch

from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.graph.derived import Derived
from pyg_dfgnn.graph.typed_rows import TypedRows, one_type
from pyg_dfgnn.ops.relational.segment_gemm import SegmentLinear, SegmentOuter
from pyg_dfgnn.reference import segment_gemm as reference
from pyg_dfgnn.reference.tolerances import assert_close, relative_error
from tests.emu import require_compiler
from tests.kernels.emulated import emulated_device

CPU = torch.device("cpu")
# Empty types at both ends and in between, single rows, whole and unfilled tiles, a type of several items.
UNEVEN = [0, 1, 1, 64, 0, 0, 33, 300, 7, 0]
LENGTHS = {
    "uneven": UNEVEN,
    "one row each": [1] * 40,
    "1000 types": [1 if number % 7 else number % 3 for number in range(1000)],
    "one type": [130],
    "no rows": [0, 0, 0],
    "no types": [],
}


def typed_rows(lengths):
    type_ptr = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return TypedRows(Derived(type_ptr.device), "test", type_ptr, int(type_ptr[-1]))


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def listed(num_rows, size):
    """A list of rows with repetitions and gaps."""
    return torch.randint(size, (num_rows,), dtype=torch.int32)


def poisoned(tensor, rows):
    """Rows that a list does not name are NaN, so that reading one is seen."""
    if rows is not None:
        unread = torch.ones(tensor.shape[0], dtype=torch.bool)
        unread[rows.long()] = False
        tensor[unread] = float("nan")
    return tensor


def double(tensor):
    return None if tensor is None else tensor.double()


def check_linear(
    lengths,
    sizes,
    dtype=torch.float32,
    w_heads=None,
    with_lists=True,
    with_bias=True,
    bound=None,
    **options,
):
    """Compare one linear map with float64, and with itself."""
    torch.manual_seed(len(lengths))
    features, channels, heads = sizes
    rows, transposed = typed_rows(lengths), options.get("transposed", False)
    x_heads = 1 if options.get("shared") else heads
    places, columns = (channels, features) if transposed else (features, channels)
    size = rows.num_rows + 13
    gather = listed(rows.num_rows, size) if with_lists else None
    scatter = torch.randperm(rows.num_rows, dtype=torch.int32) if with_lists else None
    x = poisoned(draw(size if with_lists else rows.num_rows, x_heads, places, dtype=dtype), gather)
    weight = draw(rows.num_types, w_heads or heads, features, channels, dtype=dtype)
    bias = draw(rows.num_types, heads, columns, dtype=dtype) if with_bias else None
    product = SegmentLinear(rows, *sizes[:2], dtype, heads=heads, gather=gather, scatter=scatter, **options)
    y = product(x, weight, bias)
    args = double(weight), heads, rows.type_ptr, gather, double(bias), transposed
    want = reference.segment_linear(double(x), *args)
    if scatter is not None:
        want = torch.empty_like(want).index_copy_(0, scatter.long(), want)
    assert y.dtype is product.result and y.isfinite().all()
    assert_close("y", y, want, bound or y.dtype, op="gemm")
    assert torch.equal(y, product(x, weight, bias))
    return y, want


def check_outer(lengths, sizes, dtype=torch.float32, with_lists=True, bound=None, **options):
    """Compare one sum over rows with float64, and with itself."""
    torch.manual_seed(len(lengths))
    features, channels, heads = sizes
    rows = typed_rows(lengths)
    size = rows.num_rows + 13 if with_lists else rows.num_rows
    x_heads, g_heads = (1 if options.get(name) else heads for name in ("x_shared", "grad_shared"))
    lists = [listed(rows.num_rows, size) if with_lists else None for _ in range(2)]
    x = poisoned(draw(size, x_heads, features, dtype=dtype), lists[0])
    grad = poisoned(draw(size, g_heads, channels, dtype=dtype), lists[1])
    options |= {"heads": heads, "gather_x": lists[0], "gather_grad": lists[1]}
    product = SegmentOuter(rows, features, channels, dtype, **options)
    dw = product(x, grad)
    want = reference.segment_outer(double(x), double(grad), heads, rows.type_ptr, *lists)
    assert dw.dtype is dtype and dw.isfinite().all()
    assert_close("grad weight", dw, want, bound or dtype, op="gemm")
    assert torch.equal(dw, product(x, grad))
    empty = rows.type_ptr.diff() == 0
    assert not dw[empty].any()
    return dw, want


@pytest.fixture
def few_multiprocessors(monkeypatch):
    """Items of many rows, as on a large graph."""
    monkeypatch.setitem(gpu.known, CPU, replace(gpu.H200, multiprocessors=1))


# Tiles filled and not, wide and narrow, chunks whole and not, W and its transpose, heads apart and side by side, and a
# weight that is not held.
LINEAR = {
    "64x64": ((64, 64, 1), {}),
    "64x64 four heads": ((64, 64, 4), {}),
    "64x64 plain": ((64, 64, 1), {"with_lists": False, "with_bias": False}),
    "70x3": ((70, 3, 4), {}),
    "70x3 one weight": ((70, 3, 4), {"w_heads": 1}),
    "70x3 plain": ((70, 3, 1), {"with_lists": False, "with_bias": False}),
    "70x1 transposed shared": ((70, 1, 4), {"transposed": True, "shared": True}),
    "16x8 transposed": ((16, 8, 4), {"transposed": True}),
    "16x8 transposed one weight": ((16, 8, 4), {"transposed": True, "w_heads": 1}),
    "272x64": ((272, 64, 1), {}),
    "3x70 bfloat16": ((3, 70, 4), {"dtype": torch.bfloat16}),
    "64x16 float16 shared": ((64, 16, 4), {"dtype": torch.float16, "shared": True}),
    "64x16 float16 to float32": ((64, 16, 4), {"dtype": torch.float16, "is_exact": True}),
    "70x3 bfloat16 to float32": ((70, 3, 1), {"dtype": torch.bfloat16, "is_exact": True, "with_bias": False}),
}
OUTER = {
    "64x64": ((64, 64, 1), {}),
    "64x64 four heads": ((64, 64, 4), {}),
    "64x64 plain": ((64, 64, 1), {"with_lists": False}),
    "70x3 x shared": ((70, 3, 4), {"x_shared": True}),
    "1x16 grad shared": ((1, 16, 4), {"grad_shared": True}),
    "8x8 bfloat16": ((8, 8, 4), {"dtype": torch.bfloat16}),
    "70x3 float16": ((70, 3, 1), {"dtype": torch.float16}),
}


@pytest.mark.parametrize("key", LINEAR)
def test_linear(key, path):
    sizes, options = LINEAR[key]
    check_linear(UNEVEN, sizes, **options)
    assert path is None or path == ["segment_gemm"] * 2


@pytest.mark.parametrize("key", OUTER)
def test_outer(key, path):
    sizes, options = OUTER[key]
    check_outer(UNEVEN, sizes, **options)
    assert path is None or path == ["segment_outer", "segment_outer_sum"] * 2


@pytest.mark.parametrize("lengths", LENGTHS)
def test_types(lengths, fused):
    """Narrow maps, of which many types cost little to emulate."""
    check_linear(LENGTHS[lengths], (70, 3, 1))
    check_outer(LENGTHS[lengths], (1, 16, 4), grad_shared=True)
    rows = sum(LENGTHS[lengths])
    assert fused == ["segment_gemm"] * (2 if rows else 0) + fused[2 if rows else 0 :]
    assert fused.count("segment_outer") == (2 if LENGTHS[lengths] else 0)
    assert fused.count("segment_outer_sum") == (2 if max(LENGTHS[lengths], default=0) > 128 else 0)


@pytest.mark.parametrize("product", ["linear", "outer"])
def test_many_rows_of_an_item(product, few_multiprocessors, fused):
    """Items longer than the lists of places in shared memory, without a second launch."""
    if product == "linear":
        check_linear([700, 0, 1500], (70, 3, 1))
    else:
        check_outer([700, 0, 1500, 3], (70, 3, 4), x_shared=True)
        assert fused == ["segment_outer"] * 2


def test_one_type_for_all_rows(fused):
    holder, num_rows = Derived(CPU), 300
    x, grad = draw(num_rows, 1, 64), draw(num_rows, 1, 64)
    product = SegmentOuter(one_type(holder, num_rows), 64, 64, torch.float32)
    assert_close("grad weight", product(x, grad)[0, 0], x[:, 0].double().t() @ grad[:, 0].double(), op="gemm")
    assert fused == ["segment_outer", "segment_outer_sum"]


@pytest.mark.parametrize("tf32", [True], indirect=True)
def test_tf32(tf32, fused):
    """Factors are rounded where torch allows it, also when it does so between two calls."""
    for y, want in (check_linear(UNEVEN, (64, 64, 1), bound="tf32"), check_outer(UNEVEN, (64, 64, 1), bound="tf32")):
        assert relative_error(y, want) > 1e-5


@pytest.mark.parametrize("order", ["reverse", "random"])
def test_any_order_of_threads(order):
    require_compiler()
    with emulated_device(order, seed=3):
        check_linear(UNEVEN, (70, 3, 4))
        check_linear([70, 0, 65], (272, 64, 1))
        check_outer(UNEVEN, (70, 3, 4), x_shared=True)
        check_outer(UNEVEN, (8, 8, 4), torch.bfloat16)


def test_errors_are_those_of_float32(fused):
    """About twice what float32 products lose, also where halves cancel."""
    y, want = check_linear([200, 100], (64, 64, 1))
    assert relative_error(y, want) < 3e-7
    dw, want = check_outer([200, 100], (64, 64, 1))
    assert relative_error(dw, want) < 3e-7


def test_numbers_that_are_not_finite_stay_in_their_row_and_type(fused):
    rows = typed_rows([70, 40, 5])
    x, weight, grad = draw(115, 1, 64), draw(3, 1, 64, 64), draw(115, 1, 64)
    x[3, 0, 5], x[80, 0, 1], weight[2, 0, 7, 9] = float("nan"), float("inf"), float("-inf")
    y = SegmentLinear(rows, 64, 64, torch.float32)(x, weight)[:, 0]
    touched = torch.zeros(115, 64, dtype=torch.bool)
    touched[[3, 80]] = touched[110:, 9:10] = True
    assert torch.equal(~y.isfinite(), touched)
    dw = SegmentOuter(rows, 64, 64, torch.float32)(x, grad)[:, 0]
    touched = torch.zeros(3, 64, 64, dtype=torch.bool)
    touched[0, 5] = touched[1, 1] = True
    assert torch.equal(~dw.isfinite(), touched)


def test_one_head_has_nothing_to_share(fused):
    check_linear([3, 70], (70, 3, 1), shared=True)
    check_outer([3, 70], (64, 64, 1), x_shared=True, grad_shared=True)


def test_float64_is_left_to_torch(fused):
    y, want = check_linear(UNEVEN, (16, 8, 4), torch.float64)
    check_outer(UNEVEN, (16, 8, 4), torch.float64)
    assert fused == [] and torch.equal(y, want)


def test_memory_that_kernels_do_not_read(fused):
    """Tensors with other strides, or from an odd address on, are copied first."""
    rows = typed_rows([70, 5])
    x, weight = draw(64, 1, 75).permute(2, 1, 0), draw(1 + 2 * 64 * 64)[1:].view(2, 1, 64, 64)
    assert weight.data_ptr() % 16
    want = reference.segment_linear(x.double(), weight.double(), 1, rows.type_ptr)
    assert_close("y", SegmentLinear(rows, 64, 64, torch.float32)(x, weight), want, op="gemm")


def linear(rows, **options):
    return SegmentLinear(rows, 8, 4, torch.float32, heads=2, **options)


WRONG = {
    "type_ptr": (
        lambda rows: linear(rows._replace(type_ptr=rows.type_ptr.long())),
        TypeError,
        "'type_ptr' needs dtype torch.int32 (got torch.int64)",
    ),
    "gather": (
        lambda rows: linear(rows, gather=torch.zeros(4, dtype=torch.int32)),
        ValueError,
        "'gather' needs shape [rows=5] (got [4])",
    ),
    "scatter": (
        lambda rows: linear(rows, scatter=torch.zeros(5)),
        TypeError,
        "'scatter' needs dtype torch.int32 (got torch.float32)",
    ),
    "x": (
        lambda rows: linear(rows)(draw(5, 2, 7), draw(2, 2, 8, 4)),
        ValueError,
        "'x' needs shape [rows=5, heads=2, 8] (got [5, 2, 7])",
    ),
    "dtype of x": (
        lambda rows: linear(rows)(draw(5, 2, 8).half(), draw(2, 2, 8, 4)),
        TypeError,
        "'x' needs dtype torch.float32 (got torch.float16)",
    ),
    "weight": (
        lambda rows: linear(rows)(draw(5, 2, 8), draw(2, 8, 4)),
        ValueError,
        "'weight' needs shape [types=2, heads=2 or 1, 8, 4] (got [2, 8, 4])",
    ),
    "bias": (
        lambda rows: linear(rows)(draw(5, 2, 8), draw(2, 2, 8, 4), draw(2, 1, 4)),
        ValueError,
        "'bias' needs shape [types=2, heads=2, 4] (got [2, 1, 4])",
    ),
    "grad_shared": (
        lambda rows: SegmentOuter(rows, 8, 4, torch.float32, heads=2, x_shared=True, grad_shared=True),
        ValueError,
        "'grad_shared' needs False where heads share x: all of them have one result (got True)",
    ),
    "grad": (
        lambda rows: SegmentOuter(rows, 8, 4, torch.float32, heads=2)(draw(5, 2, 8), draw(6, 2, 4)),
        ValueError,
        "'grad' needs shape [rows=5, heads=2, 4] (got [6, 2, 4])",
    ),
}


@pytest.mark.parametrize("key", WRONG)
def test_wrong_arguments(key):
    call, error, message = WRONG[key]
    with pytest.raises(error, match=re.escape(message)):
        call(typed_rows([2, 3]))
