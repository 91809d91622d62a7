"""Products of rows with a parameter, summed, in the forward of a compiled layer: one kernel, and torch's results."""

import linecache
import traceback
import warnings
from types import FunctionType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv, MessagePassing

import pyg_dfgnn
from pyg_dfgnn.nn.messages.spec import original
from pyg_dfgnn.nn.messages.terms import with_terms
from pyg_dfgnn.reference.tolerances import assert_all_close
from tests.emu import needs_compiler
from tests.nn.message_forwards import NODES, WIDTH, Functions, compiled_calls, edges, features, outputs_and_gradients

pytestmark = [needs_compiler, pytest.mark.filterwarnings("ignore")]
HEADS, CHANNELS = 2, 4


class Gated(MessagePassing):
    """Messages with a gate of a term of each end."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.lin = nn.Linear(WIDTH, HEADS * CHANNELS)
        self.first, self.second = (nn.Parameter(torch.randn(1, HEADS, CHANNELS)) for _ in range(2))

    def forward(self, x, edge_index):
        x = self.lin(x).view(-1, HEADS, CHANNELS)
        first, second = (x * self.first).sum(dim=-1), (x * self.second).sum(dim=-1)
        return self.propagate(edge_index, x=x, first=first, second=second).flatten(1)

    def message(self, x_j, first_j, second_i):
        return x_j * torch.sigmoid(first_j + second_i).unsqueeze(-1)


class MyGAT(GATConv):
    """PyG's as a user restates it."""


class OtherWords(Gated):
    """Names that Python mangles, a vector without a leading one, other spellings, a base class that is asked."""

    def __init__(self):
        super().__init__()
        self.__first = nn.Parameter(torch.randn(HEADS, CHANNELS))

    def forward(self, x, edge_index):
        super().reset_parameters()
        x = self.lin(x).view(-1, HEADS, CHANNELS)
        first, second = torch.sum(self.__first * x, -1), (self.second * x.tanh()).sum(-1)
        return self.propagate(edge_index, x=x, first=first, second=second).flatten(1)


class OneHead(Gated):
    """Rows without heads."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x, edge_index):
        x = self.lin(x)
        first, second = (x * self.first).sum(-1), (x * self.second).sum(-1)
        return self.propagate(edge_index, x=x, first=first, second=second)


class Stepped(Gated):
    """`step` (layer, x) gives both terms."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def forward(self, x, edge_index):
        x = self.lin(x).view(-1, HEADS, CHANNELS)
        first, second = self.step(self, x)
        third = (x * self.second).sum(dim=-1)
        return self.propagate(edge_index, x=x, first=first, second=second + third).flatten(1)


def check(layer, launched, terms=2, gradients=None):
    """Calls of the compiled layer equal PyG's in float64, with so many launches for terms, and for their gradients."""
    compiled, counts = compiled_calls(layer, launched)
    assert all(n["attention_terms"] == terms for n in counts)
    assert all(n["attention_terms_backward"] == (terms if gradients is None else gradients) for n in counts)
    return compiled


@pytest.mark.parametrize(
    "layer",
    [
        Gated(),
        MyGAT(WIDTH, CHANNELS, heads=HEADS),
        MyGAT((WIDTH, WIDTH), CHANNELS, heads=HEADS, add_self_loops=False),
        OtherWords(),
        OneHead(),
    ],
    ids=["gated", "GATConv", "bipartite GATConv", "other words", "one head"],
)
def test_equals_pyg(layer, launched):
    check(layer, launched)


@pytest.mark.parametrize("layer", [Gated(), MyGAT(WIDTH, CHANNELS, heads=HEADS)], ids=["gated", "GATConv"])
def test_all_calls_have_the_same_bits(layer, launched):
    compiled = pyg_dfgnn.accelerate(layer)
    first, second = (outputs_and_gradients(compiled, features()) for _ in range(2))
    assert first.keys() == second.keys() and all(map(torch.equal, first.values(), second.values()))


def edit_between(layer, x):
    first = (x * layer.first).sum(dim=-1)
    x = x + 1
    return first, (x * layer.second).sum(dim=-1)


def without_gradient(layer, x):
    with torch.no_grad():
        first = (x * layer.first).sum(dim=-1)
    return first, (x * layer.second).sum(dim=-1)


def checkpoint_one(layer, x):
    first = checkpoint(lambda x: (x * layer.first).sum(dim=-1), x, use_reentrant=False)
    return first, (x * layer.second).sum(dim=-1)


@pytest.mark.parametrize("step", [edit_between, without_gradient, checkpoint_one], ids=lambda step: step.__name__)
def test_what_users_do(step, launched):
    """Functions of others are left alone."""
    check(Stepped(step), launched, 1)


class Edited(Gated):
    """Edits the rows after one term, or the terms."""

    def __init__(self, edits):
        super().__init__()
        self.edits = edits

    def forward(self, x, edge_index):
        x = self.lin(x).view(-1, HEADS, CHANNELS)
        first = (x.clone() * self.first).sum(dim=-1)
        if self.edits == "rows":
            x *= 2
        second = (x * self.second).sum(dim=-1)
        if self.edits == "terms":
            second += first
        return self.propagate(edge_index, x=x, first=first, second=second).flatten(1)


@pytest.mark.parametrize("edits", ["rows", "terms"])
def test_edits_in_place(edits, launched):
    check(Edited(edits), launched)


def test_a_frozen_vector_and_rows_that_are_edited(launched):
    """Torch does not keep the rows for a vector without gradients, so that they may be edited."""

    class Frozen(Gated):
        def forward(self, x, edge_index):
            x = self.lin(x).view(-1, HEADS, CHANNELS)
            first = (x * self.first).sum(dim=-1)
            x.relu_()
            second = (x * self.second).sum(dim=-1)
            return self.propagate(edge_index, x=x, first=first, second=second).flatten(1)

    layer = Frozen()
    layer.first.requires_grad_(False)
    check(layer, launched, 1)


class Unread(Gated):
    """Asks for a term that its messages do not read."""

    def message(self, x_j, first_j, second_i):
        return x_j * torch.sigmoid(first_j).unsqueeze(-1)


def test_a_term_that_is_not_read_gives_no_gradient(launched):
    layer = check(Unread(), launched, gradients=1)
    assert layer.second.grad is None


class Branch(Gated):
    """Leaves one term out, or none."""

    leaves = False

    def forward(self, x, edge_index):
        x = self.lin(x).view(-1, HEADS, CHANNELS)
        first = (x * self.first).sum(dim=-1)
        second = first if self.leaves else (x * self.second).sum(dim=-1)
        return self.propagate(edge_index, x=x, first=first, second=second).flatten(1)


def test_a_branch_that_leaves_a_term_out(launched):
    compiled = check(Branch(), launched)
    compiled.leaves, compiled.second.grad = True, None
    results = outputs_and_gradients(compiled, features())
    assert "second" not in results


def test_terms_of_rows_without_heads_are_no_views(launched):
    layer = pyg_dfgnn.accelerate(OneHead())
    term = layer._pyg_dfgnn_product(torch.randn(NODES, WIDTH), layer.first.detach(), True).sum(-1)
    assert term.shape == (NODES,) and not term._is_view() and launched == ["attention_terms"]


def test_modes_of_torch_see_each_function(launched):
    compiled = pyg_dfgnn.accelerate(Gated())
    with Functions() as mode:
        compiled(features(), edges())
    assert (
        "attention_terms" not in launched
        and mode.seen.count(torch.Tensor.mul) == mode.seen.count(torch.Tensor.sum) == 2
    )
    with torch.device("cpu"):
        compiled(features(), edges())
    assert "attention_terms" in launched


class Operand:
    """Knows on which side of a product it stands, and how it is summed."""

    def __mul__(self, other):
        self.side = "left"
        return self

    def __rmul__(self, other):
        self.side = "right"
        return self

    def sum(self, *args, **kwargs):
        return self.side, args, kwargs


def test_operands_stay_on_their_sides(launched):
    """What is no tensor is multiplied and summed as the user wrote it."""

    class Sides(Gated):
        def forward(self, x, edge_index):
            return [(x * self.a).sum(dim=-1), (self.a * x).sum(-1)]

    layer = pyg_dfgnn.accelerate(Sides())
    layer.a = Operand()
    assert layer(2, edges()) == [("right", (), {"dim": -1}), ("left", (-1,), {})]


@pytest.mark.parametrize("second", ["complex64", "float64", "sparse"])
def test_vectors_that_no_kernel_takes(second, launched):
    layer = pyg_dfgnn.accelerate(OneHead()).requires_grad_(False)
    x, vector = torch.randn(NODES, WIDTH), torch.randn(1, WIDTH)
    vector = vector.to_sparse() if second == "sparse" else vector.to(getattr(torch, second))
    if second != "sparse":
        assert torch.equal(layer._pyg_dfgnn_product(x, vector, True).sum(-1), (x * vector).sum(-1))
    else:
        assert layer._pyg_dfgnn_product(vector, vector, True).is_sparse
    assert launched == []


def test_what_no_kernel_takes_is_torch(launched):
    """Other kinds of numbers, autocast, vectors of other shapes, and without compiled messages."""
    compiled, plain = pyg_dfgnn.accelerate(Gated()), Gated()
    plain.load_state_dict(compiled.state_dict())
    assert torch.equal(
        compiled.double()(features(torch.float64), edges()), plain.double()(features(torch.float64), edges())
    )
    compiled.float(), plain.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled(features(), edges())
    with pyg_dfgnn.local_settings(compile_messages=False):
        assert torch.equal(compiled(features(), edges()), plain(features(), edges()))
    compiled.second = nn.Parameter(torch.randn(NODES, HEADS, CHANNELS))
    compiled(features(), edges())
    assert launched.count("attention_terms") == 1


def test_numbers_of_16_bits(launched):
    """The result is in the dtype that torch gives it."""
    layer = pyg_dfgnn.accelerate(Gated().bfloat16()).requires_grad_(False)
    x = torch.randn(NODES, HEADS, CHANNELS).bfloat16()
    term = layer._pyg_dfgnn_product(x, layer.first, True).sum(-1)
    assert term.dtype is torch.bfloat16 and launched == ["attention_terms"]
    assert_all_close({"term": (term, (x.double() * layer.first.double()).sum(-1))})
    assert layer._pyg_dfgnn_product(x, layer.first.float(), True).sum(-1).dtype is torch.float32


def test_second_derivatives_of_a_term(launched):
    layer, results = pyg_dfgnn.accelerate(Gated()), []
    x = torch.randn(NODES, HEADS, CHANNELS)
    for dtype in (torch.float32, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_(), layer.first.detach().to(dtype).requires_grad_()]
        term = layer._pyg_dfgnn_product(*leaves, True).sum(-1)
        grads = torch.autograd.grad(term.sin().sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves))
    assert_all_close({str(place): pair for place, pair in enumerate(zip(*results, strict=True))})
    assert launched[0] == "attention_terms"


def test_errors_name_the_line_of_the_user(launched):
    compiled = pyg_dfgnn.accelerate(Gated())
    compiled.second = nn.Parameter(torch.randn(1, HEADS, 5))
    with pytest.raises(RuntimeError, match="size") as error:
        compiled(features(), edges())
    lines = [frame.line for frame in traceback.extract_tb(error.value.__traceback__) if frame.filename == __file__]
    assert any("(x * self.second).sum(dim=-1)" in line for line in lines)


class Spread(Gated):
    """A product on several lines."""

    def forward(self, x, edge_index):
        x = self.lin(x).view(-1, HEADS, CHANNELS)
        first = (
            x
            * self.first
        ).sum(
            dim=-1,
        )  # fmt: skip
        return self.propagate(edge_index, x=x, first=first, second=first).flatten(1)


def test_lines_of_a_product_on_several(launched):
    forward = Spread.forward
    assert {line for *_, line in with_terms(forward).__code__.co_lines() if line} == {
        line for *_, line in forward.__code__.co_lines() if line
    }
    compiled = pyg_dfgnn.accelerate(Spread())
    compiled.first = nn.Parameter(torch.randn(1, HEADS, 5))
    with pytest.raises(RuntimeError, match="size") as error:
        compiled(features(), edges())
    frames = [frame for frame in traceback.extract_tb(error.value.__traceback__) if frame.filename == __file__]
    assert frames[-1].line == "x"


def made_of(text, name, source=None):
    """A function whose file is said to have a text, which it was compiled from unless `source` is given."""
    names: dict[str, FunctionType] = {"torch": torch}
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    exec(compile(source or text, name, "exec"), names)
    return names["forward"]


FORWARD = "def forward(self, x):\n    return (x * self.a).sum(-1)\n"


@pytest.mark.parametrize(
    ("text", "is_replaced"),
    [
        (FORWARD, True),
        (FORWARD.replace("-1", "dim=-1"), True),
        (FORWARD.replace("-1", "axis=-1"), True),
        (FORWARD.replace("(x * self.a).sum(-1)", "torch.sum(x * self.a, dim=-1)"), True),
        (FORWARD.replace("x * self.a", "self.a * x.relu()"), True),
        (FORWARD.replace("-1", "1"), False),
        (FORWARD.replace("-1", ""), False),
        (FORWARD.replace("-1", "-1, keepdim=True"), False),
        (FORWARD.replace("self.a", "x"), False),
        (FORWARD.replace("*", "+"), False),
        (FORWARD.replace("(x * self.a).sum(-1)", "[(y * self.a).sum(-1) for y in x]"), False),
        (FORWARD.replace("(x * self.a).sum(-1)", "x.sum(), lambda self: (x * self.a).sum(-1)"), False),
        (FORWARD.replace("x)", "x, torch)").replace("(x * self.a).sum(-1)", "torch.sum(x * self.a, -1)"), False),
        (FORWARD.replace("    return", "    self = self.other\n    return"), False),
        ("import math as torch\n" + FORWARD.replace("(x * self.a).sum(-1)", "torch.sum(x * self.a, -1)"), False),
    ],
)
def test_what_is_replaced(text, is_replaced):
    forward = made_of(text, "<text of a test>")
    assert (with_terms(forward) is not forward) is is_replaced


def test_a_source_that_is_not_that_of_the_forward():
    """An edited file, one that is not there, and text that is no Python."""
    for other in (FORWARD.replace("x *", "2 * x *"), FORWARD.replace("forward", "backward"), "", "def ("):
        forward = made_of(other, "<text of a test>", FORWARD)
        assert with_terms(forward) is forward


def test_forwards_that_cannot_be_compiled_alone(recwarn):
    """Variables of a function around it, and text that Python warns of."""
    count = 0

    class Counts(Gated):
        def forward(self, x, edge_index):
            nonlocal count
            count += 1
            return (x * self.first).sum(-1)

    assert with_terms(Counts.forward) is Counts.forward
    recwarn.clear()
    warns = 'def other():\n    """\\s"""\n    assert (1, "always")\n' + FORWARD
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forward = made_of(warns, "<text of a test>")
    assert with_terms(forward) is not forward and not recwarn.list


def test_the_class_keeps_its_forward(launched):
    before = Gated.forward
    layer = pyg_dfgnn.accelerate(Gated())
    assert original(type(layer).forward) is original(before)
    restored = pyg_dfgnn.restore(layer)
    restored(features(), edges())
    assert "attention_terms" not in launched
