"""Linear layers under autocast: x and parameters are cast once, dtypes are PyG's, numbers near float64."""

import pytest
import torch
import torch_geometric.nn as pyg
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn.dense.linear import Linear

import pyg_dfgnn
import pyg_dfgnn.nn as ours
from pyg_dfgnn.nn.projection import project
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.reference.tolerances import assert_all_close, relative_error, tolerance
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


def layers_of(count, bias=True, dtype=torch.float32):
    return [Linear(5, 6, bias=bias).to(dtype) for _ in range(count)]


def apart(x, heads, layers):
    return [layer(x).view(len(x), heads, layer.out_channels // heads) for layer in layers]


def leaves_of(x, layers):
    return [x, *(parameter for layer in layers for parameter in layer.parameters())]


def is_shared(found):
    return {out.grad_fn.name() for out in found} == {"_ProjectionBackward"} and len({out.grad_fn for out in found}) == 1


@pytest.mark.parametrize("cast", HALVES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("rows, most", [(9, 9), (9, 8), (5000, 5000), (0, 9)])
def test_values_and_gradients(cast, bias, count, rows, most, monkeypatch):
    """Of few rows, of many, of more than lie side by side, of none."""
    monkeypatch.setattr(gemm, "MAX_ROWS", most)
    layers, x = layers_of(count, bias), torch.randn(rows, 5, requires_grad=True)
    leaves, grads = leaves_of(x, layers), [torch.randn(rows, 2, 3).to(cast) for _ in layers]
    with autocast(cast):
        found = project(x, 2, *layers)
    assert is_shared(found) and {out.dtype for out in found} == {cast}
    got = torch.autograd.grad(found, leaves, grads)
    assert {grad.dtype for grad in got} == {torch.float32}
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    step = 1 + bias
    made = [
        torch.nn.functional.linear(exact[0], *exact[1 + step * place : 1 + step * (place + 1)]).view(rows, 2, 3)
        for place in range(count)
    ]
    want = torch.autograd.grad(made, exact, [grad.double() for grad in grads])
    named = {f"y{place}": pair for place, pair in enumerate(zip(found, made, strict=True))}
    named |= {f"gradient {place}": pair for place, pair in enumerate(zip(got, want, strict=True))}
    assert_all_close(named, cast)
    with autocast(cast), torch.no_grad():
        assert all(map(torch.equal, project(x, 2, *layers), found))


@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_layers", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [9, 8])
def test_what_is_in_16_bits_already(of_x, of_layers, most, monkeypatch):
    monkeypatch.setattr(gemm, "MAX_ROWS", most)
    layers, x = layers_of(2, dtype=of_layers), torch.randn(9, 5).to(of_x).requires_grad_()
    leaves = leaves_of(x, layers)
    results = []
    for function in (lambda: project(x, 2, *layers), lambda: apart(x, 2, layers)):
        with autocast():
            found = function()
        results.append([*found, *torch.autograd.grad([out.float().square().sum() for out in found], leaves)])
        if len(results) == 1:
            assert is_shared(found)
    for got, want in zip(*results, strict=True):
        assert got.dtype is want.dtype and relative_error(got, want) < tolerance(torch.bfloat16).relative


def test_dtypes_that_autocast_leaves_alone_or_mixes():
    """As F.linear has it: float64 stays, float64 and another are refused, layers of several dtypes are cast apart."""
    x, layers = torch.randn(9, 5), layers_of(2)
    with autocast():
        with pytest.raises(RuntimeError, match="dtype"):
            project(x.double(), 2, *layers)
        with pytest.raises(RuntimeError, match="dtype"):
            project(x, 2, *layers_of(2, dtype=torch.float64))
        found = project(x.double(), 2, *layers_of(2, dtype=torch.float64))
        assert {out.dtype for out in found} == {torch.float64}
        for other in (torch.bfloat16, torch.float16):
            mixed = [layers[0], *layers_of(1, dtype=other)]
            found = project(x, 2, *mixed)
            assert all(map(torch.equal, found, apart(x, 2, mixed)))
        found = project(x.half(), 2, *layers_of(2, dtype=torch.float16))
        assert {out.dtype for out in found} == {torch.bfloat16}


def test_regions():
    """Nested, of another device, without the cache of casts."""
    x, layers = torch.randn(9, 5, requires_grad=True), layers_of(2)
    with autocast(), autocast(enabled=False):
        found = project(x, 2, *layers)
    assert {out.dtype for out in found} == {torch.float32}
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=torch.cuda.is_available()):
        assert {out.dtype for out in project(x, 2, *layers)} == {torch.float32}
    with autocast(cache_enabled=False):
        first = project(x, 2, *layers)
    with autocast():
        again = project(x, 2, *layers)
        with torch.no_grad():
            layers[0].weight.zero_()
            layers[0].bias.zero_()
        # The cache would give the parameter as it was.
        assert not project(x, 2, *layers)[0].any()
    assert is_shared(first) and all(map(torch.equal, first, again))


@pytest.mark.parametrize("most", [9, 8])
@pytest.mark.parametrize("inside", [True, False])
def test_backward_in_a_region(inside, most, monkeypatch):
    """Also where forward was in none."""
    monkeypatch.setattr(gemm, "MAX_ROWS", most)
    x, layers = torch.randn(9, 5, requires_grad=True), layers_of(2)
    leaves = leaves_of(x, layers)
    with autocast(enabled=inside):
        loss = sum(out.float().square().sum() for out in project(x, 2, *layers))
    with autocast():
        found = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(map(torch.equal, found, torch.autograd.grad(loss, leaves)))


def test_what_is_edited_after_forward():
    """Casts are kept, as by PyG's layers; x of 16 bits is kept itself."""
    x, layers = torch.randn(9, 5), layers_of(2)
    results = []
    for edit in (False, True):
        with autocast():
            out = project(x, 2, *layers)
        if edit:
            x.add_(1)
        results.append(torch.autograd.grad(out[0].float().sum(), layers[0].weight)[0])
    assert torch.equal(*results)
    x = x.bfloat16()
    with autocast():
        out = project(x, 2, *layers)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out[0].sum().backward()


@pytest.mark.parametrize("of", ["x", "weight"])
def test_second_derivatives_are_refused(of):
    x, layers = torch.randn(9, 5, requires_grad=True), layers_of(2)
    leaf = x if of == "x" else layers[0].weight
    with autocast():
        out = project(x, 2, *layers)
    (grad,) = torch.autograd.grad(out[0].float().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.square().sum().backward()


def test_gradients_that_are_not_wanted():
    x, layers = torch.randn(9, 5), layers_of(2)
    layers[0].weight.requires_grad_(False)
    layers[1].bias.requires_grad_(False)
    with autocast():
        project(x, 2, *layers)[0].float().sum().backward()
    assert layers[0].bias.grad.dtype is torch.float32
    assert all(p.grad is None for p in (layers[0].weight, layers[1].weight, layers[1].bias))


def test_casts_are_few():
    """Of x and of all parameters; back of the gradients of x, of the weights and of the biases."""
    x, layers = torch.randn(9, 5, requires_grad=True), layers_of(3)
    leaves = leaves_of(x, layers)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as forward, autocast():
        found = project(x, 2, *layers)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as backward:
        torch.autograd.grad(found, leaves, [torch.ones_like(out) for out in found])
    counts = [[event.name for event in profile.events()].count("aten::_to_copy") for profile in (forward, backward)]
    assert counts == [2, 3]


def test_hooked_layers_are_called():
    x, layers, seen = torch.randn(9, 5), layers_of(2), []
    layers[1].register_forward_hook(lambda *_: seen.append(True))
    with autocast():
        found = project(x, 2, *layers)
    assert seen and not is_shared(found)


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


# Convs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["row_split", None])
def schedule(request):
    """Under `row_split` projections lie side by side; small graphs take another, which reads one after the other."""
    with pyg_dfgnn.settings(**({"schedule": request.param} if request.param else {})):
        yield request.param


def build(key):
    name, options = CONVS[key]
    return both(name, FEATURES, 4, dtype=torch.float32, std=0.3, **options)


def names_of(out):
    names, nodes = set(), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes += [each for each, _ in node.next_functions if each is not None]
    return names


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


@over(key=tuple(CONVS), cast=HALVES)
def test_convs(key, cast, schedule):
    conv, other = build(key)
    graph, x = random(ROWS, ROWS, 140), torch.randn(ROWS, FEATURES)
    with emulated_device() as launched:
        found = trained(conv, x, graph.edge_index, cast)
    assert launched
    names = names_of(found["out"])
    if key != "gat":
        assert ("_ProjectedAttentionBackward" in names) == (schedule == "row_split")
        assert ("_ProjectionBackward" in names) == (schedule != "row_split")
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
    with emulated_device(), autocast(), pyg_dfgnn.settings(schedule="row_split"):
        out = conv(x, graph.edge_index)
    assert "_ProjectedAttentionBackward" in names_of(out)
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
        with emulated_device(), autocast(), pyg_dfgnn.settings(schedule="row_split"), torch.no_grad():
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
        with emulated_device(), autocast(torch.bfloat16), pyg_dfgnn.settings(schedule="row_split"):
            out = conv(leaf, graph.edge_index)
            assert "_ProjectedAttentionBackward" in names_of(out) and out.dtype is torch.float32
            assert not torch.equal(out.bfloat16().float(), out)
            loss = edit(out).sin().sum()
            grads.append(torch.autograd.grad(loss, [leaf, *conv.parameters()]))
    assert all(map(torch.equal, *grads))
