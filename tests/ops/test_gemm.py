"""Linear layers of one input: the kernels emulated, against float64, and what they leave to torch."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from pyg_dfgnn.dispatch import gemm as rule
from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.reference.tolerances import assert_all_close, assert_close, relative_error
from tests.covering import over
from tests.kernels.emulated import emulated_device

# Rows, features, channels, layers, biases: tiles filled and unfilled, steps and splits whole and not, one of each.
SIZES = [
    (200, 32, 64, 3, True),
    (70, 36, 20, 2, True),
    (130, 128, 132, 1, False),
    (1, 4, 4, 4, True),
    (150, 100, 8, 2, False),
    (64, 64, 64, 4, True),
]
ALL = (True, True, True)
FORWARD_TILES = sorted(
    {rule.forward_tile(rows, channels) for rows in (1, 1 << 14, 1 << 20) for channels in (8, 256)}, key=str
)
BACKWARD_TILES = [rule.backward_tile(rows) for rows in (1, 1 << 14, 1 << 20)]


@pytest.fixture(autouse=True)
def no_plans():
    """What a test has patched must not stay."""
    yield
    gemm._forward.cache_clear()
    gemm._backward.cache_clear()


def draw(rows, features, channels, layers, biased, device="cpu"):
    """Input, weights, biases, and gradients of the results."""
    torch.manual_seed(rows)
    x = torch.randn(rows, features, device=device)
    weights = [torch.randn(channels, features, device=device) for _ in range(layers)]
    biases = [torch.randn(channels, device=device) for _ in range(layers if biased else 0)]
    return x, weights, biases, [torch.randn(rows, channels, device=device) for _ in range(layers)]


def run(x, weights, biases, grads, interleaved, needed=ALL):
    """Results, gradient of x and those of the parameters."""
    if interleaved:
        rows, kept = gemm.interleaved(x, weights, biases)
        results = rows.chunk(len(weights), 1)
        grads = [torch.cat(grads, 1)] if len(weights) > 1 else grads
    else:
        results, kept = gemm.separate(x, weights, biases), weights
    return results, *gemm.gradients(x, len(weights), kept, [*weights, *biases], grads, needed)


PRECISIONS = pytest.mark.parametrize("tf32", [False, True], ids=["float32", "tf32"], indirect=True)


def check(tensors, results, grad_x, of_parameters, tf32=False):
    x, weights, biases, grads = (
        [tensor.double() for tensor in part] if isinstance(part, list) else part.double() for part in tensors
    )
    biases = biases or [None] * len(weights)
    pairs = {"grad x": (grad_x, sum(grad @ weight for grad, weight in zip(grads, weights, strict=True)))}
    for layer, (weight, bias, grad) in enumerate(zip(weights, biases, grads, strict=True)):
        pairs[f"y {layer}"] = results[layer], F.linear(x, weight, bias)
        pairs[f"grad weight {layer}"] = of_parameters[layer], grad.t() @ x
        if bias is not None:
            # Never rounded.
            assert_close(f"grad bias {layer}", of_parameters[len(weights) + layer], grad.sum(0), op="gemm")
    assert_all_close(pairs, "tf32" if tf32 else None, op="gemm")
    if tf32:
        errors = [relative_error(*pair) for pair in pairs.values()]
        assert max(errors) > 1e-5, f"nothing was rounded: {errors}"


@pytest.fixture
def in_splits(monkeypatch):
    """Rows are split however few they are, as in a capture."""
    monkeypatch.setattr(gemm, "SPLIT_ROWS", 0)


@PRECISIONS
@over(sizes=SIZES, interleaved=(True, False))
def test_against_float64(sizes, interleaved, tf32, fused, in_splits):
    tensors = draw(*sizes)
    computed = run(*tensors, interleaved)
    check(tensors, *computed, tf32)
    assert fused[:2] == ["gemm_forward", "gemm_backward"] and set(fused[2:]) <= {"gemm_sums"}
    assert all(map(torch.equal, computed[0], run(*tensors, interleaved)[0]))


@pytest.mark.parametrize("rows", [130, 200, 201])
def test_few_rows_are_one_split(rows, fused, monkeypatch):
    """Two launches for forward and backward, where the host is the limit."""
    monkeypatch.setattr(gemm, "SPLIT_ROWS", 200)
    tensors = draw(rows, 8, 12, 2, True)
    check(tensors, *run(*tensors, False))
    one = rows <= gemm.SPLIT_ROWS
    assert fused == ["gemm_forward", "gemm_backward", *([] if one else ["gemm_sums"])]


@pytest.mark.parametrize("many", [False, True], ids=["tiles", "warpgroups"])
@pytest.mark.parametrize("tf32", [False, True], ids=["float32 then tf32", "tf32 then float32"], indirect=True)
def test_tf32_allowed_between_the_passes(tf32, many, fused, monkeypatch):
    """Each pass rounds as it is allowed to when it runs."""
    if many:
        few_multiprocessors(monkeypatch, 4)
    x, weights, biases, grads = draw(200, 64, 32, 2, True)
    rows, kept = gemm.interleaved(x, weights, biases)
    torch.backends.cuda.matmul.fp32_precision = "ieee" if tf32 else "tf32"
    grad_x, of_parameters = gemm.gradients(x, 2, kept, [*weights, *biases], [torch.cat(grads, 1)], ALL)
    x, weights, biases, grads = x.double(), *([tensor.double() for tensor in part] for part in (weights, biases, grads))
    results = {f"y {i}": (rows[:, 32 * i :][:, :32], F.linear(x, weights[i], biases[i])) for i in range(2)}
    gradients = {"x": (grad_x, sum(map(torch.matmul, grads, weights)))}
    gradients |= {f"weight {i}": (of_parameters[i], grads[i].t() @ x) for i in range(2)}
    for rounded, pairs in ((tf32, results), (not tf32, gradients)):
        assert_all_close(pairs, "tf32" if rounded else None, op="gemm")
        errors = [relative_error(*pair) for pair in pairs.values()]
        assert not rounded or min(errors) > 1e-5, f"not rounded: {errors}"
    by_warpgroups = BY_WARPGROUPS[:1] + ["gemm_backward"] if not tf32 else ["gemm_forward", *BY_WARPGROUPS[1:]]
    kernels = by_warpgroups if many else ["gemm_forward", "gemm_backward"]
    assert fused[: len(kernels)] == kernels


@pytest.mark.parametrize("tile", FORWARD_TILES, ids=str)
def test_forward_tiles(tile, fused, monkeypatch):
    monkeypatch.setattr(gemm, "forward_tile", lambda *_: tile)
    gemm._forward.cache_clear()
    x, weights, biases, _ = draw(150, 68, 140, 2, True)
    results = gemm.separate(x, weights, biases)
    pairs = zip(results, weights, biases, strict=True)
    assert_all_close(
        {str(i): (y, F.linear(x.double(), w.double(), b.double())) for i, (y, w, b) in enumerate(pairs)}, op="gemm"
    )


@pytest.mark.parametrize("tile", BACKWARD_TILES, ids=str)
def test_backward_tiles(tile, fused, in_splits, monkeypatch):
    """Also with many splits."""
    monkeypatch.setattr(gemm, "backward_tile", lambda *_: tile)
    gemm._backward.cache_clear()
    tensors = draw(140, 68, 140, 2, True)
    check(tensors, *run(*tensors, False))
    assert fused == ["gemm_forward", "gemm_backward", "gemm_sums"]


@pytest.mark.parametrize("many", [False, True], ids=["tiles", "warpgroups"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_gradients_that_are_not_needed(interleaved, many, fused, monkeypatch):
    if many:
        few_multiprocessors(monkeypatch, 4)
    tensors = draw(90, 32, 16, 3, True)
    _, full_x, full = run(*tensors, interleaved)
    _, grad_x, none = run(*tensors, interleaved, (True, False, False))
    assert torch.equal(grad_x, full_x) and none == [None] * 6
    for needed in ((False, True, True), (False, True, False), (False, False, True)):
        _, missing, of_parameters = run(*tensors, interleaved, needed)
        assert missing is None and all(map(torch.equal, of_parameters, full))
    assert ("gemm_weight_grad" in fused) is many


def few_multiprocessors(monkeypatch, count, capability=(9, 0)):
    """Warpgroups take few rows and every size that fits, several strips each; `capability` is the device's."""
    monkeypatch.setattr(gemm, "SPLIT_ROWS", 0)
    monkeypatch.setattr(rule, "_WARPGROUP_ROWS", 0)
    monkeypatch.setattr(rule, "_WARPGROUP_WIDTHS", range(4, 513, 4))
    known = replace(gpu.H200, multiprocessors=count, capability=capability)
    monkeypatch.setitem(gpu.known, torch.device("cpu"), known)
    gemm._forward.cache_clear()
    gemm._backward.cache_clear()


BY_WARPGROUPS = ["gemm_forward_strips", "gemm_forward_strips", "gemm_weight_grad"]
# Strips and sections whole and not, warpgroups with as many strips and with one less, or none; one to four layers.
WARPGROUP_SIZES = [
    (450, 128, 128, 3, True),
    (330, 68, 84, 2, True),
    (70, 36, 20, 4, False),
    (1, 4, 4, 1, True),
    (193, 100, 128, 4, True),
]
# More than 128 features, or channels, or both: groups of columns and sections, whole and not.
WIDE_SIZES = [(200, 500, 128, 1, False), (150, 132, 232, 2, True), (70, 512, 384, 1, True), (90, 80, 160, 3, False)]


@pytest.mark.parametrize(
    ("sizes", "interleaved"),
    [*product(WARPGROUP_SIZES, (True, False)), *((sizes, sizes[3] > 1) for sizes in WIDE_SIZES)],
    ids=str,
)
def test_warpgroups(sizes, interleaved, fused, monkeypatch):
    few_multiprocessors(monkeypatch, 4)
    tensors = draw(*sizes)
    check(tensors, *run(*tensors, interleaved))
    assert fused[:3] == BY_WARPGROUPS and set(fused[3:]) <= {"gemm_sums"}


@pytest.mark.parametrize(
    ("capability", "tf32"),
    [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)],
    indirect=["tf32"],
)
def test_warpgroups_are_for_float32_and_one_capability(capability, tf32, fused, monkeypatch):
    few_multiprocessors(monkeypatch, 4, capability)
    tensors = draw(90, 68, 84, 2, True)
    check(tensors, *run(*tensors, True), tf32)
    assert fused[:2] == ["gemm_forward", "gemm_backward"]


def spread(count, decades, device="cpu"):
    """Factors from 10^-decades to 1, in any order."""
    return 10.0 ** (-decades * torch.randperm(count, device=device) / (count - 1))


# What x, the gradients and the weights are multiplied by.
MAGNITUDES = {
    "rows": lambda d, n, f, k: (spread(n, 8, d)[:, None], 1 / spread(n, 8, d)[:, None], 1.0),
    "features": lambda d, n, f, k: (spread(f, 8, d), 1.0, 1 / spread(f, 8, d)),
    "channels": lambda d, n, f, k: (1.0, spread(k, 8, d), 1 / spread(k, 8, d)[:, None]),
    "tiny": lambda d, n, f, k: (1e-5, 1e-25, 1.0),
    "huge": lambda d, n, f, k: (1e30, 1e-10, 1e6),
}


def check_magnitudes(key, rows, device):
    """Check each error against the sum of magnitudes, of which float32 loses 6e-8 in each product and sum."""
    x, (weight,), _, (grad,) = draw(rows, 128, 100, 1, False, device)
    factors = MAGNITUDES[key](device, rows, 128, 100)
    x, grad, weight = (tensor * factor for tensor, factor in zip((x, grad, weight), factors, strict=True))
    (y,), grad_x, (grad_weight,) = run(x, [weight], [], [grad], False)
    for name, result, a, b in (
        ("y", y, x, weight.t()),
        ("x", grad_x, grad, weight),
        ("weight", grad_weight, grad.t(), x),
    ):
        a, b = a.double(), b.double()
        error = ((result.double() - a @ b).abs() / (a.abs() @ b.abs())).max()
        assert error < 1e-6, f"{name} {error}"


@pytest.mark.parametrize("key", MAGNITUDES)
def test_warpgroups_with_numbers_of_any_magnitude(key, fused, monkeypatch):
    few_multiprocessors(monkeypatch, 4)
    check_magnitudes(key, 200, "cpu")
    assert fused[:3] == BY_WARPGROUPS


@pytest.mark.parametrize("order", ["reverse", "random"])
def test_warpgroups_in_any_order(order, monkeypatch):
    """Bit for bit the same."""
    few_multiprocessors(monkeypatch, 4)
    tensors = draw(450, 68, 84, 2, True)
    with emulated_device():
        first = run(*tensors, True)
    with emulated_device(order):
        second = run(*tensors, True)
    check(tensors, *second)
    assert all(map(torch.equal, (*first[0], first[1], *first[2]), (*second[0], second[1], *second[2])))


@pytest.mark.parametrize("layers", range(1, rule.MAX_LAYERS + 1))
def test_what_warpgroups_hold_fits(layers):
    rest = True, torch.device("cpu")
    for features in rule._WARPGROUP_WIDTHS:
        for channels in (68, 100, 128, 132, 256, 500, 512):
            forward, backward = (
                rule.strips_of(backward, layers, 1 << 20, features, channels, *rest) for backward in (False, True)
            )
            assert forward is not None
            assert backward is not None or layers * channels > 128 * rule.MAX_LAYERS - 64 * layers
            for strips in filter(None, (forward, backward)):
                assert strips.fits and strips.shared_bytes < gpu.H200.shared_bytes
                assert strips.blocks(1 << 20, rest[1]) <= gpu.H200.multiprocessors
        for rows, channels in ((1 << 13, 128), (1 << 20, 60), (1 << 20, 516)):
            assert rule.strips_of(False, layers, rows, features, channels, *rest) is None


def unaligned(tensor):
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


REFUSED = {
    "features": lambda x, w, b: (x[:, :30].contiguous(), [tensor[:, :30].contiguous() for tensor in w], b),
    "channels": lambda x, w, b: (
        x,
        [tensor[:15].contiguous() for tensor in w],
        [tensor[:15].contiguous() for tensor in b],
    ),
    "float64": lambda x, w, b: (x.double(), [tensor.double() for tensor in w], [tensor.double() for tensor in b]),
    "strides": lambda x, w, b: (x.t().contiguous().t(), w, b),
    "address": lambda x, w, b: (unaligned(x), w, b),
    "address of a weight": lambda x, w, b: (x, [w[0], unaligned(w[1])], b),
    "no rows": lambda x, w, b: (x[:0], w, b),
    "no features": lambda x, w, b: (x[:, :0], [tensor[:, :0] for tensor in w], b),
    "no channels": lambda x, w, b: (x, [tensor[:0] for tensor in w], [tensor[:0] for tensor in b]),
    "too many layers": lambda x, w, b: (x, w * 3, b * 3),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_torch_takes(key, fused):
    x, weights, biases, _ = draw(50, 32, 16, 2, True)
    x, weights, biases = REFUSED[key](x, weights, biases)
    assert gemm.separate(x, weights, biases) is None
    rows, kept = gemm.interleaved(x, weights, biases)
    grads = torch.randn_like(rows)
    grad_x, of_parameters = gemm.gradients(x, len(weights), kept, [*weights, *biases], (grads,), ALL)
    assert fused == []
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *weights, *biases)]
    count = len(weights)
    want = torch.cat([F.linear(leaves[0], leaves[1 + i], leaves[1 + count + i]) for i in range(count)], 1)
    torch.testing.assert_close(rows, want)
    torch.testing.assert_close([grad_x, *of_parameters], list(torch.autograd.grad(want, leaves, grads)))


def test_what_does_not_fit_is_refused(fused):
    x, weights, biases, _ = draw(50, 32, 16, 2, True)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        gemm.interleaved(x[:, :28].contiguous(), weights, biases)
    assert fused == []


def test_gradients_in_other_memory(fused):
    """They are copied first, such as the one number that stands for all in the gradient of a sum."""
    x, weights, biases, grads = draw(50, 32, 16, 2, True)
    grads = [grads[0].t().contiguous().t(), torch.ones(()).expand(50, 16)]
    results = gemm.separate(x, weights, biases)
    check((x, weights, biases, grads), results, *gemm.gradients(x, 2, weights, [*weights, *biases], grads, ALL))
    assert fused == ["gemm_forward", "gemm_backward"]


def test_errors_are_those_of_float32(fused):
    """Cutting the first part of a number instead of rounding it gives 3e-7."""
    x, weights, biases, grads = draw(200, 128, 64, 2, False)
    results, grad_x, of_weights = run(x, weights, biases, grads, False)
    for y, weight, grad, of_weight in zip(results, weights, grads, of_weights, strict=True):
        assert relative_error(y, x.double() @ weight.double().t()) < 2.2e-7
        assert relative_error(of_weight, grad.double().t() @ x.double()) < 2.2e-7
    want = sum(grad.double() @ weight.double() for grad, weight in zip(grads, weights, strict=True))
    assert relative_error(grad_x, want) < 2.2e-7


@pytest.mark.parametrize("many", [False, True], ids=["tiles", "warpgroups"])
def test_numbers_that_are_not_finite_stay_in_their_row(many, fused, monkeypatch):
    if many:
        few_multiprocessors(monkeypatch, 4)
    x, weights, biases, grads = draw(200, 32, 16, 2, True)
    x[3, 5], x[140, 1], weights[1][7, 2], grads[0][9, 3] = float("nan"), float("inf"), float("-inf"), float("nan")
    results, grad_x, of_parameters = run(x, weights, biases, grads, False)
    touched = torch.zeros(200, 16, dtype=torch.bool)
    touched[[3, 140]] = True
    assert torch.equal(~results[0].isfinite(), touched)
    touched[:, 7] = True
    assert torch.equal(~results[1].isfinite(), touched)
    # Column 2 meets the infinite weight in every row.
    rows = torch.zeros(200, 32, dtype=torch.bool)
    rows[9] = rows[:, 2] = True
    assert torch.equal(~grad_x.isfinite(), rows)
    columns = torch.zeros(16, 32, dtype=torch.bool)
    columns[:, [5, 1]] = True
    assert torch.equal(~of_parameters[1].isfinite(), columns)
    columns[3] = True
    assert torch.equal(~of_parameters[0].isfinite(), columns)
    assert torch.equal(of_parameters[2].isnan(), columns.all(1)) and of_parameters[3].isfinite().all()
    assert ("gemm_weight_grad" in fused) is many


@pytest.mark.parametrize("rows", [1, 31, 64, 65, 2708, 19717, 120_000, 490_000, 10_000_000])
@pytest.mark.parametrize("layers, features, channels", [(1, 4, 4), (3, 128, 128), (4, 1024, 512)])
def test_splits_cover_every_row_once(rows, layers, features, channels):
    tile = rule.backward_tile(rows)
    division = rule.split_k(tile, layers, rows, features, channels, torch.device("cpu"))
    assert division.rows % rule.DEPTH == 0
    partial = 4 * division.splits * layers * channels * (features + 1)
    assert partial <= rule._PARTIAL_BYTES and (division.rows <= rule.SPLIT_ROWS or 2 * partial > rule._PARTIAL_BYTES)
    assert division.rows * (division.splits - 1) < rows <= division.rows * division.splits
    assert division.weight_blocks % division.splits == 0


# Whole and unfilled groups of columns; rows of one split, of several, and fewer than a block reads at a time.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(700, 384), (129, 8), (40, 520), (1, 64), (300, 72)], ids=str)
def test_sums_over_rows(shape, dtype, fused, monkeypatch):
    monkeypatch.setattr(gemm, "_COLUMN_SUM_ROWS", 0)
    few_multiprocessors(monkeypatch, 4)
    rows = torch.randn(shape).to(dtype)
    sums = gemm.column_sums(rows, torch.float32)
    assert_close("sums", sums, rows.double().sum(0), torch.float32, op="gemm")
    assert fused == ["gemm_sums"] * (1 if shape[0] < 256 else 2)
    assert gemm.column_sums(rows, dtype).dtype is dtype
    rows[-1, 3] = float("nan")
    touched = torch.arange(shape[1]) == 3
    assert torch.equal(gemm.column_sums(rows, torch.float32).isnan(), touched)


@pytest.mark.parametrize("key", ["strides", "address", "width", "float64", "few rows"])
def test_sums_that_torch_takes(key, fused, monkeypatch):
    if key != "few rows":
        monkeypatch.setattr(gemm, "_COLUMN_SUM_ROWS", 0)
    rows = torch.randn(90, 32).bfloat16()
    of = {
        "strides": lambda: rows.t().contiguous().t(),
        "address": lambda: unaligned(rows),
        "width": lambda: rows[:, :20].contiguous(),
        "float64": rows.double,
        "few rows": lambda: rows,
    }
    rows = of[key]()
    assert_close("sums", gemm.column_sums(rows, torch.float32), rows.double().sum(0), torch.float32, op="gemm")
    assert fused == []


@pytest.mark.parametrize("rows", [1, 127, 128, 4097, 19_717, 10_000_000])
@pytest.mark.parametrize("groups", [1, 3, 8, 1000])
def test_splits_of_column_sums_cover_every_row_once(rows, groups):
    splits, rows_per_split = rule.column_sum_splits(rows, groups, torch.device("cpu"))
    assert rows_per_split * (splits - 1) < rows <= rows_per_split * splits
    assert splits == 1 or (rows_per_split >= 128 and splits * groups <= 4 * gpu.H200.multiprocessors)
