"""Traps for traces: code that edits, decides, ties or hides something gives PyG's results all the same."""

import copy
import enum
import sys
import types
from uuid import uuid4

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing

import pyg_dfgnn
from pyg_dfgnn.nn import messages
from tests.kernels.emulated import emulated_device
from tests.nn.message_cases import watched

pytestmark = pytest.mark.usefixtures("in_float64")
NODES, CHANNELS = 7, 4


class Config:
    scale = 1.0

    class model:
        scale = 1.0


MODULE = types.ModuleType("a_module_of_a_user")
MODULE.Config = Config
sys.modules[MODULE.__name__] = MODULE
LISTED, ACTIVATION, NESTED = [Config], nn.LeakyReLU(0.1), nn.Sequential(nn.ReLU())


class Layer(MessagePassing):
    """The least that a layer of a user has."""

    def __init__(self, *args):
        super().__init__(aggr="add")
        self.start(*args)

    def start(self):
        pass

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


@pytest.fixture
def edge_index():
    return torch.randint(NODES, (2, 15), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def x():
    return torch.randn(NODES, CHANNELS, generator=torch.Generator().manual_seed(1)).requires_grad_()


def twins(kind, *args):
    layer = kind(*args)
    return layer, pyg_dfgnn.accelerate(copy.deepcopy(layer))


def gradients(layer, results, x):
    outs = [out for out in results if out.requires_grad]
    leaves = [leaf for leaf in (x, *layer.parameters()) if leaf.requires_grad]
    total = sum((out * torch.arange(1.0, 1 + out.numel()).view_as(out)).sum() for out in outs)
    return torch.autograd.grad(total, leaves, allow_unused=True) if outs else []


def compare(pair, x, *args, on=messages.interpreted):
    """Results and gradients are PyG's, and nothing else needs a gradient; returns whether a program ran."""
    (layer, marked), leaf = pair, x[0] if isinstance(x, tuple) else x
    want = layer(x, *args)
    want = want if isinstance(want, tuple) else (want,)
    with on(), watched() as calls:
        got = marked(x, *args)
        got = got if isinstance(got, tuple) else (got,)
        grads = gradients(marked, got, leaf)
    bound = {"rtol": 1e-9, "atol": 1e-11} if leaf.dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **bound)
        assert a.requires_grad == b.requires_grad
    for a, b in zip(grads, gradients(layer, want, leaf), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **bound)
    return any(trace is not None and trace.program is not None for _, _, trace, _ in calls)


# Edits in place, and values of edges that wait -----------------------------------------------------------------------


class Updating(Layer):
    """A layer with values of edges that wait for `propagate`."""

    def forward(self, x, edge_index):
        gate = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, gate=gate)

    def edge_update(self, x_i, x_j):
        return (x_i + x_j).sum(-1, keepdim=True).sigmoid()

    def message(self, x_j, gate):
        return x_j * gate


class EditedBetween(Updating):
    def forward(self, x, edge_index):
        x = x * 1
        gate = self.edge_updater(edge_index, x=x)
        x = F.relu(x, inplace=True)
        return self.propagate(edge_index, x=x, gate=gate)


class EditedAfter(Layer):
    def forward(self, x, edge_index):
        x = x * 1
        out = self.propagate(edge_index, x=x.detach())
        x += out
        return x

    def message(self, x_i, x_j):
        self.att = (x_i * x_j).sum(-1, keepdim=True).sigmoid()
        return x_j * self.att


class EditedElsewhere(EditedBetween):
    """Edits under other names, by functions and methods, and in a method that has a wrapper."""

    how = "view"

    @torch.enable_grad()
    def forward(self, x, edge_index):
        x = x * 1
        gate = self.edge_updater(edge_index, x=x)
        if self.how == "view":
            flat = x.view(-1)
            flat.mul_(2.0)
        if self.how == "method":
            self.double(x)
        if self.how == "function":
            doubled(x)
        if self.how == "functional":
            F.elu_(x)
        if self.how == "position":
            F.relu(x, True)
        return self.propagate(edge_index, x=x, gate=gate)

    def double(self, x):
        x.mul_(2.0)


def doubled(x):
    x.mul_(2.0)


@pytest.mark.parametrize("how", ["view", "method", "function", "functional", "position"])
def test_edits_that_are_not_where_the_values_are_made(how, x, edge_index):
    pair = twins(EditedElsewhere)
    for layer in pair:
        layer.how = how
    compare(pair, x, edge_index)


class EditedBuffer(Updating):
    def start(self):
        self.register_buffer("factor", torch.ones(1))

    def forward(self, x, edge_index):
        gate = self.edge_updater(edge_index, x=x, factor=self.factor)
        with torch.no_grad():
            self.factor.mul_(2.0)
        return self.propagate(edge_index, x=x, gate=gate)

    def edge_update(self, x_i, factor):
        return x_i.detach().sum(-1, keepdim=True) * factor


class WithoutGradients(Updating):
    def start(self):
        self.lin = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x, edge_index):
        x = self.lin(x)
        with torch.no_grad():
            gate = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, gate=gate)


class Sparse(Updating):
    """Values of edges that a function takes without asking for their class."""

    def forward(self, x, edge_index):
        gate = self.edge_updater(edge_index, x=x).view(-1)
        return torch.sparse_coo_tensor(edge_index.flip(0), gate.detach(), (NODES, NODES), check_invariants=False) @ x


class Previous(Layer):
    """Attention of the call before, of one edge too."""

    def forward(self, x, edge_index):
        self.att = None
        for _ in range(2):
            x = self.propagate(edge_index, x=x)
        return x

    def message(self, x_i, x_j):
        score = (x_i * x_j).sum(-1)
        score = score if self.att is None else score + self.att
        self.att = score
        return x_j * score.unsqueeze(-1)


@pytest.mark.parametrize("edges", [15, 1])
@pytest.mark.parametrize(
    "kind", [Updating, EditedBetween, EditedAfter, EditedBuffer, WithoutGradients, Sparse, Previous]
)
def test_values_of_edges_are_those_of_when_they_were_made(kind, edges, x, edge_index):
    pair = twins(kind)
    for _ in range(2):
        compare(pair, x, edge_index[:, :edges])


@pytest.mark.parametrize("kind", [Updating, EditedAfter, Previous])
def test_inference_mode(kind, x, edge_index):
    layer, marked = twins(kind)
    with torch.inference_mode(), messages.interpreted():
        features = x * 1
        torch.testing.assert_close(marked(features, edge_index), layer(features, edge_index))


# Which tensors are one ------------------------------------------------------------------------------------------------


class Tied(Layer):
    def start(self, is_tied):
        self.left = nn.Linear(CHANNELS, CHANNELS)
        self.right = self.left if is_tied else nn.Linear(CHANNELS, CHANNELS)

    def message(self, x_i, x_j):
        return self.left(x_j) + self.right(x_i)


def test_a_trace_of_tied_modules_is_for_tied_modules(x, edge_index):
    for is_tied in (True, False, True):
        assert compare(twins(Tied, is_tied), x, edge_index)
    pair = twins(Tied, True)
    for untie in (False, True):
        for layer in pair if untie else ():
            layer.right = copy.deepcopy(layer.left)
            layer.right.weight.data.neg_()
        assert compare(pair, x, edge_index)


class Passing(Layer):
    def start(self):
        self.a, self.b = (nn.Parameter(torch.arange(1.0, 1 + CHANNELS) * sign) for sign in (1, -1))
        self.names = "aa"

    def forward(self, x, edge_index):
        u, v = (getattr(self, name) for name in self.names)
        return self.propagate(edge_index, x=x, u=u, v=v)

    def message(self, x_i, x_j, u, v):
        return x_i * u + x_j * v + self.a


def test_one_tensor_as_several_arguments(x, edge_index):
    pair = twins(Passing)
    for names in ("aa", "ab", "ba", "bb"):
        for layer in pair:
            layer.names = names
        assert compare(pair, x, edge_index)


class Optional(Layer):
    def start(self):
        self.register_buffer("mask", None)
        self.lin = nn.Linear(CHANNELS, CHANNELS, bias=False)

    def message(self, x_j):
        return self.lin(x_j) if self.mask is None else self.lin(x_j) * 2.0


def test_what_was_none_is_set_and_taken_away(x, edge_index):
    pair = twins(Optional)
    for name, value in {"mask": torch.ones(1), "bias": nn.Parameter(torch.ones(CHANNELS)), "nothing": None}.items():
        compare(pair, x, edge_index)
        for layer in pair:
            if name == "bias":
                layer.lin.bias = value
            elif name == "mask":
                layer.mask = value
            else:
                layer.mask = layer.lin.bias = None
    compare(pair, x, edge_index)


# Numbers of rows ------------------------------------------------------------------------------------------------------

DECISIONS = {
    "is square": lambda x_j, size, size_i: x_j if size[0] == size[1] else 2 * x_j,
    "one edge": lambda x_j, size, size_i: x_j if x_j.size(0) > 1 else 2 * x_j,
    "edges and channels": lambda x_j, size, size_i: x_j if x_j.shape[0] == x_j.shape[1] else 2 * x_j,
    "edges and nodes": lambda x_j, size, size_i: x_j if size_i == x_j.size(0) else 2 * x_j,
    "length": lambda x_j, size, size_i: x_j if len(x_j) > 1 else 2 * x_j,
    "even": lambda x_j, size, size_i: x_j if size_i % 2 == 0 else 2 * x_j,
    "least": lambda x_j, size, size_i: x_j * min(size_i, 3),
    "numbers": lambda x_j, size, size_i: x_j if x_j.numel() < 8 else 2 * x_j,
    "the same": lambda x_j, size, size_i: x_j if x_j.size(0) * 2 == 2 * x_j.size(0) != 0 else 2 * x_j,
    "truth": lambda x_j, size, size_i: x_j if size_i - 6 else 2 * x_j,
    "a bit": lambda x_j, size, size_i: x_j if x_j.size(0) & 1 else 2 * x_j,
    "a half": lambda x_j, size, size_i: x_j if x_j.size(0) > 1.5 else 2 * x_j,
    "one row": lambda x_j, size, size_i: x_j if x_j.sum(-1, keepdim=True).squeeze().dim() == 1 else 2 * x_j,
    "a float": lambda x_j, size, size_i: x_j if float(x_j.size(0)) > 1 else 2 * x_j,
    "a set": lambda x_j, size, size_i: x_j if x_j.size(0) in {1, 7} else 2 * x_j,
}


def layer_of(name, message, start=None, **bases):
    body = {"message": message, **({"start": start} if start else {}), **bases}
    message.__name__ = "message"
    # PyG keeps what a class asks for under its name, for all processes.
    name = f"{name}_{uuid4().hex}"
    return type(name, (Layer,), {**body, "__module__": __name__})


@pytest.mark.parametrize("decision", DECISIONS.values(), ids=DECISIONS)
def test_decisions_by_numbers_of_rows(decision, x, edge_index):
    kind = layer_of("Deciding", lambda self, x_j, size, size_i: decision(x_j, size, size_i))
    pair, ran = twins(kind), 0
    for nodes in (7, 6, 4):
        for edges in (15, 7, 4, 1):
            ends = edge_index[:, :edges] % nodes
            ran += compare(pair, x[:nodes], ends) + compare(pair, (x[:nodes], x[:5]), ends % 5) if nodes > 4 else 0
    # What was traced serves the sizes that decide alike; of numbers that leave the count nothing can be.
    assert ran or decision in [DECISIONS[name] for name in ("least", "length", "a float", "a set")]


@pytest.mark.parametrize("decision", [DECISIONS[name] for name in ("one edge", "is square", "truth")])
def test_decisions_while_compiling(decision, x, edge_index):
    kind = layer_of("Deciding", lambda self, x_j, size, size_i: decision(x_j, size, size_i))
    layer, marked = twins(kind)
    compiled = torch.compile(marked, dynamic=True, backend="eager")
    with messages.interpreted():
        for edges in (15, 1):
            for features in (x, (x, x[:5]), x[:6]):
                ends = edge_index[:, :edges] % 5
                torch.testing.assert_close(compiled(features, ends), layer(features, ends), rtol=1e-9, atol=1e-11)


def test_a_question_with_one_answer_is_no_decision(x, edge_index):
    kind = layer_of("Asserting", lambda self, x_j, index: x_j if x_j.size(0) == index.size(0) else 2 * x_j)
    layer = pyg_dfgnn.accelerate(kind())
    with messages.interpreted(), watched() as calls:
        layer(x, edge_index)
    assert not calls[0][2].guards


def test_why_a_decision_is_refused(x, edge_index):
    kind = layer_of("Deciding", lambda self, x_j: x_j if x_j.size(0) > 1 else 2 * x_j)
    layer = pyg_dfgnn.accelerate(kind())
    (reason,) = pyg_dfgnn.describe_plan(layer, x, edge_index[:, :1], device="cuda").reasons
    assert "test_message_traps.py" in reason and reason.endswith("decides by the number of edges or nodes")


# What code reads ------------------------------------------------------------------------------------------------------


def of_import(self, x_j):
    from a_module_of_a_user import Config as imported

    return x_j * imported.scale


class Mode(enum.Enum):
    FAST = 1


def of_standard_modules(self, x_j):
    from collections import OrderedDict

    return x_j * len(OrderedDict(a=1)) * Mode.FAST.value


READS = {
    "an enum and a standard module": of_standard_modules,
    "a child of a global module": lambda self, x_j: NESTED(x_j),
    "what a class lacks": lambda self, x_j: x_j * getattr(Config, "other", 1.0),
    "a class as an attribute": lambda self, x_j: x_j * self.config.scale,
    "a class in a class": lambda self, x_j: x_j * Config.model.scale,
    "a class of a module": lambda self, x_j: x_j * MODULE.Config.scale,
    "a class in a list": lambda self, x_j: x_j * LISTED[0].scale,
    "an import inside": of_import,
    "getattr": lambda self, x_j: x_j * getattr(Config, "scale"),  # noqa: B009
    "a module that is global": lambda self, x_j: ACTIVATION(x_j),
    "what is lacking": lambda self, x_j: x_j * getattr(self, "gain", 1.0),
    "whether a buffer is there": lambda self, x_j: x_j * (2 if hasattr(self, "extra") else 1),
    "an order": lambda self, x_j: x_j * [*self.weights][0],
}


@pytest.mark.parametrize("message", READS.values(), ids=READS)
def test_what_is_read_and_then_changed(message, x, edge_index, monkeypatch):
    def start(self):
        self.config, self.weights = Config, {2.0: 0, 3.0: 0}

    kind = layer_of("Reading", message, start)
    pair = twins(kind)
    assert compare(pair, x, edge_index)
    monkeypatch.setattr(Config, "scale", 3.0)
    monkeypatch.setattr(Config.model, "scale", 3.0)
    monkeypatch.setattr(ACTIVATION, "negative_slope", 0.9)
    monkeypatch.setattr(Config, "other", 3.0, raising=False)
    monkeypatch.setitem(NESTED._modules, "0", nn.Tanh())
    kind.gain = 3.0
    for layer in pair:
        layer.register_buffer("extra", torch.ones(1))
        layer.weights = {3.0: 0, 2.0: 0}
    compare(pair, x, edge_index)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Plain(Layer):
    """Not :class:`Layer` itself: PyG would take what it generates for that for subclasses without a source."""


class Updated(Layer):
    def update(self, out):
        return out


def test_functions_with_a_backward_of_their_own_and_updates_of_an_instance(x, edge_index):
    assert not compare(twins(layer_of("Reversing", lambda self, x_j: Reversed.apply(x_j) * x_j)), x, edge_index)
    for kind in (Plain, Updated):
        pair = twins(kind)
        for layer in pair:
            layer.update = lambda out: 3 * out
        assert compare(pair, x, edge_index)


def test_numbers_that_differ_from_call_to_call_are_left_to_pyg(x, edge_index):
    class Heated(Layer):
        def forward(self, x, edge_index, heat):
            return self.propagate(edge_index, x=x, heat=heat)

        def message(self, x_j, heat):
            return x_j * heat

    pair = twins(Heated)
    ran = [compare(pair, x, edge_index, float(heat)) for heat in range(20)]
    assert ran == [True] * 16 + [False] * 4
    assert compare(pair, x, edge_index, 3.0)


def test_tables_of_ever_other_numbers_of_rows_are_left_to_pyg(x, edge_index):
    class Looked(Layer):
        def forward(self, x, edge_index, table):
            return self.propagate(edge_index, x=x, table=table)

        def message(self, x_j, table):
            return x_j @ table.t() @ table

    pair = twins(Looked)
    tables = [torch.randn(rows, CHANNELS, dtype=x.dtype) for rows in range(20, 40)]
    assert [compare(pair, x, edge_index, table) for table in tables] == [True] * 16 + [False] * 4
    assert compare(pair, x, edge_index, tables[3])


# Functions ------------------------------------------------------------------------------------------------------------

FUNCTIONS = {
    "masks": lambda self, x_i, x_j: ((x_i > 0) + (x_j > 0)) * x_j,
    "the norm of a matrix": lambda self, x_j: x_j * torch.linalg.norm(x_j.view(-1, 2, 2), 2, dim=(1, 2)).view(-1, 1),
    "a norm by two dimensions": lambda self, x_j: x_j * torch.linalg.norm(x_j.view(-1, 2, 2), dim=(1, 2)).view(-1, 1),
    "prelu": lambda self, x_j: F.prelu(x_j.view(-1, 2, 2), self.slopes).flatten(1),
    "log1p": lambda self, x_j: torch.log1p(1e-12 * x_j.abs()) * 1e12 + torch.log1p(x_j.abs()),
    "threshold": lambda self, x_j: F.threshold(x_j / x_j, 0.5, 7.0),
}
KINKS = {
    "selu": F.selu,
    "elu": lambda x: F.elu(x, 2.0),
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "clamp": lambda x: x.clamp(0.0, 6.0),
}


@pytest.mark.parametrize("message", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions(message, x, edge_index):
    def start(self):
        self.slopes = nn.Parameter(torch.tensor([0.1, 2.0]))

    with torch.no_grad():
        x[0] = 0.0
    features = x.detach() if message is FUNCTIONS["threshold"] else x
    layer, marked = twins(layer_of("Calling", message, start))
    with messages.interpreted():
        got = marked(features, edge_index)
    torch.testing.assert_close(got, layer(features, edge_index), rtol=1e-9, atol=1e-11, equal_nan=True)
    if features.requires_grad and "norm" not in message.__code__.co_names:
        compare((layer, marked), features, edge_index)


@pytest.mark.parametrize("function", KINKS.values(), ids=KINKS)
def test_gradients_at_kinks(function, edge_index):
    x = torch.tensor([0.0, 6.0, -1.0, 1.0, 3.0, -3.0, 0.5]).view(-1, 1).repeat(1, CHANNELS).requires_grad_()
    assert compare(twins(layer_of("Kinked", lambda self, x_j: function(x_j))), x, edge_index)


# Kernels --------------------------------------------------------------------------------------------------------------

KEPT = {
    "a sum": lambda self, x_i, x_j: x_j.sum(-1),
    "a map": lambda self, x_i, x_j: self.lin(x_j).squeeze(-1),
    "a number": lambda self, x_i, x_j: x_j[:, 0],
    "of the target": lambda self, x_i, x_j: x_i.sum(-1),
    "another shape": lambda self, x_i, x_j: x_j.view(-1, 2, 2).sum(-1),
    "the row": lambda self, x_i, x_j: x_j.view(-1, 2, 2),
}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_kernels_give_values_of_edges_that_only_move_those_of_nodes(kept, x, edge_index):
    class Keeping(Layer):
        def start(self):
            self.lin = nn.Linear(CHANNELS, 1)

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x), self.att

        def message(self, x_i, x_j):
            self.att = kept(self, x_i, x_j)
            return 2 * x_j

    pair = [layer.float() for layer in twins(Keeping)]
    assert compare(pair, x.detach().float().requires_grad_(), edge_index, on=emulated_device)


@pytest.mark.parametrize("on", [messages.interpreted, emulated_device], ids=["interpreted", "kernels"])
def test_what_an_output_does_not_depend_on_gets_no_gradient(on, x, edge_index):
    class Detached(Layer):
        def start(self):
            self.lin = nn.Linear(CHANNELS, CHANNELS)

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x, h=self.lin(x))

        def message(self, x_j, h_j):
            return x_j * h_j.detach().sigmoid()

    pair = [layer.float() for layer in twins(Detached)]
    assert compare(pair, x.detach().float().requires_grad_(), edge_index, on=on)
    assert compare(pair, x.detach().float(), edge_index, on=on)
