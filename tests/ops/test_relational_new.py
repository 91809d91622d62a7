"""Programs on all pairs of new edges equal those on listed pairs, in outputs and gradients."""

import pytest
import torch

from pyg_dfgnn.errors import IdRangeError
from pyg_dfgnn.ir import D, IndexSpace, R, S, U, V, interpret
from pyg_dfgnn.ir.dense_pairs import takes
from pyg_dfgnn.ir.domains import Td, Ts
from pyg_dfgnn.ops.relational.new_edges import apply_to_new, pairs_of, program_on_new
from pyg_dfgnn.reference.tolerances import elementwise
from tests.covering import over
from tests.ir.cases import GRAPHS, PROGRAMS, case, graph_of, rows_named


def is_taken(program):
    domains = {program.values[i].domain for i in {i for _, i in program.outputs} | set(program.inputs.values())}
    return domains.isdisjoint({U, V, Ts, Td}) and takes(program)


TAKEN = tuple(
    name for name, program in PROGRAMS.items() if R in {v.domain for v in program.values} and is_taken(program)
)


def pairs_named(name):
    graph = graph_of(GRAPHS[name])
    return pairs_of(graph.edge_index, graph.relation, (graph.num_src, graph.num_dst, graph.num_relations))


def test_the_programs_of_loops_over_relations_are_taken():
    assert {"rgcn-mean", "rgcn-sum"} <= set(TAKEN) and any(name.startswith("rgat") for name in TAKEN)


@over([("name", "graph")], name=TAKEN, graph=tuple(GRAPHS))
def test_programs_equal_those_on_listed_pairs(name, graph):
    program, rows = PROGRAMS[name], rows_named(graph)
    assert isinstance(rows, IndexSpace)
    inputs = case(program, graph).inputs
    leaves = {key: x for key, x in inputs.items() if x.is_floating_point()}
    results = []
    for run in (lambda: interpret(program, rows, inputs), lambda: apply_to_new(program, pairs_named(graph), inputs)):
        for x in leaves.values():
            x.requires_grad_()
        outputs = run()
        upstream = [torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y) for y in outputs.values()]
        used = [(y, grad) for y, grad in zip(outputs.values(), upstream, strict=True) if y.requires_grad]
        ends, seeds = map(list, zip(*used, strict=True))
        grads = torch.autograd.grad(ends, list(leaves.values()), seeds, allow_unused=True)
        results.append((outputs, grads, upstream))
    (want, gradients, upstream), (got, others, _) = results
    for key, y in want.items():
        torch.testing.assert_close(got[key], y, **elementwise("float64"))
    for grad, other in zip(gradients, others, strict=True):
        assert (grad is None) == (other is None)
        if grad is not None:
            torch.testing.assert_close(other, grad, **elementwise("float64"))
    # The same by the program of the gradients, which compiled calls run.
    wrt = tuple(key for key, grad in zip(leaves, gradients, strict=True) if grad is not None)
    given = {**inputs, **{f"d_{key}": grad for key, grad in zip(want, upstream, strict=True)}}
    pairs = pairs_named(graph)
    backward = program_on_new(program, pairs.sizes, wrt)
    assert backward is not None
    with torch.no_grad():
        found = interpret(backward, pairs, {key: given[key] for key in backward.inputs})
    for key in wrt:
        torch.testing.assert_close(found["d_" + key], gradients[list(leaves).index(key)], **elementwise("float64"))


@pytest.mark.parametrize(
    ("row", "wrong", "text"),
    [
        (0, 5, r"'edge_index' needs source ids in \[0, 5\) \(got 0 to 5\)"),
        (1, -1, r"'edge_index' needs target ids in \[0, 4\) \(got -1 to 3\)"),
        (2, 3, r"'edge_type' needs relations in \[0, 3\) \(got 0 to 3\)"),
    ],
)
def test_ids_out_of_range_are_named(row, wrong, text):
    ends, relation = torch.tensor([[0, 1, 2], [3, 0, 1]]), torch.tensor([0, 1, 2])
    (ends if row < 2 else relation.view(1, -1))[row % 2 if row < 2 else 0, 1] = wrong
    with pytest.raises(IdRangeError, match=text):
        pairs_of(ends, relation, (5, 4, 3))


def test_edits_of_edges_are_seen():
    ends, relation = torch.tensor([[0, 1, 2], [3, 0, 1]]), torch.tensor([0, 1, 2])
    pairs_of(ends, relation, (5, 4, 3))
    relation[0] = 7
    with pytest.raises(IdRangeError, match="'edge_type'"):
        pairs_of(ends, relation, (5, 4, 3))


def test_no_relation_without_edges_or_nodes():
    pairs = pairs_of(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), (0, 0, 3))
    assert pairs.index(U, S).shape == pairs.index(V, D).shape == (0,)
    with pytest.raises(ValueError, match="'edge_type' needs shape"):
        pairs_of(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), (1, 1, 1))
