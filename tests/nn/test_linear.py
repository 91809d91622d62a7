"""Linear layers, PyG's and torch's: torch's products unless kernels are asked for, and what these leave to torch."""

import copy
import inspect
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize
import torch.nn.utils.prune
import torch_geometric.nn as pyg
from torch_geometric.nn import MLP, ClusterGCNConv, dense

import pyg_dfgnn
from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.nn.dense.linear import Linear
from pyg_dfgnn.nn.dense.torch_linear import Linear as TorchLinear
from pyg_dfgnn.nn.projection import project
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.reference.tolerances import assert_all_close
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device, small_gemm

pytestmark = needs_compiler


UPSTREAM = {Linear: dense.Linear, TorchLinear: torch.nn.Linear}


@pytest.fixture(params=UPSTREAM, ids=["pyg", "torch"])
def kind(request):
    """Each drop-in."""
    return request.param


FORWARD, BACKWARD = ["gemm_forward_strips"], ["gemm_forward_strips", "gemm_weight_grad"]


@pytest.fixture
def launched():
    """Products of any size go to the kernels, CPU tensors take the fused path; names of the kernels launched so far."""
    with small_gemm(), emulated_device() as names:
        yield names


def accelerated(model):
    """The model with kernels in its linear layers."""
    with pyg_dfgnn.local_settings(linear="kernels"):
        return pyg_dfgnn.accelerate(model)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 70])
def test_values_and_gradients(rows, bias, kind, launched):
    layer, x = kind(8, 12, bias=bias), torch.randn(rows, 8, requires_grad=True)
    grad = torch.randn(rows, 12)
    leaves = [x, *layer.parameters()]
    out = layer(x)
    own = torch.autograd.grad(out, leaves, grad)
    assert launched == FORWARD + BACKWARD
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
    layer = accelerated(UPSTREAM[kind](8, 12))
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Identity())
    x = torch.randn(9, 8)
    expected = layer(x)
    pyg_dfgnn.restore(layer)
    assert torch.equal(layer(x), expected) and not isinstance(layer, kind)
    torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is UPSTREAM[kind]


def test_second_derivatives(kind, launched):
    """A penalty on gradients."""
    layer, x = kind(8, 12), torch.randn(9, 8, requires_grad=True)
    pairs, exact = [], copy.deepcopy(layer).double()
    for module, leaf in ((layer, x), (exact, x.detach().double().requires_grad_())):
        (grad,) = torch.autograd.grad(module(leaf).square().sum(), [leaf], create_graph=True)
        pairs.append(torch.autograd.grad(grad.square().sum(), [leaf, *module.parameters()]))
    assert launched
    assert_all_close({str(i): pair for i, pair in enumerate(zip(*pairs, strict=True))}, op="gemm")


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


@pytest.mark.parametrize("name", ["HeteroLinear", "HeteroDictLinear"])
def test_script_where_a_drop_in_has_taken_the_name_of_pygs_class(name, monkeypatch):
    ours = getattr(pyg_dfgnn.nn, name)
    make = {
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
    """No CuPy, or another GPU: the layer leaves the product to torch."""
    from pyg_dfgnn.dispatch import core

    device = torch.device("cuda", 0)
    for has_cupy, capability in ((False, (9, 0)), (True, (8, 0)), (True, (9, 0))):
        core.runs_on.cache_clear()
        gemm._has_kernels.cache_clear()
        monkeypatch.setattr(core, "_HAS_CUPY", has_cupy)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, own=capability: own)
        monkeypatch.setitem(gpu.known, device, replace(gpu.H200, capability=capability))
        assert gemm._has_kernels(1, 100_000, 128, 128, device) is (has_cupy and capability == (9, 0))
    core.runs_on.cache_clear()
    gemm._has_kernels.cache_clear()


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
    assert set(launched) == {*FORWARD} and len(launched) >= 4


class OwnConv(ClusterGCNConv):
    """A conv that has no drop-in."""


MODEL = {
    "mlp": lambda: MLP([8, 12, 4], norm=None),
    "conv": lambda: OwnConv(8, 12),
    "torch": lambda: torch.nn.Linear(8, 4),
}


def test_linear_layers_are_left_alone(launched):
    """By `accelerate`, by constructors of drop-ins, and in the table of layers."""
    model = torch.nn.ModuleDict({name: make() for name, make in MODEL.items()} | {"gat": pyg.GATConv(8, 4)})
    before = [type(layer) for layer in model.modules() if "Linear" in type(layer).__name__]
    pyg_dfgnn.accelerate(model)
    assert [type(layer) for layer in model.modules() if "Linear" in type(layer).__name__] == before
    assert [row.name for row in pyg_dfgnn.report(model)] == ["conv", "conv.aggr_module", "gat"]
    assert {type(pyg_dfgnn.nn.ResGatedGraphConv(8, 4).lin_key), pyg_dfgnn.nn.Linear} == {dense.Linear}
    x, edges = torch.randn(9, 8, requires_grad=True), torch.randint(9, (2, 20))
    (model["mlp"](x).sum() + model["torch"](x).sum() + model["gat"](x, edges).sum()).backward()
    assert launched and not any(name.startswith("gemm") for name in launched)
    assert "no layer that passes messages" in str(pyg_dfgnn.describe_plan(torch.nn.Linear(8, 4), x))


def test_accelerate_with_kernels(launched):
    """Layers of a model, those in convs too, and the messages of other convs."""
    model = torch.nn.ModuleDict({name: make() for name, make in MODEL.items()})
    x, edges = torch.randn(9, 8), torch.randint(9, (2, 20))
    with torch.no_grad():
        plain = copy.deepcopy(model)
        expected = model["mlp"](x), model["conv"](x, edges), model["torch"](x)
        accelerated(model)
        assert [type(layer) for layer in (*model["mlp"].lins, model["conv"].lin_out)] == [Linear] * 3
        assert type(model["torch"]) is TorchLinear and type(model["conv"]) is OwnConv
        torch.testing.assert_close((model["mlp"](x), model["conv"](x, edges), model["torch"](x)), expected)
    # Messages that are sums of sources run on the kernels of aggregations, beside them products are torch's.
    assert sorted(launched) == [*FORWARD * 3, "segment_forward"]
    assert repr(model) == repr(plain) and model.state_dict().keys() == plain.state_dict().keys()
    assert [row.name for row in pyg_dfgnn.report(model) if row.state == "drop-in"][:2] == ["mlp.lins.0", "mlp.lins.1"]
    for own, before in zip(pyg_dfgnn.restore(model).modules(), plain.modules(), strict=True):
        assert type(own) is type(before)


@pytest.mark.parametrize(
    ("name", "joined"), [("TransformerConv", 4), ("GATv2Conv", 2), ("ResGatedGraphConv", 3), ("GATConv", 1)]
)
def test_projections_of_a_conv(name, joined, launched):
    """With kernels those of one input and shape are one launch forward and two backward; hooks are called as ever."""
    conv, x, edges = getattr(pyg, name)(8, 12), torch.randn(9, 8), torch.randint(9, (2, 20))
    oracle, results = copy.deepcopy(conv).double(), []
    accelerated(conv)
    for module, leaf in ((conv, x.requires_grad_()), (oracle, x.detach().double().requires_grad_())):
        out = module(leaf, edges)
        grads = torch.autograd.grad(out.square().sum(), [leaf, *module.parameters()])
        results.append({"out": out, **dict(zip(["x", *dict(module.named_parameters())], grads, strict=True))})
    # Softmax does not see the key's bias: its gradient is 0.
    assert_all_close(
        {key: (results[0][key], results[1][key]) for key in results[0] if key != "lin_key.bias"}, op="gemm"
    )
    linears = [layer for layer in conv.children() if isinstance(layer, Linear)]
    launches = 1 + len(linears) - joined
    assert sum(each.startswith("gemm") for each in launched) == 3 * launches
    seen = []
    linears[0].register_forward_hook(lambda *_: seen.append("hook"))
    launched.clear()
    conv(x, edges)
    assert seen == ["hook"] and launched.count(*FORWARD) == len(linears)


def drawn(count, bias=True, out=12, kind=Linear):
    return [kind(8, out, bias=bias) for _ in range(count)]


def test_what_is_projected_layer_by_layer(launched):
    """Other shapes, a bias here and there, subclasses, layers that nobody has accelerated, weights kept elsewhere."""

    class Other(Linear):
        pass

    replaced, moved = drawn(2), drawn(2)
    replaced[1].forward = lambda x: x.new_zeros(9, 12)
    moved[1].double()
    x = torch.randn(9, 8)
    cases = [
        [*drawn(1), *drawn(1, out=16)],
        [*drawn(1), *drawn(1, bias=False)],
        [*drawn(1, bias=False), *drawn(1)],
        [*drawn(1), Other(8, 12)],
        [*drawn(1), *drawn(1, kind=dense.Linear)],
        [*drawn(1), Linear(-1, 12)],
        [*drawn(1), pruned(Linear)],
        drawn(5),
        replaced,
    ]
    for layers in cases:
        launched.clear()
        found = project(x, *layers)
        assert all(map(torch.equal, found, [layer(x) for layer in layers]))
        assert launched == launched[: len(launched) // 2] * 2
    with pytest.raises(RuntimeError, match="dtype"):
        project(x, *moved)


def test_a_bias_of_another_width_is_refused(launched):
    layers = drawn(2)
    layers[1].bias = torch.nn.Parameter(torch.randn(5))
    with pytest.raises(RuntimeError, match="size"):
        project(torch.randn(9, 8), *layers)


def test_layers_of_the_user_stay(launched):
    own = torch.nn.Sequential(torch.nn.Linear(8, 8), dense.Linear(8, 4))
    conv, plain = pyg_dfgnn.nn.GINEConv(own, edge_dim=3), pyg.GINEConv(copy.deepcopy(own), edge_dim=3)
    assert [type(layer) for layer in conv.modules()][1:] == [type(layer) for layer in plain.modules()][1:]
    assert repr(conv) == repr(plain)

    class Own(pyg_dfgnn.nn.GCNConv):
        def __init__(self, hidden, *, more=1):
            super().__init__(hidden, hidden)

    assert str(inspect.signature(Own)) == "(hidden, *, more=1)"
    assert inspect.signature(pyg_dfgnn.nn.GCNConv) == inspect.signature(pyg.GCNConv)
