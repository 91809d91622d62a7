"""Batch norm of the rows of a padded batch: torch's norm of these rows alone, whatever padding holds."""

import copy

import pytest
import torch
from torch import nn

from pyg_dfgnn.ops.masked_norm import RowMask, Running, masked_norm
from pyg_dfgnn.reference.tolerances import relative_error
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def normed(norm, x, down, mask):
    """Output and gradients by the kernels, with the statistics of a module."""
    running = None
    if norm.track_running_stats:
        norm.num_batches_tracked += 1
        running = Running(norm.running_mean, norm.running_var, norm.num_batches_tracked, norm.momentum)
    out = masked_norm(x, norm.weight, norm.bias, mask, running, norm.eps)
    return out, torch.autograd.grad(out, [x, *norm.parameters()], down)


@needs_compiler
@pytest.mark.parametrize("momentum", [0.1, None], ids=["moving", "cumulative"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("rows, counts, channels", [(7, (4, 7), 3), (150, (149, 9), 33)])
def test_padding_is_left_out(rows, counts, channels, dtype, affine, momentum):
    torch.manual_seed(0)
    norm, mask = (
        nn.BatchNorm1d(channels, affine=affine, momentum=momentum),
        RowMask(rows, torch.zeros(1, dtype=torch.int64)),
    )
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    exact = copy.deepcopy(norm).double()
    for count in counts:
        mask.count.fill_(count)
        x, down = (3 + torch.randn(rows, channels)).to(dtype), torch.randn(rows, channels).to(dtype)
        x[count:] = down[count:] = torch.nan
        head = x[:count].double().requires_grad_()
        with emulated_device() as launched:
            out, (grad_x, *grads) = normed(norm, x.requires_grad_(), down, mask)
        assert len(launched) == 4 and out.dtype is dtype
        want = exact(head)
        want_x, *want_grads = torch.autograd.grad(want, [head, *exact.parameters()], down[:count].double())
        assert not out[count:].any() and not grad_x[count:].any()
        pairs = [(out[:count], want), (grad_x[:count], want_x), *zip(grads, want_grads, strict=True)]
        pairs += [(norm.running_mean, exact.running_mean), (norm.running_var, exact.running_var)]
        for actual, expected in pairs:
            assert relative_error(actual, expected) <= BOUNDS[dtype]


@needs_compiler
@pytest.mark.parametrize("level", [0.0, 1e4, 1e6])
def test_a_constant_column_stays_finite(level):
    norm, mask = nn.BatchNorm1d(2, track_running_stats=False), RowMask(90, torch.tensor([77]))
    x = torch.full((90, 2), level)
    with emulated_device():
        out, grads = normed(norm, x.requires_grad_(), torch.randn(90, 2), mask)
    assert not out.any() and all(grad.isfinite().all() for grad in grads)


@needs_compiler
def test_a_batch_of_one_row_is_finite():
    norm, mask = nn.BatchNorm1d(2), RowMask(3, torch.tensor([1]))
    with emulated_device():
        out, grads = normed(norm, torch.randn(3, 2, requires_grad=True), torch.ones(3, 2), mask)
    assert out.isfinite().all() and all(grad.isfinite().all() for grad in grads) and norm.running_var.isfinite().all()


@needs_compiler
def test_second_derivatives_and_columns_in_steps():
    """Of an input whose columns are not next to each other, by kernels and by torch's operators."""
    torch.manual_seed(0)
    wide, mask, results = torch.randn(20, 12, requires_grad=True), RowMask(20, torch.tensor([13])), []
    weight, bias = torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)
    for is_emulated in (True, False):
        with emulated_device() if is_emulated else torch.enable_grad():
            out = masked_norm(wide[:, ::2], weight, bias, mask, None, 1e-5)
            grads = torch.autograd.grad(out.sin().sum(), [wide, weight, bias], create_graph=True)
            second = torch.autograd.grad(sum(grad.sin().sum() for grad in grads), [wide, weight, bias])
        results.append([*grads, *second])
    torch.testing.assert_close(*results)
