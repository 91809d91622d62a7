"""Values of edges that a forward makes: computed if something reads them, else never, and PyG's in every case."""

import pytest
import torch
import torch_geometric.nn.conv as pyg
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

import pyg_dfgnn
from pyg_dfgnn.nn import messages
from pyg_dfgnn.nn.messages.lazy import EdgeValue
from pyg_dfgnn.ops.relational.backend import INTERPRETER, Backend, running
from pyg_dfgnn.reference.zoo import ZOO
from pyg_dfgnn.settings import local_settings
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.nn import test_message_traps as traps
from tests.nn.message_cases import FEATURES, WIDTH, Inputs, twins, watched

pytestmark = pytest.mark.usefixtures("in_float64")


class Kept(MessagePassing):
    """Attention that stays in an attribute, as a list, or is read before the forward ends."""

    def __init__(self, what="kept"):
        super().__init__(aggr="add")
        self.what = what
        self.lin, self.att, self.alpha = torch.nn.Linear(FEATURES, WIDTH), torch.nn.Linear(2 * WIDTH, 1), None

    def forward(self, x, edge_index):
        x = self.lin(x)
        out = self.propagate(edge_index, x=x)
        if self.what == "read":
            out = out + self.alpha.sum() + self.alpha.shape[0]
        if self.what == "edited":
            # As no reader of the code would see.
            getattr(x, "mul_")(2.0)  # noqa: B009
            out = out + self.alpha.sum()
        if self.what == "cleared":
            self.alpha = None
        return out

    def message(self, x_i, x_j, index, ptr, size_i):
        alpha = self.att(torch.cat([x_i, x_j], dim=-1)).tanh()
        self.alpha = softmax(alpha, index, ptr, size_i)
        return self.alpha * x_j


class Updated(MessagePassing):
    """Edges that are updated, edited and passed on twice."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(FEATURES, FEATURES)

    def forward(self, x, edge_index):
        gate = self.edge_updater(edge_index, x=x)
        out = self.propagate(edge_index, x=x, gate=gate)
        other = self.propagate(edge_index, x=self.lin(x), gate=gate.detach() if self.training else gate)
        return out + other, gate.mul(2.0)

    def edge_update(self, x_i, x_j):
        return torch.sigmoid(x_i * x_j)

    def message(self, x_j, gate):
        return gate * x_j


def recorded(layer, *args, **kwargs):
    """The result of a call and the (name, outputs, inputs) of the programs that ran."""
    runs = []

    def find(program, rows, inputs, names):
        runs.append((program.name, tuple(names), set(inputs)))
        assert not any(isinstance(tensor, EdgeValue) for tensor in inputs.values())
        return INTERPRETER.find(program, rows, inputs, names)

    with running(Backend(find, None)):
        return layer(*args, **kwargs), runs


def compare(layer, marked, inputs, **kwargs):
    """Outputs and gradients of the parameters and of the features are PyG's; returns the programs that ran."""
    want, (got, runs) = plain_tree(layer(*inputs, **kwargs)), recorded(marked, *inputs, **kwargs)
    got = plain_tree(got)
    assert len(want) == len(got) and all(type(tensor) is torch.Tensor for tensor in got)
    for left, right in zip(got, want):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)
    leaves = [[inputs[0], *model.parameters()] for model in (marked, layer)]
    grads = [
        torch.autograd.grad(sum(t.sin().sum() for t in tensors), leaf, allow_unused=True)
        for tensors, leaf in zip((got, want), leaves)
    ]
    for left, right in zip(*grads):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)
    return runs


def plain_tree(result):
    leaves = torch.utils._pytree.tree_flatten(result)[0]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


@pytest.fixture
def inputs():
    drawn = Inputs(ZOO["self-loops"]())
    return drawn.x, drawn.edge_index


@pytest.mark.parametrize("kind", [pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv])
def test_attention_of_pyg_is_one_program(kind, inputs):
    layer, marked = twins(
        lambda: kind(FEATURES, WIDTH, heads=2, **({} if "Trans" in kind.__name__ else {"add_self_loops": False}))
    )
    runs = compare(layer, marked, inputs)
    assert [outputs for _, outputs, _ in runs] == [("0",)]
    # Attention that is asked for is computed too.
    assert len(compare(layer, marked, inputs, return_attention_weights=True)) == 2


def test_a_forward_that_kernels_refuse_at_first_leaves_nothing_behind():
    """Its values of edges go with its frames, so that none is computed that nothing reads."""
    _, marked = twins(lambda: pyg.GATConv(FEATURES, WIDTH, heads=2, edge_dim=3))
    drawn = Inputs(ZOO["self-loops"](), torch.float32)
    with emulated_device(), local_settings(fallback="error"), watched() as calls:
        marked.float()(drawn.x, drawn.edge_index, drawn.edge_attr)
    assert [reasons for *_, reasons in calls] == [[], []]


@pytest.mark.parametrize("what", ["kept", "read", "cleared"])
def test_attributes_are_pygs(what, inputs):
    layer, marked = twins(lambda: Kept(what))
    runs = compare(layer, marked, inputs)
    assert [outputs for _, outputs, _ in runs] == [("0",)] + ([] if what == "cleared" else [("self.alpha",)])
    if what != "cleared":
        assert type(marked.alpha) is torch.Tensor
        torch.testing.assert_close(marked.alpha, layer.alpha, rtol=1e-9, atol=1e-11)


def test_outside_of_a_forward_nothing_waits(inputs):
    _, marked = twins(lambda: Kept("kept"))
    _, runs = recorded(lambda x, edge_index: marked.propagate(edge_index, x=marked.lin(x)), *inputs)
    assert [outputs for _, outputs, _ in runs] == [("0", "self.alpha")] and type(marked.alpha) is torch.Tensor


@pytest.mark.parametrize("training", [True, False])
def test_values_that_are_passed_on_and_read(training, inputs):
    layer, marked = twins(Updated)
    runs = compare(layer.train(training), marked.train(training), inputs)
    # Joined to the first message, and alone for what the forward reads.
    assert [outputs for _, outputs, _ in runs] == [("0",)] * 3
    assert {"x_i", "x_j"} == {name.removeprefix("gate.") for name in runs[0][2]}


def test_an_edit_before_a_value_is_read_is_an_error(inputs):
    _, marked = twins(lambda: Kept("edited"))
    with pytest.raises(RuntimeError, match="'self.alpha' of Kept is read after a tensor that it is made of was edited"):
        recorded(marked, *inputs)


def test_functions_of_the_shape_compute_nothing(inputs):
    seen = []

    class Seen(Kept):
        def forward(self, x, edge_index):
            self.propagate(edge_index, x=self.lin(x))
            alpha = self.alpha
            seen.append(
                (isinstance(alpha, EdgeValue), alpha.shape, alpha.dtype, len(alpha), alpha.dim(), alpha.pending)
            )
            self.alpha = None
            return x

    _, marked = twins(Seen)
    _, runs = recorded(marked, *inputs)
    ((is_waiting, shape, dtype, length, dim, pending),) = seen
    edges = inputs[1].size(1)
    assert is_waiting and (shape, dtype, length, dim) == ((edges, 1), torch.float64, edges, 2) and pending is not None
    assert len(runs) == 1


def test_a_layer_that_keeps_what_it_computed_is_described(inputs):
    _, marked = twins(lambda: Kept("kept"))
    recorded(marked, *inputs)
    assert (
        not marked.alpha.is_leaf
        and pyg_dfgnn.describe_plan(marked.float(), inputs[0].float(), inputs[1], device="cuda").fused
    )


class Chained(traps.Layer):
    """Values of edges that are made of values of edges, which nothing else reads."""

    def forward(self, x, edge_index):
        first = self.edge_updater(edge_index, x=x, gate=None)
        second = self.edge_updater(edge_index, x=x, gate=first)
        return self.propagate(edge_index, x=x, gate=second)

    def edge_update(self, x_i, x_j, gate):
        own = (x_i * x_j).sum(-1, keepdim=True).tanh()
        return own if gate is None else own * gate + own

    def message(self, x_j, gate):
        return x_j * gate


class ChainedOverOthers(Chained):
    """The first values are of other edges than those that they are used for."""

    def forward(self, x, edge_index):
        first = self.edge_updater(edge_index.flip(0), x=x, gate=None)
        second = self.edge_updater(edge_index, x=x, gate=first)
        return self.propagate(edge_index, x=x, gate=second)


@needs_compiler
@pytest.mark.parametrize("kind", [Chained, ChainedOverOthers])
@pytest.mark.parametrize("on", [messages.interpreted, emulated_device])
def test_values_that_are_made_of_others(kind, on):
    generator = torch.Generator().manual_seed(0)
    x, edge_index = torch.randn(7, 8, generator=generator), torch.randint(7, (2, 15), generator=generator)
    x = x.to(torch.float64 if on is messages.interpreted else torch.float32).requires_grad_()
    for _ in range(2):
        assert traps.compare(traps.twins(kind), x, edge_index, on=on)
