"""Forms of layers equal PyG's on all kinds of graphs, in float64, with every gradient."""

import copy

import pytest
import torch

from tests.frontend.forms import FORMS, LargestOfAsManyAsThereAre, RowsOfPairs, scatter_package
from tests.frontend.layers import EDGE, FUSED, PARTLY, WIDTH
from tests.frontend.marks import compile_layer
from tests.frontend.test_layers import assert_equal, results

GRAPHS = {
    "random": (11, torch.randint(0, 11, (2, 37), generator=torch.Generator().manual_seed(2))),
    "larger": (17, torch.randint(0, 17, (2, 60), generator=torch.Generator().manual_seed(3))),
    "isolated": (9, torch.tensor([[0, 1, 2, 2], [1, 1, 0, 2]])),
    "duplicates": (6, torch.tensor([[3, 3, 3, 1, 1, 5, 5], [2, 2, 2, 2, 2, 0, 0]])),
    "as-many-edges": (5, torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 4]])),
    "one-node": (1, torch.zeros(2, 4, dtype=torch.int64)),
    "empty": (5, torch.zeros(2, 0, dtype=torch.int64)),
}
"""Nodes and edges of calls one after another."""


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_layers_equal_pygs(name, captured):
    kind, what = FORMS[name]
    torch.manual_seed(0)
    layer = kind().double()
    own = copy.deepcopy(layer)
    compile_layer(layer)
    for nodes, edge_index in GRAPHS.values():
        x = torch.randn(*getattr(kind, "batch", ()), nodes, WIDTH, dtype=torch.float64, requires_grad=True)
        edge = torch.randn(edge_index.size(1), EDGE, dtype=torch.float64, requires_grad=True)
        args = x, edge_index, edge
        assert_equal(results(layer, [x, edge], args), results(own, [x, edge], args))
    every, inside = captured[0].counts
    assert every and {FUSED: inside == every, PARTLY: 0 < inside < every}[what]
    assert all(not region.reasons for graph in captured for region in graph.regions)


@pytest.mark.parametrize("sizes", [(4, 9), (9, 4)])
def test_rows_of_pairs_equal_pygs(sizes, captured):
    layer, own = compile_layer(RowsOfPairs().double()), RowsOfPairs().double()
    for edges in (23, 31, 0):
        leaves = [torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=True) for rows in sizes]
        leaves.append(torch.randn(edges, EDGE, dtype=torch.float64, requires_grad=True))
        edge_index = torch.stack([torch.randint(0, rows, (edges,)) for rows in sizes])
        args = leaves[0], leaves[1], edge_index, leaves[2]
        assert_equal(results(layer, leaves, args), results(own, leaves, args))
    assert captured[0].counts == (4, 4)


def test_group_of_nothing_but_infinities_is_empty_for_the_package():
    class Masked(torch.nn.Module):
        def forward(self, x, edge_index):
            row, col = edge_index
            scores = x[row].masked_fill(x[row] < 0, -torch.inf)
            most, place = scatter_package.scatter_max(scores, col, dim=0, dim_size=x.size(0))
            least, other = scatter_package.scatter_min(-scores, col, dim=0, dim_size=x.size(0))
            return most, place, least, other

    layer, x = compile_layer(Masked()), torch.tensor([[-1.0, 2.0], [-3.0, 4.0], [5.0, -1.0]])
    edge_index = torch.tensor([[0, 1, 2, 1], [0, 0, 1, 1]])
    torch.testing.assert_close(layer(x, edge_index), Masked()(x, edge_index))
    most, place, _, _ = layer(x, edge_index)
    assert most.tolist() == [[0.0, 4.0], [5.0, 4.0], [0.0, 0.0]] and place.tolist() == [[4, 1], [2, 3], [4, 4]]


def test_numbers_that_share_a_maximum_share_its_gradient(captured):
    layer = compile_layer(LargestOfAsManyAsThereAre())
    x, edge_index = torch.ones(3, 2, requires_grad=True), torch.tensor([[0, 1], [2, 2]])
    (gradient,) = torch.autograd.grad(layer(x, edge_index, torch.ones(2, 1)).sum(), x)
    assert gradient.tolist() == [[0.5, 0.5], [0.5, 0.5], [1.0, 1.0]] and captured[0].regions
