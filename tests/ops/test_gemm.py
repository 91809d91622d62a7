"""Linear layers of one input by kernels: emulated, against float64, and the gradients that torch takes."""

import pytest
import torch
import torch.nn.functional as F

from pyg_dfgnn.ops import gemm
from pyg_dfgnn.reference.tolerances import assert_all_close, elementwise
from tests.kernels.emulated import emulated_device, small_gemm

KERNELS = ["gemm_forward_strips", "gemm_forward_strips", "gemm_weight_grad"]
# Rows, features, channels, layers, biases: strips and sections whole and not, warpgroups with as many strips and with
# one less, or none; one to four layers; groups of columns of wide layers.
SIZES = [
    (450, 128, 128, 3, True),
    (330, 68, 84, 2, True),
    (70, 36, 20, 4, False),
    (1, 4, 4, 1, True),
    (193, 100, 128, 4, True),
    (200, 500, 128, 1, False),
    (150, 132, 232, 2, True),
    (70, 512, 384, 1, True),
    (90, 80, 160, 3, False),
]


@pytest.fixture(autouse=True)
def few():
    """Several strips each."""
    with small_gemm():
        yield


def draw(rows, features, channels, layers, biased, device="cpu"):
    """Input, weights, biases, and gradients of the results."""
    torch.manual_seed(rows)
    x = torch.randn(rows, features, device=device)
    weights = [torch.randn(channels, features, device=device) for _ in range(layers)]
    biases = [torch.randn(channels, device=device) for _ in range(layers if biased else 0)]
    return x, weights, biases, [torch.randn(rows, channels, device=device) for _ in range(layers)]


def run(x, weights, biases, grads):
    """Results, gradient of x and those of the parameters."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, *weights, *biases)]
    count = 1 + len(weights)
    results = gemm.project(leaves[0], leaves[1:count], leaves[count:])
    grad_x, *of_parameters = torch.autograd.grad(results, leaves, grads)
    return results, grad_x, of_parameters


def check(tensors, results, grad_x, of_parameters):
    x, weights, biases, grads = (
        [tensor.double() for tensor in part] if isinstance(part, list) else part.double() for part in tensors
    )
    biases = biases or [None] * len(weights)
    pairs = {"grad x": (grad_x, sum(grad @ weight for grad, weight in zip(grads, weights, strict=True)))}
    for layer, (weight, bias, grad) in enumerate(zip(weights, biases, grads, strict=True)):
        pairs[f"y {layer}"] = results[layer], F.linear(x, weight, bias)
        pairs[f"grad weight {layer}"] = of_parameters[layer], grad.t() @ x
        if bias is not None:
            pairs[f"grad bias {layer}"] = of_parameters[len(weights) + layer], grad.sum(0)
    assert_all_close(pairs, op="gemm")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_float64(sizes, fused):
    tensors = draw(*sizes)
    computed = run(*tensors)
    check(tensors, *computed)
    assert fused == KERNELS
    with torch.no_grad():
        assert all(map(torch.equal, computed[0], gemm.project(*tensors[:3])))


@pytest.mark.parametrize("order", ["reverse", "random"])
def test_in_any_order(order):
    """Bit for bit the same."""
    tensors = draw(450, 68, 84, 2, True)
    with emulated_device():
        first = run(*tensors)
    with emulated_device(order):
        second = run(*tensors)
    check(tensors, *second)
    assert all(map(torch.equal, (*first[0], first[1], *first[2]), (*second[0], second[1], *second[2])))


@pytest.mark.parametrize("wanted", ["x", "weights", "one weight", "biases"])
def test_gradients_that_are_not_wanted(wanted, fused):
    x, weights, biases, grads = draw(90, 32, 16, 3, True)
    full_x, full = run(x, weights, biases, grads)[1:]
    fused.clear()
    places = {"x": [], "weights": [0, 1, 2], "one weight": [1], "biases": [3, 4, 5]}[wanted]
    leaf, parameters = x.clone().requires_grad_(wanted == "x"), [each.clone() for each in (*weights, *biases)]
    leaves = [leaf] if wanted == "x" else [parameters[place].requires_grad_() for place in places]
    results = gemm.project(leaf, parameters[:3], parameters[3:])
    found = torch.autograd.grad(results, leaves, grads)
    assert all(map(torch.equal, found, [full_x] if wanted == "x" else [full[place] for place in places]))
    assert fused == (KERNELS[:2] if wanted == "x" else [KERNELS[0], KERNELS[2]])


def test_a_result_that_nothing_reads(fused):
    """The others have their gradients by kernels of fewer layers, and its parameters none."""
    x, weights, biases, grads = draw(90, 32, 16, 3, True)
    leaves = [tensor.requires_grad_() for tensor in (x, *weights, *biases)]
    results = gemm.project(x, weights, biases)
    found = torch.autograd.grad([results[0], results[2]], leaves, [grads[0], grads[2]], allow_unused=True)
    assert fused == KERNELS and found[2] is None and found[5] is None
    given = x.detach(), *([part[0].detach(), part[2].detach()] for part in (weights, biases, grads))
    check(given, [results[0], results[2]], found[0], [found[1], found[3], found[4], found[6]])


def unaligned(tensor):
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def test_memory_that_no_kernel_reads_where_it_lies(fused):
    """Strides, odd addresses, and the one number that stands for all in the gradient of a sum."""
    x, weights, biases, grads = draw(50, 32, 16, 2, True)
    grads = [grads[0].t().contiguous().t(), torch.ones(()).expand(50, 16)]
    for given in (x.t().contiguous().t(), unaligned(x)):
        tensors = given, [weights[0], unaligned(weights[1])], [unaligned(biases[0]), biases[1]], grads
        check(tensors, *run(*tensors))
    assert fused == KERNELS * 2


@pytest.mark.parametrize("unpack", [torch.clone, unaligned, lambda tensor: tensor.t().contiguous().t()])
def test_saved_tensors_that_come_back_elsewhere(unpack, fused):
    tensors = draw(50, 32, 16, 2, True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        check(tensors, *run(*tensors))
    assert fused == KERNELS


@pytest.mark.parametrize("edited", ["x", "weight"])
def test_an_edit_after_the_forward_pass_is_noticed(edited, fused):
    x, weights, biases, _ = draw(50, 32, 16, 2, True)
    out = gemm.project(x.requires_grad_(), weights, biases)
    with torch.no_grad():
        (x if edited == "x" else weights[0]).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out[0].sum().backward()


def test_a_weight_that_no_gradient_reads_may_be_edited(fused):
    x, weights, biases, _ = draw(50, 32, 16, 2, True)
    out = gemm.project(x, [weight.requires_grad_() for weight in weights], biases)
    with torch.no_grad():
        weights[0].mul_(2)
    out[0].sum().backward()
    torch.testing.assert_close(weights[0].grad, x.sum(0).expand(16, 32))


def test_second_derivatives(fused):
    """A penalty on gradients: torch's products."""
    x, weights, biases, _ = draw(50, 32, 16, 2, True)
    pairs = []
    for dtype in (torch.float32, torch.float64):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, *weights, *biases)]
        leaf, *parts = leaves[0], leaves[1:3], leaves[3:]
        if dtype is torch.float32:
            results = gemm.project(leaf, *parts)
        else:
            results = [F.linear(leaf, weight, bias) for weight, bias in zip(*parts, strict=True)]
        (grad,) = torch.autograd.grad(sum(out.square().sum() for out in results), [leaves[0]], create_graph=True)
        pairs.append(torch.autograd.grad(grad.square().sum(), leaves))
    assert_all_close({str(place): pair for place, pair in enumerate(zip(*pairs, strict=True))}, op="gemm")


def test_batched_gradients(fused):
    x, weights, _, _ = draw(50, 32, 16, 1, True)
    leaves = [x.requires_grad_(), weights[0].requires_grad_()]
    grads = torch.randn(5, 50, 16)
    (out,) = gemm.project(x, weights, ())
    apart = [torch.autograd.grad(out, leaves, grad, retain_graph=True) for grad in grads]
    batched = torch.vmap(lambda grad: torch.autograd.grad(out, leaves, grad, retain_graph=True))(grads)
    again = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, create_graph=True)
    for together, other, others in zip(batched, again, zip(*apart, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(others), **elementwise("float32/few_terms"))
        torch.testing.assert_close(other, torch.stack(others), **elementwise("float32/few_terms"))


def test_backward_in_a_region_of_autocast(fused):
    """Also where a gradient is differentiated: the products keep their dtypes."""
    x, weights, biases, _ = draw(50, 32, 16, 2, True)
    leaves = [tensor.requires_grad_() for tensor in (x, *weights, *biases)]
    for create_graph in (False, True):
        loss = sum(out.square().sum() for out in gemm.project(x, weights, biases))
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.autograd.grad(loss, leaves, retain_graph=True, create_graph=create_graph)
        expected = torch.autograd.grad(loss, leaves, create_graph=create_graph)
        assert all(map(torch.equal, found, expected))


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
    (y,), grad_x, (grad_weight,) = run(x, [weight], [], [grad])
    for name, result, a, b in (
        ("y", y, x, weight.t()),
        ("x", grad_x, grad, weight),
        ("weight", grad_weight, grad.t(), x),
    ):
        a, b = a.double(), b.double()
        error = ((result.double() - a @ b).abs() / (a.abs() @ b.abs())).max()
        assert error < 1e-6, f"{name} {error}"


@pytest.mark.parametrize("key", MAGNITUDES)
def test_numbers_of_any_magnitude(key, fused):
    check_magnitudes(key, 200, "cpu")
    assert fused == KERNELS


def test_numbers_that_are_not_finite_stay_in_their_row(fused):
    x, weights, biases, grads = draw(200, 32, 16, 2, True)
    x[3, 5], x[140, 1], weights[1][7, 2], grads[0][9, 3] = float("nan"), float("inf"), float("-inf"), float("nan")
    results, grad_x, of_parameters = run(x, weights, biases, grads)
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
