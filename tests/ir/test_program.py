"""Domains, the front end with its errors, the text dump, and what the interpreter refuses."""

from itertools import product

import pytest
import torch

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir import D, Domain, E, IndexSpace, One, R, S, Td, Ts, U, V, interpret, relational, softmax, sum_to
from pyg_dfgnn.ir.domains import determines, join
from pyg_dfgnn.ir.layers import rgcn_mean
from pyg_dfgnn.ir.passes import PASSES, differentiate, optimise
from pyg_dfgnn.ir.program import Builder


def test_joins_are_least_upper_bounds():
    for pair in product(Domain, repeat=2):
        bounds = [d for d in Domain if all(determines(d, x) for x in pair)]
        assert join(*pair) in bounds and all(determines(bound, join(*pair)) for bound in bounds)
    assert join(S, R) is U and join(D, R) is V and join(U, V) is E and join(S, Ts) is S and join(Ts, Td) is E
    assert join(One, R) is R and join(U, Ts) is U


def test_order_is_one():
    for x, y, z in product(Domain, repeat=3):
        assert determines(x, x)
        assert not (determines(x, y) and determines(y, x)) or x is y
        assert not (determines(x, y) and determines(y, z)) or determines(x, z)


DUMP = """\
program rgcn_mean
  %0 = input x      : S[16]
  %1 = input weight : R[16, 8]
  %2 = linear %0 %1 : U[8]
  %3 = count E->V   : V[]
  %4 = sum %2 E->V  : V[8]
  %5 = div %4 %3    : V[8]
  %6 = sum %5 V->D  : D[8]
  return out=%6"""


def test_dump_is_stable():
    program = rgcn_mean.program(x=(16,), weight=(16, 8))
    assert str(program) == DUMP == str(rgcn_mean.program(x=(16,), weight=(16, 8)))
    stages = optimise(program, {One: 1, R: 4, S: 50, D: 50, U: 90, V: 40, E: 200}, wrt=("weight",))
    assert str(stages[0]) == "# traced\n" + DUMP
    assert [stage.name for stage in stages][: 1 + len(PASSES)] == ["traced", *PASSES]
    assert str(stages[-1]).startswith("# dead\nprogram rgcn_mean_backward\n")
    assert str(optimise(program, {One: 1, R: 4, S: 50, D: 50, U: 90, V: 40, E: 200}, wrt=("weight",))[-1]) == str(
        stages[-1]
    )


def test_values_without_shared_names_are_kept_apart():
    builder, shared = Builder(), Builder(share=True)
    ids = []
    for one in (builder, shared):
        x = one.input("x", S, (3,))
        ids.append([one.emit("exp", x), one.emit("exp", x)])
    assert ids == [[1, 2], [1, 1]]


@pytest.mark.parametrize(
    ("function", "shapes", "message"),
    [
        (
            lambda x, w: x @ w,
            {"x": (3,), "w": (4, 2)},
            r"'linear' needs row shapes \[..., K\] and \[..., K, N\] \(got S\[3\], R\[4, 2\]\)",
        ),
        (lambda x, w: x + w, {"x": (3,), "w": (4,)}, r"'add' needs row shapes that broadcast \(got \[3\], \[4\]\)"),
        (
            lambda x, w: sum_to(D, x, over=S),
            {"x": (3,), "w": ()},
            "'sum' needs a domain that a row of S determines (got D)",
        ),
        (
            lambda x, w: sum_to(D, x, over=V),
            {"x": (3,), "w": ()},
            "'sum' needs operands that a row of V determines (got S[3])",
        ),
        (
            lambda x, w: x.view(2, 2),
            {"x": (3,), "w": ()},
            "'view' needs as many numbers in a row as [2, 2] has (got S[3])",
        ),
        (
            lambda x, w: softmax(x, among=U, over=V),
            {"x": (3,), "w": ()},
            "'softmax' needs a domain that a row of V determines (got U)",
        ),
        (lambda x, w: x.apply("exp", w), {"x": (3,), "w": ()}, "'exp' needs 1 operand (got S[3], R[])"),
        (lambda x, w: x.apply("add"), {"x": (3,), "w": ()}, "'add' needs 2 operands (got S[3])"),
        (
            lambda x, w: x.apply("leaky_relu"),
            {"x": (3,), "w": ()},
            "'leaky_relu' needs a tuple of 1 numbers as attributes (got ())",
        ),
        (lambda x, w: x**w, {"x": (3,), "w": ()}, "'pow' needs a tuple of 1 numbers as attributes (got (R[],))"),
        (
            lambda x, w: x.apply("elu", attrs=(2.0,)),
            {"x": (3,), "w": ()},
            "'elu' needs a tuple of 0 numbers as attributes (got (2.0,))",
        ),
        (lambda x, w: x[0], {"x": (3,), "w": ()}, "'key' needs (..., None): rows have no order in a program (got 0)"),
    ],
)
def test_wrong_program_is_refused(function, shapes, message):
    function.__annotations__ = {"x": S, "w": R}
    with pytest.raises(ValueError) as error:
        relational(function).program(**shapes)
    assert str(error.value) == message.replace("\\", "")


def test_wrong_functions_are_refused():
    with pytest.raises(TypeError, match="'x' needs a domain as annotation"):
        relational(lambda x: x)
    with pytest.raises(TypeError, match=r"'shapes' needs x, weight \(got x\)"):
        rgcn_mean.program(x=(3,))

    @relational
    def unknown(x: S):
        return x.apply("tan")

    with pytest.raises(ValueError, match=r"'function' needs one of .*'tanh'.* \(got 'tan'\)"):
        unknown.program(x=(3,))

    @relational
    def nothing(x: S):
        return 3

    with pytest.raises(TypeError, match=r"'out' needs a value of the program to be returned \(got int\)"):
        nothing.program(x=(3,))

    @relational
    def text(x: S):
        return x * "a"

    with pytest.raises(TypeError, match=r"'operand' needs a value of the program or a number \(got str\)"):
        text.program(x=(3,))


def test_a_program_is_made_once_for_equal_shapes():
    assert rgcn_mean.program(x=[3], weight=[3, 2]) is rgcn_mean.program(x=(3,), weight=(3, 2))


def test_branches_on_values_are_refused():
    @relational
    def branch(x: S, y: S):
        return sum_to(D, x if x == y else y)

    with pytest.raises(TypeError, match=r"a program has no branches on values, whose numbers .* \(got S\[3\]\)"):
        branch.program(x=(3,), y=(3,))


def test_equal_numbers():
    @relational
    def equal(x: S, y: S):
        return sum_to(D, x == y)

    program = equal.program(x=(2,), y=(2,))
    rows = IndexSpace(Graph.of(torch.tensor([[0, 1], [0, 0]]), 2))
    x, y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    assert interpret(program, rows, {"x": x, "y": y})["out"].tolist() == [[2.0, 1.0], [0.0, 0.0]]


def test_wrong_gradients_are_refused():
    program = rgcn_mean.program(x=(3,), weight=(3, 2))
    with pytest.raises(ValueError, match=r"'wrt' needs inputs of the program, x, weight \(got y\)"):
        differentiate(program, ("x", "y"))
    with pytest.raises(
        ValueError, match=r"'prefix' needs one that makes new names \(got 'd_', which makes d_out, d_x\)"
    ):
        differentiate(differentiate(program, ("x",)), ("x",))
    with pytest.raises(ValueError, match="'off' needs one of 'common'"):
        optimise(program, {}, off=("nothing",))


def test_wrong_inputs_are_refused():
    program = rgcn_mean.program(x=(3,), weight=(3, 2))
    edge_index, edge_type = torch.tensor([[0, 1], [1, 1]]), torch.tensor([0, 1])
    rows = IndexSpace(Graph.of(edge_index, 2, edge_type=edge_type, num_relations=2))
    x, weight = torch.ones(2, 3), torch.ones(2, 3, 2)
    with pytest.raises(ValueError, match=r"'inputs' needs x, weight \(got x\)"):
        interpret(program, rows, {"x": x})
    with pytest.raises(ValueError, match=r"'x' needs shape \[S=2, 3\] \(got \[2, 4\]\)"):
        interpret(program, rows, {"x": torch.ones(2, 4), "weight": weight})
    with pytest.raises(TypeError, match=r"'weight' needs dtype torch.float32 \(got torch.float64\)"):
        interpret(program, rows, {"x": x, "weight": weight.double()})
    with pytest.raises(ValueError, match="'rows' needs a graph with relations for the domain R"):
        interpret(program, IndexSpace(Graph.of(edge_index, 2)), {"x": x, "weight": weight})
    with pytest.raises(ValueError, match=r"'source_type' needs values in \[0, num_types=2\) \(got 0 to 2\)"):
        IndexSpace(Graph.of(edge_index, 2), source_type=torch.tensor([0, 2]), num_types=2)
