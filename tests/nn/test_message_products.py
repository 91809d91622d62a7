"""Linear layers that the forward of a compiled layer calls with one tensor: one product, as if each made its own."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing, ResGatedGraphConv, TransformerConv

import pyg_dfgnn
from pyg_dfgnn.reference.tolerances import assert_all_close
from tests.emu.loader import compiler
from tests.kernels.emulated import emulated_device

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no host compiler"),
    pytest.mark.filterwarnings("ignore"),
]
NODES, WIDTH = 9, 8


class Gated(MessagePassing):
    """Three layers of one input, and one of another; `step` is called with each result of the three."""

    def __init__(self, step=None, bias=True):
        super().__init__(aggr="add")
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.step = step or (lambda name, layer, x: getattr(layer, name)(x))

    def forward(self, x, edge_index):
        a, b, c = (self.step(name, self, x) for name in "abc")
        return self.last(self.propagate(edge_index, a=a, b=b, c=c))

    def message(self, a_i, b_j, c_j):
        return torch.sigmoid(a_i + b_j) * c_j


class MyTransformer(TransformerConv):
    """PyG's as a user restates it."""


class MyResGated(ResGatedGraphConv):
    """PyG's as a user restates it; its last layer has no bias."""


@pytest.fixture
def launched():
    with emulated_device() as names, pyg_dfgnn.settings(fallback="silent"):
        yield names


def edges():
    return torch.randint(NODES, (2, 40), generator=torch.Generator().manual_seed(0))


def features(dtype=torch.float32):
    x = torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(1))
    return x.to(dtype).requires_grad_()


def outputs_and_gradients(layer, x):
    layer.zero_grad()
    out = layer(x, edges())
    out.square().sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out, "grad_x": x.grad, **grads}


def check(layer, launched, products, calls=3):
    """Calls of the compiled layer equal PyG's in float64; the last has so many launches of products of several."""
    compiled = pyg_dfgnn.accelerate(copy.deepcopy(layer))
    expected = outputs_and_gradients(copy.deepcopy(layer).double(), features(torch.float64))
    for _ in range(calls):
        launched.clear()
        actual = outputs_and_gradients(compiled, features())
        assert actual.keys() == expected.keys()
        assert_all_close({name: (actual[name], expected[name]) for name in expected}, op="gemm")
    assert launched.count("gemm_forward") == products
    return compiled


@pytest.mark.parametrize(
    ("layer", "products"),
    [
        (Gated(), 1),
        (Gated(bias=False), 1),
        # The gradient of the keys' bias is zero.
        (MyTransformer(WIDTH, WIDTH // 2, heads=2, bias=False), 1),
        (MyResGated(WIDTH, WIDTH), 1),
    ],
    ids=["three", "no bias", "TransformerConv", "ResGatedGraphConv"],
)
def test_equals_pyg(layer, products, launched):
    check(layer, launched, products)


def test_the_drop_in_of_res_gated_has_one_product(launched):
    layer = pyg_dfgnn.nn.ResGatedGraphConv(WIDTH, WIDTH)
    upstream = copy.deepcopy(pyg_dfgnn.restore(copy.deepcopy(layer))).double()
    expected = outputs_and_gradients(upstream, features(torch.float64))
    launched.clear()
    actual = outputs_and_gradients(layer, features())
    assert_all_close({name: (actual[name], expected[name]) for name in expected}, op="gemm")
    assert launched.count("gemm_forward") == 1


def test_layers_of_other_tensors_are_left_alone(launched):
    check(Gated(lambda name, layer, x: getattr(layer, name)(x + 0)), launched, 0)


def test_many_layers_and_two_inputs(launched):
    class Many(Gated):
        def __init__(self):
            super().__init__()
            self.more = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x, edge_index):
            y = x.tanh()
            first, second, third = (layer(x) for layer in self.more)
            a, b, c = self.a(x), self.b(x) + self.b(y), self.c(x) + self.last(y)
            return self.propagate(edge_index, a=a * first, b=b * second, c=c + third)

    # Of the layers that x is given to four share a product, and a fifth and one that is called twice do not.
    check(Many(), launched, 1)


def add_to_the_result(name, layer, x):
    return getattr(layer, name)(x).mul_(2).relu_()


def edit_the_input(name, layer, x):
    rows = getattr(layer, name)(x)
    with torch.no_grad():
        x.mul_(1.0)
    return rows


def edit_a_weight(name, layer, x):
    rows = getattr(layer, name)(x)
    with torch.no_grad():
        layer.b.bias.add_(1.0 if name == "a" else 0.0)
        layer.b.bias.sub_(0.0 if name == "a" else 1.0 if name == "b" else 0.0)
    return rows


def replace_a_weight(name, layer, x):
    if name == "c":
        layer.c.weight = nn.Parameter(layer.c.weight.detach() * 1.0)
    return getattr(layer, name)(x)


def without_gradient(name, layer, x):
    with torch.set_grad_enabled(name != "b"):
        return getattr(layer, name)(x)


@pytest.mark.parametrize("step", [add_to_the_result, without_gradient])
def test_what_users_do_with_results(step, launched):
    check(Gated(step), launched, 1)


@pytest.mark.parametrize("step", [edit_a_weight, replace_a_weight])
def test_a_changed_parameter_is_seen(step, launched):
    layer = Gated(step)
    compiled = pyg_dfgnn.accelerate(copy.deepcopy(layer))
    upstream = copy.deepcopy(layer).double()
    for _ in range(3):
        with torch.no_grad():
            actual, expected = compiled(features(), edges()), upstream(features(torch.float64), edges())
        assert_all_close({"out": (actual, expected)}, op="gemm")


def test_an_edited_input_is_seen(launched):
    """Without gradients, since torch refuses to differentiate after such an edit."""

    def step(name, layer, x):
        return getattr(layer, name)(x if name == "a" else x.add_(1.0))

    layer = Gated(step)
    compiled = pyg_dfgnn.accelerate(copy.deepcopy(layer))
    for _ in range(3):
        with torch.no_grad():
            actual = compiled(features().detach().clone(), edges())
            expected = copy.deepcopy(layer).double()(features(torch.float64).detach().clone(), edges())
        assert_all_close({"out": (actual, expected)}, op="gemm")


def test_a_branch_that_leaves_a_layer_out(launched):
    """The layer has no gradient, as without us, and computes its own once it is called again."""

    def step(name, layer, x):
        return x if name == "c" and layer.leaves_out else getattr(layer, name)(x)

    layer = Gated(step)
    layer.leaves_out = False
    compiled = check(layer, launched, 1)
    for leaves_out in (True, True, False):
        layer.leaves_out = compiled.leaves_out = leaves_out
        actual = outputs_and_gradients(compiled, features())
        expected = outputs_and_gradients(copy.deepcopy(layer).double(), features(torch.float64))
        compiled.zero_grad(set_to_none=True)
        assert actual.keys() == expected.keys() and ("c.weight" in actual) is not leaves_out
        assert_all_close({name: (actual[name], expected[name]) for name in expected}, op="gemm")


def test_a_layer_that_is_replaced_and_one_that_is_watched(launched):
    compiled = check(Gated(), launched, 1)
    seen = []
    compiled.b.register_forward_hook(lambda module, args, out: seen.append(out.detach().clone()))
    compiled.c = pyg_dfgnn.accelerate(nn.Linear(WIDTH, WIDTH))
    upstream = copy.deepcopy(pyg_dfgnn.restore(copy.deepcopy(compiled))).double()
    expected = outputs_and_gradients(upstream, features(torch.float64))
    seen.clear()
    actual = outputs_and_gradients(compiled, features())
    assert_all_close({name: (actual[name], expected[name]) for name in expected}, op="gemm")
    assert_all_close({"b": (seen[0], compiled.b(features()))}, op="gemm")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_repeat_the_first_call(use_reentrant, launched):
    layer = Gated()
    expected = outputs_and_gradients(copy.deepcopy(layer).double(), features(torch.float64))
    compiled = pyg_dfgnn.accelerate(copy.deepcopy(layer))
    for _ in range(3):
        compiled.zero_grad()
        x = features()
        out = checkpoint(compiled, x, edges(), use_reentrant=use_reentrant)
        out.square().sum().backward()
        grads = {name: p.grad for name, p in compiled.named_parameters()}
        actual = {"out": out, "grad_x": x.grad, **grads}
        assert_all_close({name: (actual[name], expected[name]) for name in expected}, op="gemm")


def test_second_derivatives_where_the_messages_are_pygs(launched):
    """A penalty on gradients of a layer whose messages no kernel takes."""

    class Hidden(Gated):
        def message(self, a_i, b_j, c_j):
            return torch.sigmoid(a_i + b_j) * c_j * (1.0 if float(c_j.sum()) > -1e9 else 0.0)

        def aggregate(self, inputs, index):
            return inputs.new_zeros(NODES, WIDTH).index_add(0, index, inputs)

    layer = Hidden()
    compiled = pyg_dfgnn.accelerate(copy.deepcopy(layer))
    compiled(features(), edges())
    launched.clear()
    pairs = []
    for module, x in ((compiled, features()), (copy.deepcopy(layer).double(), features(torch.float64))):
        (grad,) = torch.autograd.grad(module(x, edges()).square().sum(), [x], create_graph=True)
        pairs.append(torch.autograd.grad(grad.square().sum(), [x, *module.parameters()], allow_unused=True))
    assert "gemm_forward" in launched
    named = zip(("x", *(name for name, _ in layer.named_parameters())), zip(*pairs, strict=True))
    assert_all_close({name: pair for name, pair in named if None not in pair}, op="gemm")


@pytest.mark.parametrize("turned_off", ["setting", "autocast"])
def test_turned_off(turned_off, launched):
    compiled = check(Gated(), launched, 1)
    launched.clear()
    off = (
        pyg_dfgnn.settings(compile_messages=False)
        if turned_off == "setting"
        else torch.autocast("cpu", dtype=torch.bfloat16)
    )
    with off:
        compiled(features(), edges())
    assert "gemm_forward" not in launched
