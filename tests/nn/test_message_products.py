"""Linear layers that the forward of a compiled layer calls with one tensor: one product, as if each made its own."""

import copy
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing, ResGatedGraphConv, TransformerConv

import pyg_dfgnn
from pyg_dfgnn.nn.projection import project
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.reference.tolerances import assert_all_close
from tests.emu import needs_compiler
from tests.nn.message_forwards import NODES, WIDTH, Functions, compiled_calls, edges, features, outputs_and_gradients

pytestmark = [
    needs_compiler,
    pytest.mark.filterwarnings("ignore"),
]


def three(layer, x):
    """The three results, one after the other."""
    return [getattr(layer, name)(x) for name in "abc"]


class Gated(MessagePassing):
    """Three layers of one input, and one of another."""

    def __init__(self, bias=True):
        super().__init__(aggr="add")
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index):
        a = self.a(x)
        a *= 2
        return self.last(self.propagate(edge_index, a=a, b=self.b(x).relu(), c=self.c(x).view(-1, WIDTH)))

    def message(self, a_i, b_j, c_j):
        return torch.sigmoid(a_i + b_j) * c_j


class Stepped(Gated):
    """`step` (layer, x) gives the three results: what it does to tensors is not known."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def forward(self, x, edge_index):
        a, b, c = self.step(self, x)
        return self.last(self.propagate(edge_index, a=a, b=b, c=c))


class MyTransformer(TransformerConv):
    """PyG's as a user restates it."""


class MyResGated(ResGatedGraphConv):
    """PyG's as a user restates it; its last layer has no bias."""


def check(layer, launched, products):
    """Calls of the compiled layer equal PyG's in float64; the last has so many launches of products of several."""
    compiled, counts = compiled_calls(layer, launched)
    assert counts[-1]["gemm_forward"] == products
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
    class Copies(Gated):
        def forward(self, x, edge_index):
            return self.last(self.propagate(edge_index, a=self.a(x + 0), b=self.b(x + 0), c=self.c(x + 0)))

    check(Copies(), launched, 0)


def test_many_layers_and_two_inputs(launched):
    class Many(Gated):
        def __init__(self):
            super().__init__()
            self.more = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x, edge_index):
            y = x.tanh()
            first, second, third = self.more[0](x), self.more[1](x), self.more[2](x)
            a, b, c = self.a(x), self.b(x) + self.b(y), self.c(x) + self.last(y)
            return self.propagate(edge_index, a=a * first, b=b * second, c=c + third)

    # Of the layers that x is given to four share a product, and a fifth and one that is called twice do not.
    check(Many(), launched, 1)


def edit_results(layer, x):
    return [rows.mul_(2).relu_() for rows in three(layer, x)]


def without_gradient(layer, x):
    with torch.no_grad():
        b = layer.b(x)
    return layer.a(x), b, layer.c(x)


def with_autocast_for_one(layer, x):
    a = layer.a(x)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=x.dtype is torch.float32):
        b = layer.b(x)
    assert b.dtype is (torch.bfloat16 if x.dtype is torch.float32 else x.dtype)
    return a, b.detach().to(x.dtype) * 0, layer.c(x)


def clamp_through_data(layer, x):
    results = []
    for name in "abc":
        linear = getattr(layer, name)
        linear.weight.data.mul_(1.25)
        results.append(linear(x))
        linear.weight.data.div_(1.25)
    return results


def checkpoint_one(layer, x):
    return layer.a(x), checkpoint(lambda x: layer.b(x).relu() * 2, x, use_reentrant=False), layer.c(x)


def freeze_one(layer, x):
    layer.c.requires_grad_(False)
    results = three(layer, x)
    layer.c.requires_grad_(True)
    assert results[0].requires_grad
    return results


def differentiate_one(layer, x):
    a, b, c = three(layer, x)
    (grad,) = torch.autograd.grad(a.square().sum(), x)
    return a.detach() + grad, b, c


def keep_one(layer, x):
    results = three(layer, x)
    layer.kept = results[0]
    return results


STEPS = [
    edit_results,
    without_gradient,
    with_autocast_for_one,
    clamp_through_data,
    checkpoint_one,
    freeze_one,
    differentiate_one,
    keep_one,
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_what_users_do(step, launched):
    """Code that is not known has single products."""
    check(Stepped(step), launched, 0)


class Branch(Gated):
    """Leaves one layer out, or none."""

    def __init__(self):
        super().__init__()
        self.leaves = ""

    def forward(self, x, edge_index):
        b = x if self.leaves == "b" else self.b(x)
        c = x if self.leaves == "c" else self.c(x)
        return self.last(self.propagate(edge_index, a=self.a(x), b=b, c=c))


def test_a_layer_that_is_not_known_asks_no_forward_around_it(launched):
    """Nor does one with hooks of messages."""
    inner = pyg_dfgnn.accelerate(Stepped(clamp_through_data))
    wide = copy.deepcopy(inner).double()

    class Around(Gated):
        def update(self, inputs):
            return (inner if inputs.dtype is torch.float32 else wide)(inputs, edges())

    check(Around(), launched, 1)
    hooked = pyg_dfgnn.accelerate(Gated())
    hooked.register_propagate_forward_pre_hook(lambda *_: None)
    for _ in range(3):
        launched.clear()
        hooked(features(), edges())
    assert "gemm_forward" not in launched


class TwoResults(Gated):
    """Each result has a backward pass of its own."""

    def forward(self, x, edge_index):
        return self.a(x), self.b(x)


def test_results_that_are_differentiated_one_by_one(launched):
    layer = TwoResults()
    compiled, upstream = pyg_dfgnn.accelerate(copy.deepcopy(layer)), layer.double()
    for _ in range(3):
        for module, dtype in ((compiled, torch.float32), (upstream, torch.float64)):
            for out in module(features(dtype).detach(), edges()):
                out.sum().backward()
        named = {name: (p.grad, q.grad) for (name, p), q in zip(compiled.named_parameters(), upstream.parameters())}
        assert_all_close({name: pair for name, pair in named.items() if None not in pair}, op="gemm")


def test_parameters_with_hooks_and_frozen_ones(launched):
    """Single products, whose hooks are called, and whose results need gradients, as without us."""
    compiled, seen = check(Gated(), launched, 1), []
    hook = compiled.b.weight.register_hook(seen.append)
    launched.clear()
    outputs_and_gradients(compiled, features())
    assert "gemm_forward" not in launched and len(seen) == 1
    hook.remove()
    compiled.c.requires_grad_(False)
    outputs_and_gradients(compiled, features())
    assert "gemm_forward" not in launched


def test_parameters_elsewhere_that_a_branch_leaves_out(launched):
    compiled = check(Branch(), launched, 1)
    compiled.leaves = "c"
    compiled.c.to("meta")
    outputs_and_gradients(compiled, features())


def test_complex_numbers(launched):
    """Their gradients are conjugate, which those of the kernels are not."""
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.complex64) for _ in range(2)]
    x, results = torch.randn(NODES, WIDTH, dtype=torch.complex64), []
    for rows in (project(x, None, *layers), [layer(x) for layer in layers]):
        results.append(torch.autograd.grad(sum(rows).abs().sum(), [layer.weight for layer in layers]))
    for own, other in zip(*results, strict=True):
        torch.testing.assert_close(own, other)


class Shaped(Gated):
    """Holds, and its module has, what its forward does not name."""

    SCALES = np.array([1.0, 2.0])

    def __init__(self):
        super().__init__()
        self.scripted = torch.jit.script(nn.Linear(WIDTH, WIDTH))
        self.thing = Mock(spec=three)


def test_what_a_forward_does_not_name_does_not_matter(launched):
    check(Shaped(), launched, 1)


def test_a_forward_that_returns_several_results_later(launched):
    class Later(Gated):
        def __init__(self):
            super().__init__()
            self.returns = 1

        def forward(self, x, edge_index):
            c = self.c(x)
            out = self.last(self.propagate(edge_index, a=self.a(x), b=self.b(x), c=c))
            return (out, c) if self.returns == 2 else out

    check(Later(), launched, 0)


def test_modes_of_torch_see_each_product(launched):
    compiled = check(Gated(), launched, 1)
    with Functions() as mode:
        compiled(features(), edges())
    assert mode.seen.count(nn.functional.linear) >= 4


def test_batched_gradients_of_a_projection(launched):
    x, weight = features(), torch.randn(12, WIDTH, requires_grad=True)
    grads = torch.randn(5, NODES, 12)
    out = gemm.linear(x, weight)
    apart = [torch.autograd.grad(out, [x, weight], grad, retain_graph=True) for grad in grads]
    batched = torch.vmap(lambda grad: torch.autograd.grad(out, [x, weight], grad, retain_graph=True))(grads)
    again = torch.autograd.grad(out, [x, weight], grads, is_grads_batched=True, create_graph=True)
    for together, other, others in zip(batched, again, zip(*apart, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(others))
        torch.testing.assert_close(other, torch.stack(others))


def edit_a_weight(layer, x):
    a = layer.a(x)
    with torch.no_grad():
        layer.b.bias.add_(1.0)
    b = layer.b(x)
    with torch.no_grad():
        layer.b.bias.sub_(1.0)
    return a, b, layer.c(x)


def replace_a_weight(layer, x):
    a, b = layer.a(x), layer.b(x)
    weight = layer.c.weight * 1.0
    del layer.c.weight
    layer.c.weight = nn.Parameter(weight)
    return a, b, layer.c(x)


@pytest.mark.parametrize("step", [edit_a_weight, replace_a_weight])
def test_a_changed_parameter_is_seen(step, launched):
    layer = Stepped(step)
    compiled = pyg_dfgnn.accelerate(copy.deepcopy(layer))
    upstream = copy.deepcopy(layer).double()
    for _ in range(4):
        with torch.no_grad():
            actual, expected = compiled(features(), edges()), upstream(features(torch.float64), edges())
        assert_all_close({"out": (actual, expected)}, op="gemm")


def test_an_edited_input_is_seen(launched):
    """Without gradients, since torch refuses to differentiate after such an edit."""

    class Edits(Gated):
        def __init__(self):
            super().__init__()
            self.edits = False

        def forward(self, x, edge_index):
            a = self.a(x)
            if self.edits:
                x += 1.0
            return self.last(self.propagate(edge_index, a=a, b=self.b(x), c=self.c(x)))

    layer = Edits()
    compiled = check(layer, launched, 1)
    layer.edits = compiled.edits = True
    for _ in range(3):
        with torch.no_grad():
            actual = compiled(features().detach().clone(), edges())
            expected = copy.deepcopy(layer).double()(features(torch.float64).detach().clone(), edges())
        assert_all_close({"out": (actual, expected)}, op="gemm")


def test_a_branch_that_leaves_a_layer_out(launched):
    """The layer has no gradient, as without us, and computes its own once it is called again."""

    layer = Branch()
    compiled = check(layer, launched, 1)
    for leaves in ("c", "c", ""):
        layer.leaves = compiled.leaves = leaves
        actual = outputs_and_gradients(compiled, features())
        expected = outputs_and_gradients(copy.deepcopy(layer).double(), features(torch.float64))
        compiled.zero_grad(set_to_none=True)
        assert actual.keys() == expected.keys() and ("c.weight" in actual) is (leaves == "")
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
