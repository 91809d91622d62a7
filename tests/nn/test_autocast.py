"""The convs under autocast: dtypes are PyG's, numbers near float64."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch.utils.checkpoint import checkpoint

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.reference.tolerances import relative_error, tolerance
from pyg_dfgnn.reference.zoo import random
from tests.covering import over
from tests.kernels.emulated import emulated_device
from tests.nn.convs import both

ROWS, FEATURES = 30, 6
HALVES = [torch.bfloat16, torch.float16]
CONVS = {
    "gat": ("GATConv", {"heads": 2}),
    "gatv2": ("GATv2Conv", {"heads": 2, "residual": True}),
    "gatv2_mean": ("GATv2Conv", {"heads": 3, "concat": False}),
    "transformer": ("TransformerConv", {"heads": 2}),
    "transformer_alone": ("TransformerConv", {"heads": 2, "root_weight": False, "bias": False}),
    "transformer_beta": ("TransformerConv", {"heads": 2, "beta": True}),
    "transformer_mean": ("TransformerConv", {"heads": 2, "concat": False}),
}


def autocast(dtype=torch.bfloat16, **options):
    return torch.autocast("cpu", dtype=dtype, **options)


@pytest.fixture(params=["row_split", None])
def schedule(request):
    """`row_split`, and the other one that small graphs take."""
    with pyg_dfgnn.local_settings(**({"schedule": request.param} if request.param else {})):
        yield request.param


def build(key):
    name, options = CONVS[key]
    return both(name, FEATURES, 4, dtype=torch.float32, std=0.3, **options)


def trained(conv, x, edge_index, cast=None, call=lambda conv, *given: conv(*given)):
    x = x.clone().requires_grad_()
    with autocast(cast or torch.bfloat16, enabled=cast is not None):
        out = call(conv, x, edge_index)
    torch.manual_seed(1)
    (out.double() * torch.randn(out.shape)).sum().backward()
    grads = {name: p.grad for name, p in conv.named_parameters() if p.grad is not None}
    return {"out": out, "x": x.grad, **grads}


def compare(found, exact, theirs, cast):
    """No further from float64 than the bound, or than twice what PyG's conv is under autocast."""
    assert found.keys() == exact.keys() == theirs.keys()
    # Softmax does not see the key's bias: its gradient is 0.
    floor = 1e-2 * max(value.norm().item() for name, value in exact.items() if name not in ("out", "x"))
    for name, want in exact.items():
        assert found[name].dtype is theirs[name].dtype, name
        distances = [(each[name].double() - want).norm().item() for each in (found, theirs)]
        bound = tolerance(cast).relative * max(want.norm().item(), floor)
        assert distances[0] <= max(bound, 2 * distances[1]), (name, distances, bound)


@pytest.mark.parametrize("change", [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.randn(4, FEATURES))])
@pytest.mark.parametrize("cast", [False, True])
def test_compiled_layers_are_called(change, cast):
    """TorchScript keeps parameters elsewhere."""
    conv, other = build("transformer")
    for each in (conv, other):
        each.lin_query = change(each.lin_query)
    graph, x = random(ROWS, ROWS, 140), torch.randn(ROWS, FEATURES)
    with emulated_device() as launched, autocast(enabled=cast), torch.no_grad():
        out, want = conv(x, graph.edge_index), other(x, graph.edge_index)
    assert launched and out.dtype is want.dtype and relative_error(out, want) < (1e-2 if cast else 5e-6)


@over(key=tuple(CONVS), cast=HALVES)
def test_convs(key, cast, schedule):
    conv, other = build(key)
    graph, x = random(ROWS, ROWS, 140), torch.randn(ROWS, FEATURES)
    with emulated_device() as launched:
        found = trained(conv, x, graph.edge_index, cast)
    assert launched
    theirs = trained(other, x, graph.edge_index, cast)
    other.zero_grad()
    compare(found, trained(other.double(), x.double(), graph.edge_index), theirs, cast)
    with emulated_device(), autocast(cast), torch.no_grad():
        assert torch.equal(conv(x, graph.edge_index), found["out"])


@pytest.mark.parametrize("key", ["transformer", "gatv2"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(key, reentrant, schedule):
    conv, _ = build(key)
    graph, x = random(ROWS, ROWS, 140), torch.randn(ROWS, FEATURES)
    results = []
    for call in (
        lambda conv, *given: conv(*given),
        lambda conv, *given: checkpoint(conv, *given, use_reentrant=reentrant),
    ):
        with emulated_device():
            results.append({n: v.clone() for n, v in trained(conv, x, graph.edge_index, torch.bfloat16, call).items()})
        conv.zero_grad()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("key", ["transformer", "gatv2"])
@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16])
def test_attention_of_features_in_16_bits_is_not_rounded(key, of_x):
    """No more than of those in float32: autocast has the projections in 16 bits, not the attention."""
    name, options = {"transformer": ("TransformerConv", {"root_weight": False}), "gatv2": ("GATv2Conv", {})}[key]
    conv = getattr(ours, name)(FEATURES, 16, bias=False, **options)
    graph, x = random(ROWS, ROWS, 140), torch.randn(ROWS, FEATURES).to(of_x).requires_grad_()
    with emulated_device(), autocast(), pyg_dfgnn.local_settings(schedule="row_split"):
        out = conv(x, graph.edge_index)
    # On a CPU autocast has PyG's attention of these in 16 bits throughout.
    assert key == "transformer" or not torch.equal(out.float(), out.bfloat16().float())


@pytest.mark.parametrize("key", ["transformer", "gatv2"])
def test_widths_by_turns(key):
    """Kernels that are remembered of one layer are not those of another one, of another width."""
    graph, x = random(ROWS, ROWS, 140), torch.randn(ROWS, FEATURES)
    name, options = CONVS[key]
    for channels in (4, 8, 4):
        conv = getattr(ours, name)(FEATURES, channels, **options)
        other = getattr(pyg, name)(FEATURES, channels, **options)
        other.load_state_dict(conv.state_dict())
        with emulated_device(), autocast(), pyg_dfgnn.local_settings(schedule="row_split"), torch.no_grad():
            found = conv(x, graph.edge_index)
        assert relative_error(found, other(x, graph.edge_index)) < tolerance(torch.bfloat16).relative


@pytest.mark.parametrize("key", ["transformer", "gatv2"])
def test_in_and_out_of_autocast_by_turns(key, schedule):
    """What is remembered of calls like these tells them apart."""
    conv, _ = build(key)
    graph, x = random(ROWS, ROWS, 140), torch.randn(ROWS, FEATURES)
    results = []
    for cast in (None, torch.bfloat16, torch.float16) * 2:
        with emulated_device(), autocast(cast or torch.bfloat16, enabled=cast is not None), torch.no_grad():
            results.append(conv(x, graph.edge_index))
    assert all(map(torch.equal, results[:3], results[3:]))
    exact = results[0]
    assert exact.dtype is torch.float32
    for cast, out in zip(HALVES, results[1:3], strict=True):
        assert 0 < relative_error(out, exact) < tolerance(cast).relative


@pytest.mark.parametrize("concat", [True, False])
def test_the_attention_in_float32_is_not_rounded_and_may_be_edited(concat):
    """With a vector in float32, as for all of autocast on CUDA."""
    conv = ours.GATv2Conv(FEATURES, 16, heads=3, concat=concat, bias=False, add_self_loops=False)
    graph, x = random(ROWS, ROWS, 140), torch.randn(ROWS, FEATURES)
    grads = []
    for edit in (lambda out: out.mul_(2), lambda out: out.mul(2)):
        leaf = x.clone().requires_grad_()
        with emulated_device(), autocast(torch.bfloat16), pyg_dfgnn.local_settings(schedule="row_split"):
            out = conv(leaf, graph.edge_index)
            assert out.dtype is torch.float32
            assert not torch.equal(out.bfloat16().float(), out)
            loss = edit(out).sin().sum()
            grads.append(torch.autograd.grad(loss, [leaf, *conv.parameters()]))
    assert all(map(torch.equal, *grads))
