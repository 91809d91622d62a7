"""Traced messages equal PyG's in float64: outputs and every gradient, through the interpreter."""

import copy
import inspect
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import GMMConv, Linear, MessagePassing
from torch_geometric.utils import scatter

from pyg_dfgnn import describe_plan, restore
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.frontend import Region
from pyg_dfgnn.ir import materialize
from pyg_dfgnn.nn import accelerate, messages
from pyg_dfgnn.nn.registry import MARK
from pyg_dfgnn.reference.tolerances import assert_all_close, elementwise
from pyg_dfgnn.reference.zoo import ZOO
from pyg_dfgnn.settings import local_settings
from tests.covering import extended
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.nn.message_cases import (
    EDGE_MLP,
    REFUSED,
    TRACED,
    Case,
    Inputs,
    assert_results,
    outputs_and_gradients,
    twins,
    watched,
)
from tests.nn.message_users import USERS

pytestmark = pytest.mark.usefixtures("in_float64")
SQUARE = ("self-loops", "isolated", "duplicates")
PAIRS = ("bipartite-wide", "bipartite-tall")


def _user_case(name):
    make, extra = USERS[name]

    def call(layer, i: Inputs):
        if extra == "pair":
            return layer(i.pair, i.edge_index)
        return layer(i.x, i.edge_index, *(() if extra is None else (getattr(i, extra),)))

    return Case(make, call)


CASES = {**TRACED, **EDGE_MLP, **{f"user-{name}": _user_case(name) for name in USERS}}


NAMES = [pytest.param(name, marks=pytest.mark.sparse) if name == "PANConv" else name for name in CASES]


PARTLY = {"SuperGATConv", "HypergraphConv", "user-Products"}
"""Classes of whose gathers and reductions a program has not all: those of other edges, or of ends with two counts."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_captured_forwards_equal_pyg(name):
    case = CASES[name]
    layer, marked = twins(case.make)
    graphs = (SQUARE[0], *PAIRS) if name == "SAGEConv" else SQUARE
    with messages.interpreted(), watched() as captured:
        for graph in graphs:
            expected = outputs_and_gradients(layer, case, ZOO[graph]())
            assert_results(
                outputs_and_gradients(marked, case, ZOO[graph]()), expected, **elementwise("float64/messages")
            )
    if case.expected == "traced":
        assert captured.programs and captured.is_fused == (name not in PARTLY), captured.reasons
    # One graph for all sizes, but for those of code around the messages that breaks it.
    assert len(captured) == 1 or name in ("RGCNConv", "SuperGATConv", "HEATConv", "PANConv", "SAGEConv")


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_no_program_has_is_torchs(name):
    """The result is PyG's, and a reason names the line of the layer's code."""
    layer, marked = twins(REFUSED[name].make)
    expected = outputs_and_gradients(layer, REFUSED[name], ZOO["self-loops"]())
    with messages.interpreted(), watched() as captured:
        results = outputs_and_gradients(marked, REFUSED[name], ZOO["self-loops"]())
    assert_results(results, expected, **elementwise("float64/messages"))
    assert any(REFUSED[name].expected in reason and "_conv.py:" in reason for reason in captured.reasons)


class Weighted(MessagePassing):
    """What the tests of state change."""

    scale, shifts = 2.0, {0: 0.5}

    def __init__(self, channels=4):
        super().__init__(aggr="add")
        self.lin, self.power, self.act = torch.nn.Linear(channels, channels), 2, torch.relu
        self.names, self.bias = ["a"], None

    def forward(self, x, edge_index, weight=None):
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_j, weight):
        out = (
            self.act(self.lin(x_j)) ** self.power * self.scale
            + len(self.names)
            + OFFSET
            + self.shifts[0]
            + Constants.shift
        )
        out = helper(out) if self.training else out
        out = out if self.bias is None else out + self.bias
        return out if weight is None else out * weight.view(-1, 1)


OFFSET = 0.5


class Constants:
    shift = 1.0


def helper(x):
    return x * 3


def other_helper(x):
    return x * 5


X, EDGES = torch.randn(5, 4, dtype=torch.float64), torch.tensor([[0, 1, 2, 3, 3], [1, 2, 0, 4, 4]])


def check(layer, *args, fused=True):
    """A call equals PyG's on a twin without the mark; return what was captured for it."""
    twin = copy.deepcopy(layer)
    twin.__dict__.pop(MARK)
    with messages.interpreted(), watched() as captured:
        result = layer(*args)
    torch.testing.assert_close(result, twin(*args))
    assert fused is None or captured.is_fused == fused, captured.reasons
    return captured


def marked_layer(make=Weighted, *args):
    return twins(lambda: make(*args))[1]


CHANGES = {
    "attribute": lambda layer, patch: setattr(layer, "power", 3),
    "list": lambda layer, patch: layer.names.append("b"),
    "function": lambda layer, patch: setattr(layer, "act", torch.sigmoid),
    "tensor": lambda layer, patch: setattr(layer, "bias", torch.randn(4)),
    "training": lambda layer, patch: layer.eval(),
    "instance": lambda layer, patch: setattr(layer, "scale", 3.0),
    "class": lambda layer, patch: patch.setattr(Weighted, "scale", 4.0),
    "class-list": lambda layer, patch: patch.setitem(Weighted.shifts, 0, 0.125),
    "namespace": lambda layer, patch: patch.setattr(Constants, "shift", 3.0),
    "method": lambda layer, patch: patch.setattr(Weighted, "message", lambda self, x_j, weight: 2 * x_j),
    "helper": lambda layer, patch: patch.setitem(globals(), "helper", other_helper),
    "helper-code": lambda layer, patch: patch.setattr(helper, "__code__", other_helper.__code__),
    "global": lambda layer, patch: patch.setitem(globals(), "OFFSET", 0.25),
    "module": lambda layer, patch: setattr(layer, "lin", torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())),
    "shape": lambda layer, patch: setattr(layer, "lin", torch.nn.Linear(4, 6)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_calls_is_seen(change, monkeypatch):
    layer = marked_layer()
    twin = copy.deepcopy(layer)
    twin.__dict__.pop(MARK)
    with messages.interpreted(), watched() as captured:
        for count in (1, 2):
            for _ in range(2):
                torch.testing.assert_close(layer(X, EDGES), twin(X, EDGES))
            assert len(captured) == count and captured.is_fused
            if count == 1:
                for each in (layer, twin) if change not in ("helper-code", "class-list") else (layer,):
                    torch.manual_seed(0)
                    CHANGES[change](each, monkeypatch)
    monkeypatch.undo()


def test_arguments_of_other_kinds_are_right():
    layer = marked_layer(Weighted, 4)
    twin = copy.deepcopy(layer)
    twin.__dict__.pop(MARK)
    with messages.interpreted(), watched() as captured:
        for x, edges, *weight in ((X, EDGES), (X, EDGES, torch.randn(5)), (X, EDGES, torch.randn(1, 1))):
            torch.testing.assert_close(layer(x, edges, *weight), twin(x, edges, *weight))
        for each in (layer, twin):
            torch.manual_seed(0)
            each.lin = torch.nn.Linear(7, 4)
        torch.testing.assert_close(layer(torch.ones(9, 7), EDGES), twin(torch.ones(9, 7), EDGES))
        torch.testing.assert_close(
            layer.float()(X[:, :1].expand(-1, 7).float(), EDGES), twin.float()(X[:, :1].expand(-1, 7).float(), EDGES)
        )
    assert captured.is_fused


@pytest.mark.parametrize("hook", ["message", "aggregate", "propagate"])
def test_hooks_take_pygs_path(hook):
    layer, seen = marked_layer(), []
    check(layer, X, EDGES)
    handle = getattr(layer, f"register_{hook}_forward_hook")(lambda *args: seen.append(args))
    assert not check(layer, X, EDGES, fused=False) and seen
    handle.remove()
    inner = layer.lin.register_forward_hook(lambda module, args, out: out * 2)
    check(layer, X, EDGES)
    inner.remove()
    check(layer, X, EDGES)


@pytest.mark.parametrize("edges", [0, 1])
def test_a_first_call_with_few_edges(edges):
    layer = marked_layer()
    twin = copy.deepcopy(layer)
    twin.__dict__.pop(MARK)
    with messages.interpreted(), watched() as captured:
        for edge_index in (EDGES[:, :edges], EDGES, EDGES[:, :1]):
            torch.testing.assert_close(layer(X, edge_index), twin(X, edge_index))
    assert captured.programs


class Refused(MessagePassing):
    """Each kind of message is refused with the line that says why."""

    def __init__(self, kind):
        super().__init__(aggr="add")
        self.kind, self.count, self.config = kind, 0, SimpleNamespace(p=2)
        self.norm, self.table = torch.nn.BatchNorm1d(4), torch.nn.Parameter(torch.randn(5, 4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, edge_index):
        weight = torch.ones(edge_index.size(1))
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_i, x_j, weight, index):
        if self.kind == "branch":
            return x_j if x_j.sum(-1).max() > 0 else x_i  # says why
        if self.kind == "item":
            return x_j * weight[0].item()  # says why
        if self.kind == "unsupported":
            return torch.special.bessel_j0(x_j)  # says why
        if self.kind == "argument":
            weight += 1  # says why
            return x_j * weight.view(-1, 1)
        if self.kind == "parameter":
            with torch.no_grad():
                self.table.mul_(1.0)  # says why
            return x_j
        if self.kind == "all-edges":
            return x_j / x_j.sum(0)  # says why
        if self.kind == "size":
            return x_j / x_j.size(0)  # says why
        if self.kind == "float-of-size":
            return x_j * math.log(x_j.size(0) + 1)  # says why
        if self.kind == "position":
            return x_j * weight[:1]  # says why
        if self.kind == "mask":
            return x_j.masked_fill(weight.view(-1, 1) > 0, 0.0)[x_i[:, 0] > 0]  # says why
        if self.kind == "dropout":
            return torch.nn.functional.alpha_dropout(x_j, 0.5, self.training)  # says why
        if self.kind == "random":
            return x_j * torch.rand(4)  # says why
        if self.kind == "statistics":
            return self.norm(x_j)  # says why
        if self.kind == "ids":
            return x_j * index.view(-1, 1)  # says why
        if self.kind == "largest":
            return x_j / scatter(x_j, index)[index]  # says why
        if self.kind == "global":
            return x_j * UNKNOWN  # says why
        if self.kind == "entries":
            x_j[:, 0] = 0  # says why
            return x_j
        if self.kind == "rounded":
            return x_j.half().to(x_j.dtype)  # says why
        if self.kind == "requires-grad":
            return x_j if x_j.requires_grad else 2 * x_j  # says why
        if self.kind == "counter":
            self.count += 1  # says why
        if self.kind == "buffer":
            self.seen = self.seen + 1  # says why
        if self.kind == "namespace":
            return x_j**self.config.p
        return x_j


UNKNOWN = torch.ones(4, dtype=torch.float64)
KINDS = "branch item unsupported argument parameter all-edges size float-of-size position mask dropout random".split()
KINDS += "statistics ids largest global entries rounded requires-grad counter buffer namespace".split()


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_message_does_the_answer_is_pygs(kind):
    layer = marked_layer(Refused, kind)
    twin = copy.deepcopy(layer)
    twin.__dict__.pop(MARK)
    with messages.interpreted(), watched():
        for _ in range(3):
            results = []
            for each in (layer, twin):
                torch.manual_seed(0)
                try:
                    results.append(each(X, EDGES))
                except (RuntimeError, ValueError):
                    # Where the mask leaves out an edge, PyG's sum has too few rows.
                    assert kind == "mask"
                    results.append(None)
            if None in results:
                assert results == [None, None]
            else:
                torch.testing.assert_close(*results)
    assert layer.count == twin.count
    torch.testing.assert_close(layer.state_dict(), twin.state_dict())


def test_a_reason_names_the_line_and_is_kept():
    layer = marked_layer(Refused, "unsupported")
    reasons = check(layer, X, EDGES, fused=False).reasons
    assert "bessel_j0(x_j)  # says why" in reasons[0] and "test_messages.py:" in reasons[0]
    assert reasons[0] in describe_plan(layer, X, EDGES).reasons


def test_rows_of_sources_count_targets_where_both_are_as_many():
    class Counted(MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x, y=x if isinstance(x, tuple) else (x, x))

        def message(self, x_j, y_i):
            return x_j * y_i.sum(-1, keepdim=True)

        def aggregate(self, inputs, index, y):
            return scatter(inputs, index, dim=0, dim_size=y[0].size(0))

    layer, edges = marked_layer(Counted), torch.tensor([[0, 5, 2, 3], [1, 2, 0, 4]])
    for _ in range(2):
        check(layer, (X, X.exp()), EDGES, fused=None)
        check(layer, (torch.randn(6, 4), X), edges, fused=None)


def test_a_branch_by_the_shape_of_a_parameter_is_seen():
    class Shaped(MessagePassing):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4))

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return torch.special.bessel_j0(x_j) if self.weight.numel() == 4 else x_j * self.weight

    layer = marked_layer(Shaped)
    check(layer, X, EDGES, fused=False)
    layer.weight = torch.nn.Parameter(torch.randn(1))
    check(layer, X, EDGES)


@pytest.mark.parametrize("lazy", [torch.nn.LazyLinear, lambda channels: Linear(-1, channels)], ids=["torch", "pyg"])
def test_lazy_parameters_get_their_shapes_in_the_first_call(lazy):
    class Lazy(MessagePassing):
        def __init__(self):
            super().__init__()
            self.lin = lazy(4)

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return self.lin(x_j) / 2

    layer = accelerate(Lazy())
    with messages.interpreted(), watched() as captured:
        first, second = layer(X, EDGES), layer(X, EDGES)
    assert captured.is_fused
    for result in (first, second):
        torch.testing.assert_close(result, restore(copy.deepcopy(layer))(X, EDGES))


def test_errors_of_a_layer_are_pygs():
    layer = marked_layer()
    with messages.interpreted(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(5, 3), EDGES)
    with messages.interpreted(), pytest.raises(ValueError, match="two-dimensional"):
        layer(X, EDGES[0])
    with messages.interpreted(), pytest.raises(RuntimeError, match="same dtype"):
        layer(X.float(), EDGES)


@pytest.mark.parametrize("sort", [None, "col", "row"])
def test_edge_index_with_an_order(sort):
    edges = EDGES if sort is None else EDGES[:, EDGES[int(sort == "col")].argsort(stable=True)]
    layer, size = marked_layer(), (5, 5) if sort else None
    check(layer, X, EdgeIndex(edges, sort_order=sort, sparse_size=size), torch.randn(5), fused=False)


@pytest.mark.parametrize("number", [np.int64, torch.tensor])
def test_sizes_of_any_integer_type(number):
    class Sized(MessagePassing):
        def forward(self, x, edge_index, size):
            return self.propagate(edge_index, x=(x, None), size=size)

        def message(self, x_j):
            return 2 * x_j

    check(marked_layer(Sized), X, EDGES.clone(), (number(5), number(7)), fused=None)


def test_update_stays_torch_and_gets_its_arguments():
    class Late(MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x, extra=3.0)

        def update(self, inputs, x, extra, dim_size, index):
            return inputs.sort(dim=-1).values + x * extra + dim_size + index.numel()

    check(marked_layer(Late), X, EDGES)


def test_attributes_that_a_message_sets_are_set():
    layer, marked = twins(TRACED["TransformerConv"].make)
    inputs = Inputs(ZOO["self-loops"]())
    x, attr = inputs.x, inputs.edge_attr
    expected = layer(x, inputs.edge_index, attr, return_attention_weights=True)
    with messages.interpreted(), watched() as calls:
        result = marked(x, inputs.edge_index, attr, return_attention_weights=True)
    assert calls.is_fused
    torch.testing.assert_close((result[0], result[1][1]), (expected[0], expected[1][1]))
    assert marked._alpha is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_and_mixed_ones(dtype):
    layer = marked_layer().to(dtype)
    twin = copy.deepcopy(layer)
    twin.__dict__.pop(MARK)
    x = X.to(dtype)
    for weight in (torch.rand(5, dtype=dtype), torch.rand(5, dtype=torch.float32)):
        with messages.interpreted(), watched() as calls:
            result = layer(x, EDGES, weight)
        expected = twin(x, EDGES, weight)
        assert calls.is_fused and result.dtype is expected.dtype
        torch.testing.assert_close(result, expected, rtol=3e-2, atol=3e-1 if dtype is torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_gives_pygs_dtypes(dtype):
    layer, marked = (module.to(torch.float32) for module in twins(TRACED["GINEConv"].make))
    layer.nn = marked.nn = torch.nn.Identity()
    x, attr = torch.randn(5, 6, dtype=dtype), torch.randn(5, 3, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16), messages.interpreted(), watched() as calls:
        expected, result = layer(x, EDGES, attr), marked(x, EDGES, attr)
    assert calls.is_fused and result.dtype is expected.dtype
    torch.testing.assert_close(result, expected, rtol=3e-2, atol=3e-2)


def test_second_derivatives():
    layer, marked = twins(Weighted)
    for module in (layer, marked):
        module.act = torch.sigmoid
    results = []
    for module in (layer, marked):
        x = X.clone().requires_grad_()
        with messages.interpreted():
            (gradient,) = torch.autograd.grad(module(x, EDGES).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    torch.testing.assert_close(*results)


KERNELS = extended(
    [
        *(
            "user-SignedAttention",
            "user-Differences",
            "user-Updated",
            "user-Joined",
            "user-OneCoordinate",
            "GCN2Conv",
            "FeaStConv",
            "RGATConv",
        ),
        *("GENConv", "PointTransformerConv", "GATConv", "CGConv"),
    ],
    [
        *("user-Modulated", "user-Temperature", "LEConv", "ARMAConv", "FastRGCNConv", "GINEConv", "GATv2Conv"),
        *("TransformerConv", "ResGatedGraphConv"),
    ],
)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_run_messages(name):
    """Generated kernels, emulated, give PyG's outputs and gradients within the rounding of float32."""
    case, graph = CASES[name], ZOO["self-loops"]()
    layer, marked = twins(case.make)
    expected = outputs_and_gradients(layer, case, graph)
    with emulated_device() as launched, local_settings(fallback="error"), watched() as calls:
        results = outputs_and_gradients(marked.float(), case, graph, torch.float32)
    assert calls.is_fused and launched
    assert_results(results, expected, **elementwise("float32/gradients"), check_dtype=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_much_arithmetic_makes_of_edges_are_made_once(dtype, monkeypatch):
    """Gaussians of the coordinates of an edge, which a kernel of their own computes before the messages."""
    monkeypatch.setattr(materialize, "MOST_OPERATORS", 5)
    graph, found = ZOO["self-loops"](), []
    layer = GMMConv(8, 8, dim=6, kernel_size=2).to(dtype)
    # Narrow Gaussians would amplify the rounding of coordinates to 16 bits.
    torch.nn.init.uniform_(layer.sigma, 1.0, 2.0)
    x, edge = torch.randn(graph.num_src, 8, dtype=dtype), torch.rand(graph.num_edges, 6, dtype=dtype)
    grad = torch.randn(graph.num_dst, 8, dtype=dtype)

    def run(layer):
        leaves = [x.to(layer.g.dtype).requires_grad_(), edge.to(layer.g.dtype).requires_grad_(), *layer.parameters()]
        out = layer(leaves[0], graph.edge_index, leaves[1])
        found.append((out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))))

    with emulated_device() as launched, local_settings(fallback="error"):
        run(accelerate(copy.deepcopy(layer)))
    assert [name for name in launched if "relational" in name][:2] == ["relational_map", "relational_traversal"]
    run(layer.double())
    names = ["out", "grad_x", "grad_edge", *(f"grad_{name}" for name, _ in layer.named_parameters())]
    assert_all_close(dict(zip(names, zip(*found, strict=True), strict=True)), op="relational")


@needs_compiler
def test_rows_of_edges_that_are_mapped_are_stored():
    case, graph = CASES["EdgeConv"], ZOO["self-loops"]()
    layer, marked = twins(case.make)
    expected = outputs_and_gradients(layer, case, graph)
    with emulated_device() as launched, watched() as captured:
        results = outputs_and_gradients(marked.float(), case, graph, torch.float32)
    assert {"relational_map", "relational_traversal"} <= set(launched) and not captured.left
    assert_results({name: x.double() for name, x in results.items()}, expected, **elementwise("float32/gradients"))


class NoKernel(MessagePassing):
    """Messages that are programs and that no kernel takes, for the sake of one line."""

    def __init__(self):
        super().__init__(aggr="add")

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        gate = torch.sigmoid(x_i)
        x_j = (x_i.view(-1, 8, 8) @ x_j.view(-1, 8, 8)).view(-1, 64)  # matrices
        return gate * x_j


def test_what_kernels_refuse_names_the_line():
    x, edge_index = torch.randn(5, 64, dtype=torch.float32), torch.randint(5, (2, 9))
    plain = NoKernel()
    layer = accelerate(copy.deepcopy(plain))
    with emulated_device(), local_settings(fallback="silent"), watched() as captured:
        torch.testing.assert_close(layer(x, edge_index), plain(x, edge_index))
    lines, first = inspect.getsourcelines(NoKernel)
    line = next(k for k, text in enumerate(lines) if text.endswith("# matrices\n"))
    for reasons in (captured.left, describe_plan(layer, x, edge_index, device="cuda").reasons):
        assert f"test_messages.py:{first + line} `{lines[line].strip()}`: " in reasons[0]


def test_calls_that_kernels_refuse_are_the_layers_own_from_then_on(monkeypatch):
    asked, ask = [], Region.__call__
    monkeypatch.setattr(Region, "__call__", lambda *args: asked.append(1) or ask(*args))
    x, edge_index = torch.randn(5, 64), torch.randint(5, (2, 9))
    plain = NoKernel()
    layer = accelerate(copy.deepcopy(plain))
    with emulated_device(), local_settings(fallback="silent"):
        for inputs, count in ((x, 1), (x + 1, 1), (x.clone().requires_grad_(), 2), (x.clone().requires_grad_(), 2)):
            torch.testing.assert_close(layer(inputs, edge_index), plain(inputs, edge_index))
            assert len(asked) == count
        with local_settings(fallback="error"), pytest.raises(UnsupportedError, match="matrices"):
            layer(x, edge_index)
