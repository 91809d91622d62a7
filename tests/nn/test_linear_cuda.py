"""Kernels in PyG's linear layer on a GPU: against float64, in a CUDA graph, under autocast."""

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.nn import dense

from pyg_dfgnn.nn.dense.linear import Linear
from pyg_dfgnn.reference.tolerances import assert_all_close
from pyg_dfgnn.runtime import launcher

pytestmark = pytest.mark.cuda


def draw(rows=50_000, features=160, channels=80):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(0)
    return Linear(features, channels).cuda(), torch.randn(rows, features, device="cuda", requires_grad=True)


def kernels_of(call):
    """The names of the kernels that it launches; the launches are made."""
    names = []
    launch = launcher.launch

    def record(kernel, *rest):
        names.append(kernel.entry)
        return launch(kernel, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pyg_dfgnn.ops.gemm.launch", record)
        result = call()
    return names, result


@pytest.mark.parametrize(
    ("rows", "features", "channels"),
    [(50_000, 160, 80), (40_000, 500, 128)],
)
def test_values_and_gradients(rows, features, channels):
    layer, x = draw(rows, features, channels)
    leaves, grad = [x, *layer.parameters()], torch.randn(rows, channels, device="cuda")
    names, out = kernels_of(lambda: layer(x))
    assert len(names) == 1 and names[0].startswith("gemm_")
    names, own = kernels_of(lambda: torch.autograd.grad(out, leaves, grad))
    assert names and all(name.startswith("gemm_") for name in names)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = F.linear(*exact)
    grads = torch.autograd.grad(want, exact, grad.double())
    pairs = zip(("x", "weight", "bias"), zip(own, grads, strict=True))
    assert_all_close({"out": (out, want), **dict(pairs)}, op="gemm")


def test_capture_and_replay():
    layer, x = draw()
    layer(x).sum().backward()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = layer(x)
        grad_x = torch.autograd.grad(out.square().sum(), [x])[0]
    with torch.no_grad():
        x.mul_(2)
    captured.replay()
    exact = x.detach().double().requires_grad_()
    want = F.linear(exact, layer.weight.double(), layer.bias.double())
    (grad,) = torch.autograd.grad(want.square().sum(), [exact])
    assert_all_close({"out": (out, want), "x": (grad_x, grad)}, op="gemm")


@pytest.mark.parametrize(("tf32", "cast"), [(True, False), (False, True)], indirect=["tf32"])
def test_what_may_be_rounded_is_torchs(tf32, cast):
    layer, x = draw()
    with torch.autocast("cuda", torch.bfloat16, enabled=cast):
        names, out = kernels_of(lambda: layer(x))
        assert names == [] and out.dtype is (torch.bfloat16 if cast else torch.float32)
        assert torch.equal(out, dense.Linear.forward(layer, x))
