"""Attention that absorbs its linear layers on a GPU: against float64, the same bits again, and in a CUDA graph."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg

import pyg_dfgnn.nn as ours
from pyg_dfgnn.dispatch.attention_absorbed import MIN_ROWS
from pyg_dfgnn.dispatch.gpu import gpu_of
from tests.tolerances import assert_all_close

pytestmark = pytest.mark.cuda
NODE = "_AbsorbedAttentionBackward"


@pytest.fixture(autouse=True)
def hopper():
    if gpu_of(torch.device("cuda", torch.cuda.current_device())).capability != (9, 0):
        pytest.skip("no kernel of compute capability 9.0")


def edges_of(nodes, mean, seed=0):
    """Degrees that fall off as a power, and some nodes without edges."""
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.arange(nodes) + 10.0) ** -0.6
    weights[::50] = 0
    count = int(nodes * mean)
    target = torch.multinomial(weights, count, True, generator=generator)
    return torch.stack([torch.randint(nodes, (count,), generator=generator), target]).cuda()


def build(channels, bias=True):
    torch.manual_seed(0)
    conv = ours.TransformerConv(channels, channels, root_weight=False, bias=bias).cuda()
    for parameter in conv.parameters():
        parameter.data.normal_(std=channels**-0.5)
    oracle = pyg.TransformerConv(channels, channels, root_weight=False, bias=bias).cuda()
    oracle.load_state_dict(conv.state_dict())
    return conv, oracle.double()


def trained(conv, x, edge_index, grad):
    x = x.detach().requires_grad_()
    out = conv(x, edge_index)
    leaves = {"x": x, **{name: p for name, p in conv.named_parameters() if "skip" not in name}}
    found = torch.autograd.grad(out, leaves.values(), grad.to(out.dtype))
    return {"out": out.detach(), **dict(zip(leaves, found, strict=True))}, out.grad_fn.name()


@pytest.mark.parametrize(("nodes", "mean"), [(None, 5), (8_200, 4), (19_717, 4.5), (25_400, 3), (40_000, 6)])
@pytest.mark.parametrize(("channels", "precision"), [(64, "highest"), (96, "highest"), (128, "highest"), (128, "high")])
def test_values_and_gradients(nodes, mean, channels, precision):
    nodes = nodes or MIN_ROWS[channels]
    edge_index = edges_of(nodes, mean)
    conv, oracle = build(channels)
    x, grad = torch.randn(nodes, channels, device="cuda"), torch.randn(nodes, channels, device="cuda")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        found, node = trained(conv, x, edge_index, grad)
        again, _ = trained(conv, x, edge_index, grad)
    finally:
        torch.set_float32_matmul_precision(before)
    assert node == NODE
    assert all(torch.equal(found[name], again[name]) for name in found)
    want, _ = trained(oracle, x.double(), edge_index, grad)
    assert not found.pop("lin_key.bias").any()
    dtype = "tf32" if precision == "high" else None
    assert_all_close({name: (found[name], want[name]) for name in found}, dtype)


def test_capture_and_replay():
    """Other numbers at the same addresses, forward and backward, on a stream of its own."""
    nodes = 19_717
    edge_index = edges_of(nodes, 4.5)
    conv, _ = build(128)
    x, grad = torch.randn(nodes, 128, device="cuda"), torch.randn(nodes, 128, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        trained(conv, x, edge_index, grad)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            found, node = trained(conv, x, edge_index, grad)
        with torch.no_grad():
            x.mul_(0.5)
            conv.lin_query.weight.mul_(2)
        captured.replay()
    torch.cuda.synchronize()
    want, _ = trained(copy.deepcopy(conv), x, edge_index, grad)
    assert node == NODE
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_poisoned_memory():
    """Nothing reads what no kernel has written."""
    nodes = 9_000
    edge_index = edges_of(nodes, 4)
    conv, _ = build(128)
    x, grad = torch.randn(nodes, 128, device="cuda"), torch.randn(nodes, 128, device="cuda")
    want, _ = trained(conv, x, edge_index, grad)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        # Fills what torch.empty returns with NaN.
        torch.use_deterministic_algorithms(True)
        found, node = trained(conv, x, edge_index, grad)
    finally:
        torch.use_deterministic_algorithms(before)
    assert node == NODE
    assert all(torch.equal(found[name], want[name]) for name in want)


def shifted(tensor):
    """The same at an address that no kernel takes."""
    moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:]
    return moved.copy_(tensor.flatten()).view(tensor.shape)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_what_lies_elsewhere(bias):
    """Inputs and saved tensors at addresses that kernels do not take, and one gradient for all elements."""
    nodes = 9_000
    edge_index = edges_of(nodes, 4)
    conv, oracle = build(128, bias)
    x, one = torch.randn(nodes, 128, device="cuda"), torch.ones((), device="cuda")
    grad = one.expand(nodes, 128)
    plain, _ = trained(conv, x, edge_index, grad)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, shifted):
        found, node = trained(conv, shifted(x), edge_index, grad)
    assert node == NODE
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    want, _ = trained(oracle, x.double(), edge_index, grad)
    found.pop("lin_key.bias", None)
    assert_all_close({name: (found[name], want[name]) for name in found})
