"""Products of linear layers of one input: the kernels emulated, against float64, and what they leave to torch."""

import pytest
import torch
import torch.nn.functional as F

from pyg_dfgnn.dispatch import products as rule
from pyg_dfgnn.ops import products
from tests.tolerances import assert_all_close, relative_error

# Rows, features, channels, layers, biases: tiles filled and unfilled, steps and shares whole and not, one of each.
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
    products._forward.cache_clear()
    products._backward.cache_clear()


def draw(rows, features, channels, layers, biased, device="cpu"):
    """Input, weights, biases, and gradients of the results."""
    torch.manual_seed(rows)
    x = torch.randn(rows, features, device=device)
    weights = [torch.randn(channels, features, device=device) for _ in range(layers)]
    biases = [torch.randn(channels, device=device) for _ in range(layers if biased else 0)]
    return x, weights, biases, [torch.randn(rows, channels, device=device) for _ in range(layers)]


def run(x, weights, biases, grads, beside, needed=ALL):
    """Results, gradient of x and those of the parameters."""
    if beside:
        rows, kept = products.beside(x, weights, biases)
        found = rows.chunk(len(weights), 1)
        grads = [torch.cat(grads, 1)] if len(weights) > 1 else grads
    else:
        found, kept = products.apart(x, weights, biases), weights
    return found, *products.gradients(x, len(weights), kept, [*weights, *biases], grads, needed)


def check(tensors, found, grad_x, of_parameters):
    x, weights, biases, grads = (
        [each.double() for each in part] if isinstance(part, list) else part.double() for part in tensors
    )
    biases = biases or [None] * len(weights)
    pairs = {"grad x": (grad_x, sum(grad @ weight for grad, weight in zip(grads, weights, strict=True)))}
    for layer, (weight, bias, grad) in enumerate(zip(weights, biases, grads, strict=True)):
        pairs[f"y {layer}"] = found[layer], F.linear(x, weight, bias)
        pairs[f"grad weight {layer}"] = of_parameters[layer], grad.t() @ x
        if bias is not None:
            pairs[f"grad bias {layer}"] = of_parameters[len(weights) + layer], grad.sum(0)
    assert_all_close(pairs)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_float64(sizes, beside, fused):
    tensors = draw(*sizes)
    found = run(*tensors, beside)
    check(tensors, *found)
    assert fused[:2] == ["products_forward", "products_backward"] and set(fused[2:]) <= {"products_sums"}
    assert all(map(torch.equal, found[0], run(*tensors, beside)[0]))


@pytest.mark.parametrize("tile", FORWARD_TILES, ids=str)
def test_forward_tiles(tile, fused, monkeypatch):
    monkeypatch.setattr(products, "forward_tile", lambda *_: tile)
    products._forward.cache_clear()
    x, weights, biases, _ = draw(150, 68, 140, 2, True)
    found = products.apart(x, weights, biases)
    pairs = zip(found, weights, biases, strict=True)
    assert_all_close({str(i): (y, F.linear(x.double(), w.double(), b.double())) for i, (y, w, b) in enumerate(pairs)})


@pytest.mark.parametrize("tile", BACKWARD_TILES, ids=str)
def test_backward_tiles(tile, fused, monkeypatch):
    """Also with many shares."""
    monkeypatch.setattr(products, "backward_tile", lambda *_: tile)
    products._backward.cache_clear()
    tensors = draw(330, 68, 140, 2, True)
    check(tensors, *run(*tensors, False))
    assert fused == ["products_forward", "products_backward", "products_sums"]


@pytest.mark.parametrize("beside", [True, False])
def test_gradients_that_are_not_needed(beside, fused):
    tensors = draw(90, 32, 16, 3, True)
    _, full_x, full = run(*tensors, beside)
    _, grad_x, none = run(*tensors, beside, (True, False, False))
    assert torch.equal(grad_x, full_x) and none == [None] * 6
    for needed in ((False, True, True), (False, True, False), (False, False, True)):
        _, missing, of_parameters = run(*tensors, beside, needed)
        assert missing is None and all(map(torch.equal, of_parameters, full))


def unaligned(tensor):
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


REFUSED = {
    "features": lambda x, w, b: (x[:, :30].contiguous(), [each[:, :30].contiguous() for each in w], b),
    "channels": lambda x, w, b: (x, [each[:15].contiguous() for each in w], [each[:15].contiguous() for each in b]),
    "float64": lambda x, w, b: (x.double(), [each.double() for each in w], [each.double() for each in b]),
    "strides": lambda x, w, b: (x.t().contiguous().t(), w, b),
    "address": lambda x, w, b: (unaligned(x), w, b),
    "address of a weight": lambda x, w, b: (x, [w[0], unaligned(w[1])], b),
    "no rows": lambda x, w, b: (x[:0], w, b),
    "no features": lambda x, w, b: (x[:, :0], [each[:, :0] for each in w], b),
    "no channels": lambda x, w, b: (x, [each[:0] for each in w], [each[:0] for each in b]),
    "too many layers": lambda x, w, b: (x, w * 3, b * 3),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_torch_takes(key, fused):
    x, weights, biases, _ = draw(50, 32, 16, 2, True)
    x, weights, biases = REFUSED[key](x, weights, biases)
    assert products.apart(x, weights, biases) is None
    rows, kept = products.beside(x, weights, biases)
    grads = torch.randn_like(rows)
    grad_x, of_parameters = products.gradients(x, len(weights), kept, [*weights, *biases], (grads,), ALL)
    assert fused == []
    leaves = [each.clone().requires_grad_() for each in (x, *weights, *biases)]
    count = len(weights)
    want = torch.cat([F.linear(leaves[0], leaves[1 + i], leaves[1 + count + i]) for i in range(count)], 1)
    torch.testing.assert_close(rows, want)
    torch.testing.assert_close([grad_x, *of_parameters], list(torch.autograd.grad(want, leaves, grads)))


def test_tf32_is_left_to_torch(fused):
    x, weights, biases, _ = draw(50, 32, 16, 2, True)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert products.apart(x, weights, biases) is None
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert products.apart(x, weights, biases) is not None


def test_what_does_not_fit_is_refused(fused):
    x, weights, biases, _ = draw(50, 32, 16, 2, True)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        products.beside(x[:, :28].contiguous(), weights, biases)
    assert fused == []


def test_gradients_in_other_memory(fused):
    """They are copied first, such as the one number that stands for all in the gradient of a sum."""
    x, weights, biases, grads = draw(50, 32, 16, 2, True)
    grads = [grads[0].t().contiguous().t(), torch.ones(()).expand(50, 16)]
    found = products.apart(x, weights, biases)
    check((x, weights, biases, grads), found, *products.gradients(x, 2, weights, [*weights, *biases], grads, ALL))
    assert fused == ["products_forward", "products_backward"]


def test_tf32_allowed_between_the_passes(fused):
    """Results by the kernel, gradients by torch, and the other way round; on a CPU neither rounds."""
    tensors = x, weights, biases, grads = draw(50, 32, 16, 2, True)
    given = (torch.cat(grads, 1),)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for first, second in (("ieee", "tf32"), ("tf32", "ieee")):
            torch.backends.cuda.matmul.fp32_precision = first
            rows, kept = products.beside(x, weights, biases)
            torch.backends.cuda.matmul.fp32_precision = second
            check(tensors, rows.chunk(2, 1), *products.gradients(x, 2, kept, [*weights, *biases], given, ALL))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert fused == ["products_forward"]


def test_errors_are_those_of_float32(fused):
    """Cutting the first part of a number instead of rounding it gives 3e-7."""
    x, weights, biases, grads = draw(200, 128, 64, 2, False)
    found, grad_x, of_weights = run(x, weights, biases, grads, False)
    for y, weight, grad, of_weight in zip(found, weights, grads, of_weights, strict=True):
        assert relative_error(y, x.double() @ weight.double().t()) < 2.2e-7
        assert relative_error(of_weight, grad.double().t() @ x.double()) < 2.2e-7
    want = sum(grad.double() @ weight.double() for grad, weight in zip(grads, weights, strict=True))
    assert relative_error(grad_x, want) < 2.2e-7


def test_numbers_that_are_not_finite_stay_in_their_row(fused):
    x, weights, biases, _ = draw(70, 32, 16, 2, True)
    x[3, 5], x[40, 1], weights[1][7, 2] = float("nan"), float("inf"), float("-inf")
    first, second = products.apart(x, weights, biases)
    touched = torch.zeros(70, 16, dtype=torch.bool)
    touched[[3, 40]] = True
    assert torch.equal(~first.isfinite(), touched)
    touched[:, 7] = True
    assert torch.equal(~second.isfinite(), touched)


@pytest.mark.parametrize("rows", [1, 31, 64, 65, 2708, 19717, 120_000, 490_000, 10_000_000])
@pytest.mark.parametrize("layers, features, channels", [(1, 4, 4), (3, 128, 128), (4, 1024, 512)])
def test_shares_cover_every_row_once(rows, layers, features, channels):
    tile = rule.backward_tile(rows)
    shares = rule.shares_of(tile, layers, rows, features, channels, torch.device("cpu"))
    assert shares.rows % rule.DEPTH == 0
    partial = 4 * shares.splits * layers * channels * (features + 1)
    assert partial <= rule._PARTIAL_BYTES and (shares.rows <= rule._SHARE_ROWS or 2 * partial > rule._PARTIAL_BYTES)
    assert shares.rows * (shares.splits - 1) < rows <= shares.rows * shares.splits
    assert shares.weight_blocks % shares.splits == 0


def test_weights_edited_after_the_forward_pass_are_noticed(fused):
    from torch_geometric.nn.dense.linear import Linear

    from pyg_dfgnn.nn.projection import project

    layers, x = [Linear(8, 8) for _ in range(2)], torch.randn(9, 8, requires_grad=True)
    out = project(x, 2, *layers)
    with torch.no_grad():
        layers[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out[0].sum().backward()
