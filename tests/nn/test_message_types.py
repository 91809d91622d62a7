"""Messages that look tables up by the types of edges: PyG's numbers, and errors where a type is out of range."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import one_hot, scatter

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir import E, One, R, Rows, interpret
from pyg_dfgnn.ir.program import Builder
from pyg_dfgnn.nn import messages
from pyg_dfgnn.settings import local_settings
from tests.kernels.emulated import emulated_device
from tests.nn.message_cases import assert_results, twins, watched

pytestmark = pytest.mark.usefixtures("in_float64")
TYPES = 3
X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
EDGES = torch.tensor([[0, 1, 2, 3, 3, 5, 0, 1], [1, 2, 0, 4, 4, 4, 1, 1]])
KIND = torch.tensor([0, 1, 0, 2, 2, 1, 0, 1])


class Typed(MessagePassing):
    """Weights, scalars per head and embeddings of types, each looked up in another way."""

    def __init__(self, what="all"):
        super().__init__(aggr="add")
        self.what = what
        self.weight = torch.nn.Parameter(torch.randn(TYPES, 4, 4))
        self.scale = torch.nn.Parameter(torch.randn(TYPES, 2))
        self.embedding = torch.nn.Embedding(TYPES, 4)
        self.padded = torch.nn.Embedding(TYPES, 4, padding_idx=0)
        self.base = torch.nn.Parameter(torch.randn(2, 4))

    def forward(self, x, edge_index, kind, other=None):
        return self.propagate(edge_index, x=x, kind=kind, other=kind if other is None else other)

    def message(self, x_j, kind, other):
        if self.what == "column":
            return x_j + self.embedding(kind.view(-1))  # says why
        if self.what == "padding":
            return x_j + self.padded(kind)  # says why
        if self.what == "two":
            return x_j + self.embedding(kind) + self.embedding(other)  # says why
        if self.what == "sizes":
            return x_j + self.embedding(kind) + self.base[kind]  # says why
        if self.what == "numbers":
            return x_j * kind.view(-1, 1)  # says why
        if self.what == "rows":
            return x_j[kind]  # says why
        if self.what == "columns":
            return x_j + self.base.index_select(1, kind)  # says why
        if self.what == "counts":
            return x_j * one_hot(kind, TYPES, dtype=x_j.dtype).sum(-1, keepdim=True)  # says why
        if self.what == "mask":
            return x_j * (kind == 1).view(-1, 1)  # says why
        mapped = torch.bmm(x_j.unsqueeze(-2), self.weight[kind]).squeeze(-2)
        scale = self.scale.exp().index_select(0, kind.view(-1).long())
        table = torch.stack([self.base.sum(0), self.base[0], self.base[1]])
        return (mapped.view(-1, 2, 2) * scale.unsqueeze(-1)).flatten(1) * self.embedding(kind) + F.relu(table[kind])


class Counted(MessagePassing):
    """A mean among the edges of a type, by counts of types at both ends."""

    def __init__(self):
        super().__init__(aggr="add", flow="target_to_source")

    def forward(self, x, edge_index, kind):
        return self.propagate(edge_index, x=x, kind=kind)

    def message(self, x_j, kind, index, edge_index_j, dim_size, size_j):
        at_target = scatter(one_hot(kind, TYPES, dtype=x_j.dtype), index, 0, dim_size)[index]
        marks = F.one_hot(kind, TYPES).to(x_j.dtype)
        at_source = torch.zeros(size_j, TYPES).index_add(0, edge_index_j, marks).index_select(0, edge_index_j)
        return x_j / (at_target.gather(1, kind.view(-1, 1)) + 2 * at_source.gather(1, kind.unsqueeze(1)))


def results(layer, x, *args):
    x = x.clone().requires_grad_()
    out = layer(x, *args)
    named = {"x": x, **dict(layer.named_parameters())}
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    gradients = torch.autograd.grad(out, list(named.values()), upstream, allow_unused=True, materialize_grads=True)
    return {"out": out, **dict(zip(named, gradients))}


def check(layer, marked, *args, x=X):
    with messages.interpreted(), watched() as calls:
        actual = results(marked, x, *args)
    assert calls[0][2].program is not None, calls[0][3]
    assert_results(actual, results(layer, x, *args))
    return calls[0][2]


@pytest.mark.parametrize("make", [Typed, Counted])
def test_tables_are_looked_up_as_pyg_does(make):
    layer, marked = twins(make)
    trace = check(layer, marked, EDGES, KIND)
    assert check(layer, marked, EDGES.flip(0), KIND.flip(0)) is trace
    if make is Typed:
        # A parameter that is only looked up has the rows of the relations; what is computed of parameters gets them.
        assert {(v.op, v.domain) for v in trace.program.values if v.domain is R} == {("input", R), ("unstack", R)}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_kernels_look_tables_up(dtype):
    layer, marked = twins(Typed)
    expected = results(layer, X, EDGES, KIND)
    with emulated_device(), local_settings(fallback="error"):
        actual = results(marked.float(), X.float(), EDGES, KIND.to(dtype))
    assert_results(actual, expected, rtol=1e-4, atol=1e-4, check_dtype=False)


@pytest.mark.parametrize("run", [messages.interpreted, emulated_device])
@pytest.mark.parametrize("wrong", [-1, TYPES])
def test_a_type_out_of_range_is_an_error(wrong, run):
    _, marked = twins(Typed)
    kind = KIND.clone()
    kind[3] = wrong
    with run(), pytest.raises(ValueError, match=r"'edge_type' needs values in \[0, num_relations=3\)"):
        marked.float()(X.float(), EDGES, kind)


def test_types_of_another_form_or_device_are_pygs():
    layer, marked = twins(lambda: Typed("column"))
    check(layer, marked, EDGES, KIND)
    with messages.interpreted(), watched() as calls:
        torch.testing.assert_close(marked(X, EDGES, KIND.view(-1, 1)), layer(X, EDGES, KIND.view(-1, 1)))
        marked(X, EDGES, KIND.to("meta"))
    assert "# says why" in calls[0][3][0]
    assert calls[1][3] == ["'kind' is on meta and edge_index on cpu"]


def test_types_and_tables_that_change_are_seen():
    layer, marked = twins(Typed)
    kind = KIND.clone()
    trace = check(layer, marked, EDGES, kind)
    kind[2] = 1
    assert check(layer, marked, EDGES, kind) is trace
    for module in (layer, marked):
        module.weight = torch.nn.Parameter(torch.ones(TYPES + 1, 4, 4))
        module.scale = torch.nn.Parameter(torch.ones(TYPES + 1, 2))
        module.embedding = torch.nn.Embedding.from_pretrained(torch.ones(TYPES + 1, 4))
        module.base = torch.nn.Parameter(torch.ones(3, 4))
    # Tables of several sizes are PyG's, and so is what it says of them.
    with messages.interpreted(), watched() as calls:
        torch.testing.assert_close(marked(X, EDGES, kind), layer(X, EDGES, kind))
    assert calls[0][2].program is None and "4 of 'kind' and 3 of 'kind'" in calls[0][3][0]


def test_types_that_a_forward_makes_are_known_by_what_they_are(monkeypatch):
    built = []
    resolve = Graph.resolve
    monkeypatch.setattr(Graph, "resolve", staticmethod(lambda *key: built.append(len(key)) or resolve(*key)))
    layer, marked = twins(Typed)
    counts = []
    with messages.interpreted():
        for kind in (KIND, KIND, KIND, KIND.flip(0), KIND, KIND):
            torch.testing.assert_close(marked(X, EDGES, kind.clone()), layer(X, EDGES, kind))
            counts.append(built.count(7))
            gc.collect()
    assert counts == [1, 2, 2, 3, 4, 4]


@pytest.mark.parametrize("what", ["padding", "two", "sizes", "numbers", "rows", "columns", "counts", "mask"])
@pytest.mark.filterwarnings("ignore")
def test_other_uses_of_types_are_refused(what):
    layer, marked = twins(lambda: Typed(what))
    other = KIND.flip(0)
    kind = KIND.clamp(max=1) if what in ("sizes", "columns") else KIND
    with messages.interpreted(), watched() as calls:
        try:
            result = marked(X, EDGES, kind, other)
        except RuntimeError:
            assert what == "columns"
        else:
            torch.testing.assert_close(result, layer(X, EDGES, kind, other))
    assert calls[0][2].program is None and "# says why" in calls[0][3][0]


def test_a_table_of_other_rows_than_there_are_relations_is_refused():
    builder = Builder()
    table = builder.emit("unstack", builder.input("table", One, (2, 4)), attrs=(R,))
    program = builder.build("lookup", {"out": builder.emit("gather", table, attrs=(E,))})
    rows = Rows(Graph.of(EDGES, 6, edge_type=KIND, num_relations=TYPES))
    with pytest.raises(ValueError, match=r"'unstack' needs 3 rows \(got 2\)"):
        interpret(program, rows, {"table": torch.ones(2, 4)})
