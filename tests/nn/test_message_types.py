"""Messages that look tables up by the types of edges: PyG's numbers, and errors where a type is out of range."""

from typing import Optional

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import one_hot, scatter

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir import E, IndexSpace, One, R, interpret
from pyg_dfgnn.ir.program import Builder
from pyg_dfgnn.nn import messages
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.settings import local_settings
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.nn.message_cases import assert_results, twins, watched

pytestmark = pytest.mark.usefixtures("in_float64")
TYPES = 3
X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
EDGES = torch.tensor([[0, 1, 2, 3, 3, 5, 0, 1], [1, 2, 0, 4, 4, 4, 1, 1]])
KIND = torch.tensor([0, 1, 0, 2, 2, 1, 0, 1])


class Typed(MessagePassing):
    """Weights, scalars per head and embeddings of types, each looked up in another way."""

    def __init__(self):
        super().__init__(aggr="add")
        self.weight = torch.nn.Parameter(torch.randn(TYPES, 4, 4))
        self.scale = torch.nn.Parameter(torch.randn(TYPES, 2))
        self.embedding = torch.nn.Embedding(TYPES, 4)
        self.padded = torch.nn.Embedding(TYPES, 4, padding_idx=0)
        self.base = torch.nn.Parameter(torch.randn(2, 4))

    def forward(self, x, edge_index, kind):
        return self.propagate(edge_index, x=x, kind=kind)

    def message(self, x_j, kind):
        mapped = torch.bmm(x_j.unsqueeze(-2), self.weight[kind]).squeeze(-2)
        scale = self.scale.exp().index_select(0, kind.view(-1).long())
        table = torch.stack([self.base.sum(0), self.base[0], self.base[1]])
        return (mapped.view(-1, 2, 2) * scale.unsqueeze(-1)).flatten(1) * self.embedding(kind) + F.relu(table[kind])


class Several(Typed):
    """Types in a column, two types of an edge, rows without a gradient, tables of several sizes, masks, and counts."""

    def message(self, x_j, kind, index, edge_index_j, dim_size: Optional[int], size_j: Optional[int]):  # noqa: UP045
        sums = self.embedding(kind.view(-1)) + self.embedding(kind.flip(0)) + self.padded(kind)
        sums = (sums + self.base[kind.clamp(max=1)]) * (kind == 1).view(-1, 1)
        marks = one_hot(kind, TYPES, dtype=x_j.dtype)
        at_target = scatter(marks, index, 0, dim_size)[index]
        at_source = torch.zeros(size_j, TYPES).index_add(0, edge_index_j, marks).index_select(0, edge_index_j)
        counts = at_target.gather(1, kind.view(-1, 1)) + 2 * at_source.gather(1, kind.unsqueeze(1))
        return x_j / counts + sums + self.weight[0].index_select(1, kind).sum()


class Shown(Typed):
    """Mapped rows of edges that code outside of the region reads too."""

    def forward(self, x, edge_index, kind):
        row, col = edge_index
        mapped = torch.bmm(x[row].unsqueeze(1), self.weight[kind]).squeeze(1)
        moved = mapped + self.embedding(kind)
        shown = torch.sort(mapped.tanh() + moved, dim=0).values.sum(0)
        return torch.zeros_like(x).index_add(0, col, moved * x[col]) + shown


class Numbers(Typed):
    """Types that are numbers, and ids of rows of edges."""

    def message(self, x_j, kind):
        return x_j * kind.view(-1, 1) + x_j[kind]


def results(layer, x, *args):
    x = x.clone().requires_grad_()
    out = layer(x, *args)
    named = {"x": x, **dict(layer.named_parameters())}
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    gradients = torch.autograd.grad(out, list(named.values()), upstream, allow_unused=True, materialize_grads=True)
    return {"out": out, **dict(zip(named, gradients))}


@pytest.mark.parametrize("make", [Typed, Several, Shown, Numbers])
def test_types_are_used_as_pyg_does(make):
    layer, marked = twins(make)
    kind = KIND.clone()
    with messages.interpreted(), watched() as graphs:
        for args in ((EDGES, kind), (EDGES, kind), (EDGES.flip(0), kind.flip(0))):
            assert_results(results(marked, X, *args), results(layer, X, *args))
            kind[2] = 1
        assert len(graphs) == 1
        # Tables that change are seen.
        for module in (layer, marked):
            module.weight = torch.nn.Parameter(torch.ones(TYPES + 1, 4, 4))
            module.embedding = torch.nn.Embedding.from_pretrained(torch.ones(TYPES + 2, 4), freeze=False)
        assert_results(results(marked, X, EDGES, kind), results(layer, X, EDGES, kind))
    assert graphs.is_fused == (make is not Numbers)
    if make is Typed:
        # A parameter that is looked up has the rows of the relations.
        assert [value.op for value in graphs.programs[0].values if value.domain is R] == ["input"] * 4


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("make", [Typed, Shown])
def test_kernels_look_tables_up(make, dtype):
    layer, marked = twins(make)
    expected = results(layer, X, EDGES, KIND)
    with emulated_device(), local_settings(fallback="error"):
        actual = results(marked.float(), X.float(), EDGES, KIND.to(dtype))
    assert_results(actual, expected, **elementwise("float32/gradients"), check_dtype=False)


@pytest.mark.parametrize("run", [messages.interpreted, pytest.param(emulated_device, marks=needs_compiler)])
def test_a_type_out_of_range_is_an_error(run):
    _, marked = twins(Typed)
    for wrong in (-1, TYPES):
        kind = KIND.clone()
        kind[3] = wrong
        with run(), pytest.raises(ValueError, match=r"'edge_type' needs values in \[0, num_relations=3\)"):
            marked.float()(X.float(), EDGES, kind)


def test_types_that_a_forward_makes_are_known_by_what_they_are(monkeypatch):
    built, resolve = [], Graph.resolve
    monkeypatch.setattr(Graph, "resolve", staticmethod(lambda *key: built.append(len(key)) or resolve(*key)))
    (layer, marked), counts = twins(Typed), []
    with messages.interpreted():
        for kind in (KIND, KIND, KIND, KIND.flip(0), KIND, KIND):
            torch.testing.assert_close(marked(X, EDGES, kind.clone()), layer(X, EDGES, kind))
            counts.append(built.count(7))
    assert counts == [1, 2, 2, 3, 4, 4]


def test_a_table_of_other_rows_than_there_are_relations_is_refused():
    builder = Builder()
    table = builder.emit("table_rows", builder.input("table", One, (2, 4)), attrs=(R,))
    program = builder.build("lookup", {"out": builder.emit("gather", table, attrs=(E,))})
    rows = IndexSpace(Graph.of(EDGES, 6, edge_type=KIND, num_relations=TYPES))
    with pytest.raises(ValueError, match=r"'table_rows' needs 3 rows \(got 2\)"):
        interpret(program, rows, {"table": torch.ones(2, 4)})
