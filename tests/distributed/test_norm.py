"""Batch statistics of all processes are those of one."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyg_dfgnn.distributed import Group, wrap
from pyg_dfgnn.distributed.norm import SyncBatchNorm, _OnCpu
from pyg_dfgnn.reference.tolerances import elementwise

CHANNELS = 5
OPTIONS = [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"momentum": 0.3, "eps": 0.1}]


def rows(count, dtype=torch.float64, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1.0, 1e-3, 30.0, 1.0, 1.0], dtype=torch.float64)
    x = torch.randn(count, CHANNELS, generator=generator, dtype=torch.float64) * scale + torch.arange(5.0) * scale
    return x.to(device, dtype)


def norm_of(options, dtype=torch.float64, device="cpu"):
    norm = nn.BatchNorm1d(CHANNELS, **options).to(device, dtype)
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.normal_(norm.bias)
    return norm


def compare(shares):
    """Two steps and an evaluation, on shares of the rows; a process may go without."""
    group = Group.of_environment("cpu")
    bounds = [sum(shares[:rank]) for rank in range(group.size + 1)]
    own = slice(bounds[group.rank], bounds[group.rank + 1])
    for options in OPTIONS:
        torch.manual_seed(0)
        expected = norm_of(options)
        torch.manual_seed(0)
        found = norm_of(options)
        found.__class__ = SyncBatchNorm
        for step in range(2):
            x, grad = rows(sum(shares), seed=step), rows(sum(shares), seed=9 + step)
            whole, part = x.clone().requires_grad_(), x[own].clone().requires_grad_()
            y, y_part = expected(whole), found(part)
            y.backward(grad)
            y_part.backward(grad[own])
            torch.testing.assert_close(y_part, y[own], **elementwise("float64/programs"))
            torch.testing.assert_close(part.grad, whole.grad[own], **elementwise("float64/programs"))
        for left, right in zip(found.parameters(), expected.parameters()):
            torch.testing.assert_close(group.sum(left.grad), right.grad, **elementwise("float64/programs"))
        assert found.state_dict().keys() == expected.state_dict().keys()
        for left, right in zip(found.buffers(), expected.buffers()):
            torch.testing.assert_close(left, right, **elementwise("float64/rounding"))
        whole, part = x.clone().requires_grad_(), x[own].clone().requires_grad_()
        for norm, leaf, given in ((expected, whole, grad), (found, part, grad[own])):
            norm.zero_grad()
            (first,) = torch.autograd.grad(norm(leaf), leaf, given, create_graph=True)
            first.square().sum().backward()
        torch.testing.assert_close(part.grad, whole.grad[own], rtol=1e-7, atol=1e-7)
        if found.affine:
            torch.testing.assert_close(group.sum(found.weight.grad), expected.weight.grad, rtol=1e-7, atol=1e-7)
        if found.track_running_stats:
            assert torch.allclose(found.eval()(x), expected.eval()(x))
    with pytest.raises(ValueError, match=r"'x' needs shape \[N, num_features=5\] \(got \[3, 4\]\)"):
        SyncBatchNorm(5)(torch.zeros(3, 4))
    with pytest.raises(TypeError, match=r"'model' needs BatchNorm1d on several processes \(got BatchNorm2d\)"):
        wrap(nn.BatchNorm2d(3), group)


@pytest.mark.parametrize("shares", [[7, 4], [0, 9], [3, 0, 5], [0, 0, 6]], ids=str)
def test_equals_one_process(launch, shares):
    launch(len(shares), compare, shares)


@contextmanager
def alone(backend):
    """A group of this process alone."""
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype):
    found = SyncBatchNorm(CHANNELS)
    x = rows(64, dtype).requires_grad_()
    with alone("gloo"):
        y = found(x)
        y.sum().backward()
    assert y.dtype == dtype and found.running_var.dtype == torch.float32
    assert x.grad.dtype == dtype and found.weight.grad.dtype == torch.float32
    expected = nn.BatchNorm1d(CHANNELS)(x.detach().float())
    torch.testing.assert_close(y.float(), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_kernels_of_gpu_and_cpu_agree(dtype, affine):
    """The five functions of torch, with a process in front and one in between that have no rows."""
    x, grad = rows(700, dtype, "cuda"), rows(700, dtype, "cuda", seed=1)
    weight, bias = (torch.rand(CHANNELS, device="cuda") for _ in range(2)) if affine else (None, None)
    results = {}
    for kernels in (torch, _OnCpu):
        parts = [kernels.batch_norm_stats(part, 1e-5) for part in x.split([300, 400])]
        empty = torch.ones(2, CHANNELS, device="cuda").unbind()
        mean, invstd = (torch.stack(each) for each in zip(empty, parts[0], empty, parts[1]))
        counts = torch.tensor([torch.finfo(torch.float32).tiny, 300.0, torch.finfo(torch.float32).tiny, 400.0]).cuda()
        running = [torch.zeros(CHANNELS, device="cuda"), torch.ones(CHANNELS, device="cuda")]
        mean, invstd = kernels.batch_norm_gather_stats_with_counts(mean, mean, invstd, *running, 0.1, 1e-5, counts)
        y = kernels.batch_norm_elemt(x, weight, bias, mean, invstd, 1e-5)
        sums = kernels.batch_norm_backward_reduce(grad, x, mean, invstd, weight, True, affine, affine)
        counts = counts.int().view(-1, 1)
        assert counts.sum() == 700
        grad_x = kernels.batch_norm_backward_elemt(grad, x, mean, invstd, weight, *sums[:2], counts)
        results[kernels] = [mean, invstd, *running, y, *(sums if affine else sums[:2]), grad_x]
    for found, expected in zip(results[torch], results[_OnCpu]):
        tolerance = 2e-2 if found.dtype == torch.bfloat16 else 2e-4
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.cuda
def test_no_wait_for_the_gpu():
    """Training is that of torch's layer for one process, and neither pass waits."""
    x, grad = rows(500, torch.float32, "cuda"), rows(500, torch.float32, "cuda", seed=1)
    expected = norm_of({}, torch.float32, "cuda")
    found = SyncBatchNorm(CHANNELS).cuda()
    found.load_state_dict(expected.state_dict())
    left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected(right).backward(grad)
    with alone("nccl"):
        found(left).backward(grad)
        pairs = zip([left, *found.parameters()], [right, *expected.parameters()])
        gradients = [(one.grad.clone(), other.grad) for one, other in pairs]
        for one, other in [*gradients, *zip(found.buffers(), expected.buffers())]:
            torch.testing.assert_close(one, other, **elementwise("float32/steps"))
        torch.cuda.set_sync_debug_mode("error")
        try:
            found(left).backward(grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
