"""The operators under torch.library and torch.compile, with their launches emulated."""

import pytest
import torch

from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.ops.attention.functional import gatv2_attention
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.reference.zoo import random
from tests.covering import extended, over
from tests.ops.problems import SCORES, SPARSE, Problem, assert_equal, check_opcheck, problem_of


@over(score=SCORES, full=(False, True))
def test_opcheck(score, full, fused):
    programs = check_opcheck(problem_of(score, full=full))
    assert {program.split(":")[1] for program in programs} == {"forward", "backward", "edge"}


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@over(score=SCORES, full=(False, True))
def test_compile(score, full, fused):
    problem = problem_of(score, full=full)
    expected = problem.run(seed=3)
    call = compiled(problem.op)
    for _ in range(2):
        actual = problem.run(lambda **inputs: call(problem.edges, **inputs, dropout_p=problem.dropout_p), seed=3)
        assert_equal(actual, expected)


@pytest.mark.parametrize("score", extended(["gatv2"], ["dot", "cosine", "add"]))
def test_compile_with_weights(score, fused):
    problem = problem_of(score)
    call = compiled(problem.op)
    actual = call(problem.edges, **problem.inputs, return_weights=True)
    expected = problem.call(return_weights=True)
    assert all(map(torch.equal, actual, expected))


@over(score=SCORES, transposed=(False, True))
def test_compile_with_self_loops(score, transposed, fused):
    problem = problem_of(score)
    edges = EdgeSet(problem.edge_index, 8, 8, True, transposed)
    expected = problem.run(lambda **inputs: problem.op(Graph.resolve(*edges.key), **inputs))
    call = compiled(problem.op)
    assert_equal(problem.run(lambda **inputs: call(edges, **inputs)), expected)
    assert_equal(problem.run(lambda **inputs: problem.op(edges, **inputs)), expected)


@pytest.mark.parametrize("score", extended(["dot", "add"], ["cosine", "gatv2"]))
def test_compile_once_for_all_sizes(score, fused):
    from torch._dynamo.utils import counters

    def op(edge_index, num_src, num_dst, inputs):
        return problem_op(EdgeSet(edge_index, num_src, num_dst), **inputs)

    problem_op = Problem(score, SPARSE).op
    counters.clear()
    call = compiled(op, dynamic=True)
    for num_src, num_dst in ((8, 9), (14, 11), (21, 30)):
        problem = problem_of(score, random(num_src, num_dst, 2 * num_dst))
        actual = problem.run(
            lambda **inputs: call(problem.edge_index, len(inputs[SOURCES[score]]), len(inputs[TARGETS[score]]), inputs)  # noqa: B023
        )
        assert_equal(actual, problem.run())
    assert counters["stats"]["unique_graphs"] == 1


SOURCES = {"dot": "key", "cosine": "x_src", "add": "alpha_src", "gatv2": "x_src"}
TARGETS = {"dot": "query", "cosine": "x_dst", "add": "alpha_dst", "gatv2": "x_dst"}


@pytest.mark.parametrize("score", extended(["cosine"], ["dot", "gatv2"]))
def test_compile_with_one_tensor_in_several_roles(score, fused):
    problem = problem_of(score)
    roles = [name for name in problem.inputs if name not in ("beta", "att")]
    rest = {name: tensor for name, tensor in problem.inputs.items() if name not in roles}
    x = problem.inputs[roles[0]].requires_grad_()
    eager = problem.call(**dict.fromkeys(roles, x))
    traced = compiled(problem.op)(problem.edges, **dict.fromkeys(roles, x), **rest)
    assert torch.equal(traced, eager)
    grads = [torch.autograd.grad(out, x, problem.grad_out)[0] for out in (eager, traced)]
    torch.testing.assert_close(grads[1], grads[0], **elementwise("float32/rounding"))


def test_double_backward_of_a_compiled_call(fused):
    problem = problem_of("dot")
    inputs = {name: tensor.requires_grad_() for name, tensor in problem.inputs.items()}
    out = compiled(problem.op)(problem.edges, **inputs)
    with pytest.raises(RuntimeError, match="double backward|once_differentiable"):
        grads = torch.autograd.grad(out.sum(), list(inputs.values()), create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()


def test_values_of_looped_edges_in_float64_are_in_the_order_of_the_graph():
    edge_index = torch.tensor([[0, 2, 1, 2, 3], [1, 2, 0, 3, 3]])
    graph, edges = Graph.of(edge_index, 4, self_loops=True), EdgeSet(edge_index, 4, 4, True)
    x, att = torch.randn(4, 2, 3).double(), torch.randn(2, 3).double()
    edge = torch.randn(graph.num_edges, 2, 3).double()
    options = {"edge": edge, "return_weights": True}
    torch._dynamo.reset()
    call = torch.compile(lambda edges: gatv2_attention(edges, x, x, att, **options), backend="eager")
    for actual, expected in zip(call(edges), gatv2_attention(graph, x, x, att, **options), strict=True):
        torch.testing.assert_close(actual, expected, **elementwise("float64"))


def test_edge_features_that_do_not_fit_the_loops(fused):
    """While tracing, the number of edges with self-loops is unknown: the operator itself refuses."""
    problem = problem_of("dot", edge=True)
    edges = EdgeSet(problem.edge_index, 8, 8, self_loops=True)
    with pytest.raises(ValueError, match=r"'edge' needs shape \[E=16"):
        compiled(problem.op)(edges, **problem.inputs)


def test_compile_with_inductor(fused):
    problem = problem_of("gatv2", edge=True)
    torch._dynamo.reset()
    call = torch.compile(problem.op, fullgraph=True)
    assert_equal(problem.run(lambda **inputs: call(problem.edges, **inputs)), problem.run())
