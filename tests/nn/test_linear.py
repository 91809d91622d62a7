"""The drop-ins for linear layers, PyG's and torch's: results and gradients, and what they leave to their origin."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize
import torch.nn.utils.prune
import torch_geometric.nn as pyg
from torch_geometric.nn import MLP, ClusterGCNConv, dense

import pyg_dfgnn
from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.nn import Linear
from pyg_dfgnn.nn.dense import TorchLinear
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.reference.tolerances import assert_all_close
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device

pytestmark = needs_compiler


UPSTREAM = {Linear: dense.Linear, TorchLinear: torch.nn.Linear}


@pytest.fixture(params=UPSTREAM, ids=["pyg", "torch"])
def kind(request):
    """Each drop-in."""
    return request.param


@pytest.fixture
def small_is_large(monkeypatch):
    """Products of any size go to the kernels."""
    monkeypatch.setattr(gemm, "SMALL_PRODUCT", 0)
    monkeypatch.setattr(
        gemm, "_kernel_is_faster", lambda rows, features, channels, device: not (features | channels) % 4
    )


@pytest.fixture
def launched(small_is_large):
    """CPU tensors take the fused path; the names of the kernels launched so far."""
    with emulated_device() as names:
        yield names


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 70])
def test_values_and_gradients(rows, bias, kind, launched):
    layer, x = kind(8, 12, bias=bias), torch.randn(rows, 8, requires_grad=True)
    grad = torch.randn(rows, 12)
    leaves = [x, *layer.parameters()]
    out = layer(x)
    own = torch.autograd.grad(out, leaves, grad)
    assert launched == ["gemm_forward", "gemm_backward"]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = F.linear(*exact)
    grads = torch.autograd.grad(want, exact, grad.double())
    pairs = zip(("x", "weight", "bias"), zip(own, grads, strict=True))
    assert_all_close({"out": (out, want), **dict(pairs)}, op="gemm")
    with torch.no_grad():
        assert torch.equal(layer(x), out)
    layer.requires_grad_(False)
    (alone,) = torch.autograd.grad(layer(x), [x], grad)
    assert torch.equal(alone, own[0])


def test_arguments_are_those_of_the_layer(kind, launched):
    assert inspect.signature(kind) == inspect.signature(UPSTREAM[kind])
    assert list(inspect.signature(kind.forward).parameters) == list(
        inspect.signature(UPSTREAM[kind].forward).parameters
    )
    layer, x = kind(8, 12), torch.randn(9, 8)
    name = "input" if kind is TorchLinear else "x"
    assert torch.equal(layer(**{name: x}), layer(x)) and len(launched) == 2
    plans = [str(pyg_dfgnn.describe_plan(layer, *args, **kwargs)) for args, kwargs in (((x,), {}), ((), {name: x}))]
    assert plans[0] == plans[1]


def test_restored_and_parametrized(kind):
    """A parametrization that is taken off after `restore` leaves the layer that there was."""
    layer = UPSTREAM[kind](8, 12)
    pyg_dfgnn.accelerate(layer)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Identity())
    x = torch.randn(9, 8)
    expected = layer(x)
    pyg_dfgnn.restore(layer)
    assert torch.equal(layer(x), expected) and not isinstance(layer, kind)
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is UPSTREAM[kind]


@pytest.mark.parametrize("strided", [False, True])
def test_second_derivatives(strided, kind, launched):
    """A penalty on gradients, whatever made the product."""
    layer, x = kind(8, 12), torch.randn(9, 8)
    x = (x.t().contiguous().t() if strided else x).requires_grad_()
    assert x.is_contiguous() is not strided
    pairs, exact = [], copy.deepcopy(layer).double()
    for module, leaf in ((layer, x), (exact, x.detach().double().requires_grad_())):
        (grad,) = torch.autograd.grad(module(leaf).square().sum(), [leaf], create_graph=True)
        pairs.append(torch.autograd.grad(grad.square().sum(), [leaf, *module.parameters()]))
    assert bool(launched) is not strided
    assert_all_close({str(i): pair for i, pair in enumerate(zip(*pairs, strict=True))}, op="gemm")


def test_batched_gradients(kind, launched):
    layer, x = kind(8, 12), torch.randn(9, 8, requires_grad=True)
    grads = torch.randn(5, 9, 12)
    batched = torch.autograd.grad(layer(x), [x, *layer.parameters()], grads, is_grads_batched=True)
    apart = [torch.autograd.grad(layer(x), [x, *layer.parameters()], grad) for grad in grads]
    for together, others in zip(batched, zip(*apart, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(others))


def pruned(kind):
    layer = kind(8, 12)
    torch.nn.utils.prune.l1_unstructured(layer, "weight", 0.5)
    return layer


def with_bias(kind, bias):
    layer = kind(8, 12)
    layer.bias = torch.nn.Parameter(bias)
    return layer


# A layer and an input: three dimensions, sizes that no kernel takes, other dtypes, sparse rows, weights kept elsewhere.
LEFT = {
    "dimensions": lambda kind: (kind(8, 12), torch.randn(2, 9, 8)),
    "a vector": lambda kind: (kind(8, 12), torch.randn(8)),
    "features": lambda kind: (kind(6, 12), torch.randn(9, 6)),
    "channels": lambda kind: (kind(8, 3), torch.randn(9, 8)),
    "no rows": lambda kind: (kind(8, 12), torch.randn(0, 8)),
    "float64": lambda kind: (kind(8, 12).double(), torch.randn(9, 8).double()),
    "bfloat16": lambda kind: (kind(8, 12).bfloat16(), torch.randn(9, 8).bfloat16()),
    "sparse": lambda kind: (kind(8, 12), torch.randn(9, 8).to_sparse_csr()),
    "pruned": lambda kind: (pruned(kind), torch.randn(9, 8)),
    "a bias of one": lambda kind: (with_bias(kind, torch.randn(1)), torch.randn(9, 8)),
    "strides": lambda kind: (kind(8, 12), torch.randn(8, 9).t()),
}


@pytest.mark.parametrize("key", LEFT)
def test_what_torch_takes(key, kind, launched):
    layer, x = LEFT[key](kind)
    out = layer(x)
    assert launched == [] and torch.equal(out, UPSTREAM[kind].forward(layer, x))


def test_small_products_are_torchs():
    with emulated_device() as launched:
        for kind in UPSTREAM:
            kind(8, 12)(torch.randn(9, 8))
        assert launched == []
        x = torch.empty(gemm.SMALL_PRODUCT >> 14, 128)
        assert gemm.kernel_is_faster(x, 132) and not gemm.kernel_is_faster(x, 128)
        # Torch takes widths that no warpgroup takes.
        assert not gemm.kernel_is_faster(x, 1024)


@pytest.mark.parametrize(("tf32", "cast"), [(True, False), (False, True)], indirect=["tf32"])
def test_rounded_products_are_torchs(tf32, cast, kind, launched):
    layer, x = kind(8, 12), torch.randn(9, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        out = layer(x)
        assert out.dtype is (torch.bfloat16 if cast else torch.float32)
        assert torch.equal(out, UPSTREAM[kind].forward(layer, x))
    assert launched == []


def test_torch_compile_sees_the_layer(kind, launched):
    layer, x, functions = kind(8, 12), torch.randn(9, 8), []

    def record(module, inputs):
        functions.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    torch.testing.assert_close(torch.compile(layer, backend=record, fullgraph=True)(x), layer(x))
    assert functions == [F.linear]


def test_torch_func(kind, launched):
    layer, x = kind(8, 12), torch.randn(9, 8)
    jacobian = torch.func.vmap(torch.func.jacrev(layer))(x)
    assert launched == [] and torch.equal(jacobian, layer.weight.expand(9, 12, 8))


def test_script(kind, launched, caplog, forget_logged):
    layer, x = torch.nn.Sequential(kind(8, 12), torch.nn.ReLU()), torch.randn(9, 8)
    scripted = torch.jit.script(layer)
    # torch.jit puts the class that it compiles into the model, and the user is told.
    assert type(layer[0]) is UPSTREAM[kind] and "torch.jit.script" in caplog.text
    assert scripted.state_dict().keys() == layer.state_dict().keys()
    torch.testing.assert_close(scripted(x), layer(x))


@pytest.mark.parametrize("name", ["Linear", "HeteroLinear", "HeteroDictLinear"])
def test_script_where_a_drop_in_has_taken_the_name_of_pygs_class(name, monkeypatch):
    ours = getattr(pyg_dfgnn.nn, name)
    make = {
        "Linear": lambda: (ours(8, 12), torch.randn(9, 8)),
        "HeteroLinear": lambda: (ours(8, 12, 3), torch.randn(9, 8), torch.arange(9) % 3),
        "HeteroDictLinear": lambda: (ours({"a": 8, "b": 4}, 12), {"a": torch.randn(9, 8), "b": torch.randn(2, 4)}),
    }
    # TorchScript reads no function that fills new tensors with NaN.
    monkeypatch.undo()
    monkeypatch.setattr(dense, name, ours)
    layer, *inputs = make[name]()
    torch.testing.assert_close(torch.jit.script(layer)(*inputs), layer(*inputs))


def test_script_of_a_subclass():
    class Positive(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight, self.bias).relu()

    layer, x = torch.nn.Sequential(Positive(8, 12)), torch.randn(9, 8)
    assert torch.equal(torch.jit.script(layer)(x), layer(x))


def test_a_device_without_kernels(monkeypatch):
    """No CuPy, or an old GPU: the layer leaves the product to torch."""
    from pyg_dfgnn.dispatch import core

    device = torch.device("cuda", 0)
    for has_cupy, capability in ((False, (9, 0)), (True, (7, 5)), (True, (9, 0))):
        core.runs_on.cache_clear()
        gemm._kernel_is_faster.cache_clear()
        monkeypatch.setattr(core, "_HAS_CUPY", has_cupy)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, own=capability: own)
        monkeypatch.setitem(gpu.known, device, gpu.H200)
        assert gemm._kernel_is_faster(100_000, 128, 128, device) is (has_cupy and capability >= (8, 0))
    core.runs_on.cache_clear()
    gemm._kernel_is_faster.cache_clear()


TRACED = {
    "fx": torch.fx.symbolic_trace,
    "jit": lambda layer: torch.jit.trace(layer, torch.randn(9, 8), check_trace=False),
}


@pytest.mark.parametrize("key", TRACED)
def test_trace(key, kind, launched):
    layer, x = kind(8, 12), torch.randn(9, 8)
    traced = TRACED[key](layer)
    assert launched == []
    torch.testing.assert_close(traced(x), layer(x))


def test_lazy_hooks_and_copies(kind, launched):
    """A layer that takes its features from its first input, one with hooks, copies."""
    x, seen = torch.randn(9, 8), []
    layer = kind(-1 if kind is Linear else 8, 12)
    layer.register_forward_hook(lambda *_: seen.append("hook"))
    assert layer(x).shape == (9, 12) and layer.weight.shape == (12, 8) and seen == ["hook"]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(kind(8, 12)))):
        assert type(other) is kind
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(x), layer(x))
    assert set(launched) <= {"gemm_forward"} and len(launched) >= 4


class OwnConv(ClusterGCNConv):
    """A conv that has no drop-in."""


def test_accelerate(launched):
    """Layers of a model, those in convs too, and the messages of other convs."""
    model = torch.nn.ModuleDict(
        {"mlp": MLP([8, 12, 4], norm=None), "conv": OwnConv(8, 12), "torch": torch.nn.Linear(8, 4)}
    )
    x, edges = torch.randn(9, 8), torch.randint(9, (2, 20))
    with torch.no_grad():
        plain = copy.deepcopy(model)
        expected = model["mlp"](x), model["conv"](x, edges), model["torch"](x)
        pyg_dfgnn.accelerate(model)
        assert [type(layer) for layer in (*model["mlp"].lins, model["conv"].lin_out)] == [Linear] * 3
        assert type(model["torch"]) is TorchLinear and type(model["conv"]) is OwnConv
        torch.testing.assert_close((model["mlp"](x), model["conv"](x, edges), model["torch"](x)), expected)
    # Messages that are sums of sources run on the kernels of aggregations.
    assert sorted(launched) == [*["gemm_forward"] * 5, "segment_forward"]
    assert repr(model) == repr(plain)
    for own, before in zip(pyg_dfgnn.restore(model).modules(), plain.modules(), strict=True):
        assert type(own) is type(before)


def test_inside_a_drop_in(launched):
    """Projections of a conv whose layers are drop-ins themselves."""
    conv, x, edges = pyg_dfgnn.nn.TransformerConv(8, 4, 2), torch.randn(9, 8), torch.randint(9, (2, 20))
    with torch.no_grad():
        expected = conv(x, edges)
        assert launched
        before = [*launched]
        launched.clear()
        pyg_dfgnn.accelerate(conv)
        assert type(conv.lin_query) is Linear and torch.equal(conv(x, edges), expected) and launched == before


def test_layers_that_a_conv_makes_take_the_kernel_and_those_of_the_user_stay(launched):
    own = torch.nn.Sequential(torch.nn.Linear(8, 8), dense.Linear(8, 4))
    conv, plain = pyg_dfgnn.nn.GINEConv(own, edge_dim=3), pyg.GINEConv(copy.deepcopy(own), edge_dim=3)
    assert type(conv.lin) is Linear and [type(layer) for layer in conv.nn] == [torch.nn.Linear, dense.Linear]
    assert repr(conv) == repr(plain)
    assert inspect.signature(type(conv)) == inspect.signature(type(plain))

    class Own(pyg_dfgnn.nn.GCNConv):
        def __init__(self, hidden, *, more=1):
            super().__init__(hidden, hidden)

    class Same(pyg_dfgnn.nn.GCNConv):
        """With the constructor of its base."""

    assert str(inspect.signature(Own)) == "(hidden, *, more=1)"
    assert inspect.signature(Same) == inspect.signature(pyg.GCNConv)
    conv, plain = pyg_dfgnn.nn.ResGatedGraphConv(8, 4), pyg.ResGatedGraphConv(8, 4)
    conv.load_state_dict(plain.state_dict())
    x, edges = torch.randn(9, 8), torch.randint(9, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(conv(x, edges), plain(x, edges))
    assert "gemm_forward" in launched
    assert [type(layer) for layer in pyg_dfgnn.restore(conv).modules()] == [type(layer) for layer in plain.modules()]
