"""The convs under autocast on a GPU, beside PyG's and against float64: captured, scaled."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.reference.tolerances import relative_error, tolerance
from tests.nn.test_autocast import HALVES, compare

pytestmark = pytest.mark.cuda

FEATURES = 24
CONVS = {
    "gat": ("GATConv", {"heads": 3, "residual": True}),
    "gatv2": ("GATv2Conv", {"heads": 3, "residual": True}),
    "gatv2_shared": ("GATv2Conv", {"share_weights": True, "add_self_loops": False}),
    "transformer": ("TransformerConv", {"heads": 3}),
    "transformer_alone": ("TransformerConv", {"root_weight": False}),
    "transformer_beta": ("TransformerConv", {"heads": 2, "beta": True}),
    "transformer_mean": ("TransformerConv", {"heads": 4, "concat": False}),
}


def autocast(dtype=torch.bfloat16, **options):
    return torch.autocast("cuda", dtype=dtype, **options)


def build(key, features=FEATURES, channels=16):
    name, options = CONVS[key]
    conv = getattr(ours, name)(features, channels, **options).cuda()
    for parameter in conv.parameters():
        parameter.data.normal_(std=0.2)
    other = getattr(pyg, name)(features, channels, **options).cuda()
    other.load_state_dict(conv.state_dict())
    return conv, other


def graph_of(nodes):
    """A hub, duplicates, targets without edges."""
    edge_index = torch.randint(nodes * 3 // 4, (2, 10 * nodes), device="cuda")
    edge_index[1, : 2 * nodes] = 3
    return torch.randn(nodes, FEATURES, device="cuda"), edge_index


def trained(conv, x, edge_index, cast=None):
    x = x.clone().requires_grad_()
    with autocast(cast or torch.bfloat16, enabled=cast is not None):
        out = conv(x, edge_index)
    torch.manual_seed(1)
    (out.double() * torch.randn(out.shape, device="cuda")).sum().backward()
    grads = {name: p.grad for name, p in conv.named_parameters() if p.grad is not None}
    return {"out": out, "x": x.grad, **grads}


def kernels_of(step):
    """Names of the kernels of a step."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    found = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    # The tests fill new buffers with NaN.
    return [name for name in found if "FillFunctor" not in name]


@pytest.mark.parametrize("cast", HALVES)
@pytest.mark.parametrize("schedule", ["auto", "row_split"])
@pytest.mark.parametrize("nodes", [200, 5000])
@pytest.mark.parametrize("key", CONVS)
def test_convs(key, nodes, schedule, cast):
    conv, other = build(key)
    x, edge_index = graph_of(nodes)
    with pyg_dfgnn.local_settings(schedule=schedule):
        with autocast(cast):
            assert pyg_dfgnn.describe_plan(conv, x, edge_index).fused
        found = trained(conv, x, edge_index, cast)
    theirs = trained(other, x, edge_index, cast)
    theirs = {name: value.detach().clone() for name, value in theirs.items()}
    other.zero_grad()
    compare(found, trained(other.double(), x.double(), edge_index), theirs, cast)


def test_loss_scaling():
    """Steps with a scaled loss change float32 parameters; a scale that overflows is noticed and the step left out."""
    conv, _ = build("transformer")
    x, edge_index = graph_of(200)
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    for scale, taken in ((2.0**8, True), (2.0**60, False)):
        before = [p.detach().clone() for p in conv.parameters()]
        scaler = torch.amp.GradScaler("cuda", init_scale=scale)
        optimizer.zero_grad()
        with autocast(torch.float16):
            loss = conv(x, edge_index).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(p.isfinite().all() for p in conv.parameters())
        assert any(not torch.equal(*pair) for pair in zip(before, conv.parameters(), strict=True)) == taken
        assert (scaler.get_scale() < scale) != taken


@pytest.mark.parametrize("key", ["transformer", "gatv2"])
def test_capture_and_replay(key):
    conv, _ = build(key)
    x, edge_index = graph_of(5000)
    x.requires_grad_()

    def step():
        with autocast(cache_enabled=False):
            out = conv(x, edge_index)
        # Softmax does not see the key's bias: its gradient is what rounding leaves.
        leaves = [x, *(p for name, p in conv.named_parameters() if name != "lin_key.bias")]
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = step()
    with torch.no_grad():
        x.mul_(0.5)
        for parameter in conv.parameters():
            parameter.mul_(0.9)
    captured.replay()
    for got, want in zip(found, step(), strict=True):
        assert relative_error(got, want) < tolerance(torch.bfloat16).relative


@pytest.mark.parametrize("schedule", ["auto", "row_split"])
def test_fewer_kernels_than_pygs(schedule):
    conv, other = build("transformer_alone", channels=128)
    x, edge_index = graph_of(5000)
    x.requires_grad_()

    def step_of(conv):
        def step():
            with autocast():
                out = conv(x, edge_index)
            torch.autograd.grad(out, [x, *conv.parameters()], out, allow_unused=True)

        return step

    with pyg_dfgnn.local_settings(schedule=schedule):
        found = kernels_of(step_of(conv))
    theirs = kernels_of(step_of(other))
    assert len(found) < len(theirs), "\n".join(found)


class Learnt(pyg.MessagePassing):
    """Sums with norms of weights that are computed in the region of autocast; returns the norms."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(2, 1)

    def forward(self, x, edge_index, edge):
        weight = torch.sigmoid(self.lin(edge)).view(-1)
        edges, norm = gcn_norm(edge_index, weight, x.size(0))
        return self.propagate(edges, x=x, norm=norm), norm

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


@pytest.mark.parametrize("dtype", HALVES)
def test_norms_of_learnt_weights_have_the_dtype_of_pygs(dtype):
    x, edge_index = graph_of(60)
    edge, plain = torch.rand(edge_index.size(1), 2, device="cuda"), Learnt().cuda()
    layer = pyg_dfgnn.accelerate(copy.deepcopy(plain))
    with autocast(dtype):
        own, other = layer(x, edge_index, edge), plain(x, edge_index, edge)
    assert [part.dtype for part in own] == [part.dtype for part in other] and other[1].dtype is dtype
    # A sum of 120 weights in 16 bits, in whatever order.
    torch.testing.assert_close(own[1], other[1], atol=0.1, rtol=0.1)
