"""The dot score with edge terms that are linear in rows [E, D]: what the operator does with them on the CPU."""

import pytest
import torch

from pyg_dfgnn.dispatch.core import BACKWARD, FORWARD
from pyg_dfgnn.ops import tuning
from pyg_dfgnn.ops.attention import functional as ops
from pyg_dfgnn.reference.tolerances import assert_all_close
from pyg_dfgnn.statements.attention import inputs_of
from pyg_dfgnn.statements.scores import DOT
from tests.ops.problems import (
    DENSE,
    SPARSE,
    EdgeRows,
    check_each_gradient_alone,
    check_gradient_through_the_weights,
    check_opcheck,
    pairs,
)


def problem_of(**options):
    return EdgeRows("dot", options.pop("case", DENSE), **{"heads": 3, "channels": 4, "edge_channels": 5, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_against_float64(dtype, dropout_p, path):
    problem = problem_of(dtype=dtype, dropout_p=dropout_p)
    actual = problem.run_with_weights(seed=3)
    assert_all_close(pairs(actual, problem.expected(problem.kept(seed=3))))


def test_heads_side_by_side(path):
    problem = problem_of()
    flat = {name: problem.inputs[name].flatten(1) for name in ("query", "key", "value")}
    out = problem.call(**flat, heads=3, concat=True)
    assert torch.equal(out, problem.call().flatten(1))


@pytest.mark.parametrize(("heads", "channels", "edge_channels"), [(1, 4, 4), (2, 2, 5), (3, 40, 65)])
def test_wide_rows_become_vectors(heads, channels, edge_channels, path):
    """Where the matrix does not narrow rows, or no kernel holds them, each edge gets a vector."""
    problem = problem_of(heads=heads, channels=channels, edge_channels=edge_channels)
    rows, weight = problem.inputs["edge_attr"], problem.inputs["edge_weight"]
    edge = (rows @ weight.T).unflatten(1, (heads, channels))
    expected = problem.call(edge=edge, edge_attr=None, edge_weight=None)
    torch.testing.assert_close(problem.call(), expected)
    assert_all_close(pairs(problem.run(), problem.expected()))


def test_each_gradient_alone(path):
    check_each_gradient_alone(problem_of(dropout_p=0.5))


def outputs_of(problem):
    """The two outputs of the registered op, and the inputs that they came from."""
    leaves = {name: problem.inputs[name].clone().requires_grad_() for name in ("query", "key", "value", "edge_attr")}
    torch.manual_seed(1)
    edge_target = torch.randn(problem.case.num_dst, problem.heads, problem.edge_channels).requires_grad_()
    query, key, value, rows = leaves.values()
    tensors = (query, key, value, None, None, None, rows, edge_target, None)
    return ops._dot_edge_rows(problem.graph, tensors, (0.5, 0.0, 0.0)), [*leaves.values(), edge_target]


def test_one_output_alone(path):
    """A gradient that one of the outputs lacks counts as zeros."""
    problem = problem_of()
    for place in range(2):
        outs, leaves = outputs_of(problem)
        alone = torch.autograd.grad(outs[place].square().sum(), leaves)
        outs, leaves = outputs_of(problem)
        loss = outs[place].square().sum() + 0.0 * outs[1 - place].sum()
        for actual, expected in zip(alone, torch.autograd.grad(loss, leaves), strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("place", [0, 1])
def test_outputs_may_be_edited_in_place(place, fused):
    problem = problem_of()
    outs, leaves = outputs_of(problem)
    expected = torch.autograd.grad(outs[0].sum() + 2.0 * outs[1].sum(), leaves)
    outs, leaves = outputs_of(problem)
    outs[place].mul_(3.0)
    scale = [1.0, 2.0]
    scale[place] /= 3.0
    loss = scale[0] * outs[0].sum() + scale[1] * outs[1].sum()
    for actual, wanted in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_gradient_through_the_weights(path):
    check_gradient_through_the_weights(problem_of(case=SPARSE))


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_compile(dropout_p, fused):
    problem = problem_of(dropout_p=dropout_p)
    expected = problem.run(seed=3)
    torch._dynamo.reset()
    call = torch.compile(problem.op, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        actual = problem.run(lambda **inputs: call(problem.edges, **inputs, dropout_p=dropout_p), seed=3)
        # Traced, torch multiplies by the matrices of the heads.
        assert_all_close(pairs(actual, expected))


def test_opcheck(fused):
    programs = check_opcheck(problem_of())
    assert {program.split(":")[0] for program in programs} == {"attention/dot/edge_rows"} and len(programs) >= 3


def test_autotune_measures_all_passes(fused, monkeypatch):
    monkeypatch.setattr(tuning, "seconds_of", lambda call, device: 1.0)
    problem = problem_of()
    op, graph = ops._dot_edge_rows, problem.graph
    inputs = {"value": problem.inputs["value"], "edge": problem.inputs["edge_attr"]}
    posed = op.problem(inputs, {"dropout": 0.0}, 3, 4)
    shape = op.shape(posed, graph, 3, 4, inputs_of(DOT, True, False, True))
    for directions in (FORWARD, BACKWARD):
        offers = tuning.options(op.family, posed, graph, directions, tuning.Settings())
        seconds = tuning.measure(op, posed, graph, shape, directions, offers, frozenset())
        assert all(seconds[direction]["row_split"] == 1.0 for direction in directions)


WRONG = {
    "edge_attr of one dimension": (
        {"edge_attr": torch.zeros(200)},
        r"'edge_attr' needs shape \[E, D\] \(got \[200\]\)",
    ),
    "too few edges": (
        {"edge_attr": torch.zeros(199, 5)},
        r"'edge_attr' needs shape \[E=200, D=5\] \(got \[199, 5\]\)",
    ),
    "another width": (
        {"edge_attr": torch.zeros(200, 6)},
        r"'edge_weight' needs shape \[H \* C=12, D=6\] \(got \[12, 5\]\)",
    ),
    "another matrix": (
        {"edge_weight": torch.zeros(11, 5)},
        r"'edge_weight' needs shape \[H \* C=12, D=5\] \(got \[11, 5\]\)",
    ),
    "no matrix": ({"edge_weight": None}, r"'edge_weight' needs a torch.Tensor \(got None\)"),
    "no rows": ({"edge_attr": None}, r"'edge_attr' needs a torch.Tensor \(got None\)"),
    "vectors too": ({"edge": torch.zeros(200, 3, 4)}, "'edge' needs None next to 'edge_attr' and 'edge_weight'"),
    "another query": (
        {"query": torch.zeros(10, 3, 5)},
        r"'query' needs shape \[N_dst=10, H=3, C=4\] \(got \[10, 3, 5\]\)",
    ),
    "a flat value": ({"value": torch.zeros(24, 12)}, r"'value' needs shape \[N_src, H, C\] \(got \[24, 12\]\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name, path):
    changes, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message):
        problem_of().call(**changes)
