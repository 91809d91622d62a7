"""A program in three parts gives what it gives as a whole."""

import pytest
import torch

from pyg_dfgnn.ir import D, E, One, S, interpret, max_to, relational, softmax, sum_to, to
from pyg_dfgnn.ir.parts import parts_of
from pyg_dfgnn.ir.passes import Passes
from tests.ir.cases import ALL_GRAPHS, PROGRAMS, rows_of


@relational
def network(x: S, xd: D, edge: E, w: One, we: One, att: One):
    """Products of nodes before, a softmax in between, products of results after."""
    hidden = (x @ w + xd @ w + edge @ we).apply("tanh")
    share = softmax((hidden @ att).apply("sigmoid"), among=D)
    out = sum_to(D, hidden * share)
    hidden = hidden * 0.5
    return {"out": (out @ w).apply("relu") + 1.0, "edges": hidden, "x": x, "most": max_to(D, hidden) + out}


@relational
def to_sources(x: S, xd: D):
    return sum_to(S, (to(E, x) * xd).apply("exp"))


@relational
def to_all(x: S, xd: D):
    return sum_to(D, to(E, x) / sum_to(One, (to(E, x) * xd).apply("exp")))


def ran(parts, rows, inputs):
    known = dict(inputs)
    for part in parts:
        known |= interpret(part, rows, {name: known[name] for name in part.inputs})
    return {name: known[name] for name, _ in parts.after.outputs}


@pytest.mark.parametrize("graph", ALL_GRAPHS)
@pytest.mark.parametrize("optimised", [False, True])
def test_parts_give_what_the_whole_gives(graph, optimised):
    rows = rows_of(ALL_GRAPHS[graph])
    sizes = {"w": (4, 4), "we": (3, 4), "att": (4, 1)}
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (rows.sizes[S], 4), "xd": (rows.sizes[D], 4), "edge": (rows.sizes[E], 3), **sizes}
    inputs = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    program = network.program(x=(4,), xd=(4,), edge=(3,), **sizes)
    program = Passes().run(program, rows.sizes) if optimised else program
    want, parts = interpret(program, rows, inputs), parts_of(program)
    assert parts is not None and not any(v.domain is E and v.op != "input" for v in parts.before.values)
    assert not any(value.domain is E and value.op != "input" for value in parts.after.values)
    got = ran(parts, rows, inputs)
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name])


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_cannot_be_split_by_targets_has_no_parts(name):
    program = PROGRAMS[name]
    is_split = parts_of(program) is not None
    assert is_split == all(program.values[i].domain in (One, S, D, E) for i in program.live)


@pytest.mark.parametrize("function", [to_sources, to_all])
def test_sums_to_others_than_targets_have_no_parts(function):
    assert parts_of(function.program(x=(4,), xd=(4,))) is None
