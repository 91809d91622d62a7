"""What every schedule of attention has to get right, on the emulator."""

import pytest
import torch

from pyg_dfgnn.dispatch.attention import row_split
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops.attention import functional as ops
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.settings import settings
from tests.emu import ORDERS, needs_compiler
from tests.kernels.emulated import emulated_device
from tests.kernels.problems import batch_graph, build_graph, check, dense_graph, heavy_graph, problem_of, square_graph
from tests.ops.problems import SCORES, assert_equal

pytestmark = needs_compiler

PRODUCTS = ("dot", "cosine", "add")
TAKES = {"row_split": tuple(SCORES), "smem": tuple(SCORES), "smmf": PRODUCTS, "pmf": PRODUCTS, "block_mma": PRODUCTS}
FORWARD = {"row_split": "attention_forward"} | {
    name: f"attention_{name}_forward" for name in ("smmf", "pmf", "block_mma")
}
GENERAL = ("row_split", "smmf", "pmf")
"""Schedules that take every graph."""


@pytest.fixture(autouse=True)
def use(request, monkeypatch, default_settings):
    """The schedule under test alone; rows of a few edges count as heavy."""
    settings(schedule=request.getfixturevalue("schedule"), fallback="error")
    monkeypatch.setattr(row_split, "max_edges_of", lambda *sizes: 4)
    monkeypatch.setattr(row_split, "ORDERED_EDGES", 4)


def each(*schedules: str) -> pytest.MarkDecorator:
    """Pairs of a schedule and a score that it takes."""
    return pytest.mark.parametrize(
        ("schedule", "score"), [(name, score) for name in schedules for score in TAKES[name]]
    )


def zeros(results):
    return {name: torch.zeros_like(tensor) for name, tensor in results.items()}


@each(*GENERAL, "smem")
def test_thread_order_changes_no_bit(schedule, score):
    graph = build_graph(*(batch_graph if schedule == "smem" else heavy_graph)())
    problem = problem_of(score, graph, 3, 8, edge=score != "cosine" and schedule != "smem")
    problem.dropout_p = 0.2
    results = []
    for order in ORDERS:
        torch.manual_seed(5)
        with emulated_device(order, seed=2):
            results.append(problem.run())
    for other in results[1:]:
        assert_equal(other, results[0])


@pytest.mark.parametrize(("num_src", "num_dst"), [(4, 3), (1, 1), (0, 3), (3, 0)])
@each(*GENERAL)
def test_no_edges(schedule, score, num_src, num_dst):
    problem = problem_of(score, build_graph([], num_src, num_dst), 2, 4)
    with emulated_device():
        actual = problem.run()
    assert_equal(actual, zeros(actual))


@pytest.mark.parametrize("schedule", GENERAL)
def test_a_single_edge(schedule):
    graph = build_graph([(0, 0)], 1, 1)
    check(problem_of("dot", graph, 1, 1, edge=True), graph, 0.0)


@pytest.mark.parametrize("schedule", FORWARD)
def test_huge_logits_neither_overflow_nor_vanish(schedule):
    """The two best edges of a row share it, however large their logits are."""
    graph = Graph.of(torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1], [0, 0, 0, 1, 1, 1, 2, 2]]), 3)
    value = torch.randn(3, 1, 4)
    alpha_src, alpha_dst = torch.tensor([[5000.0], [5000.0], [-4000.0]]), torch.tensor([[9.0], [-1e5], [1e30]])
    with emulated_device() as launched:
        out = ops.add_attention(graph, value, alpha_src, alpha_dst)
    assert FORWARD[schedule] in launched
    torch.testing.assert_close(out, value[:2].mean(0).expand(3, 1, 4), **elementwise("float32/rounding"))


@pytest.mark.parametrize("schedule", FORWARD)
def test_zero_rows_under_the_norm(schedule):
    """A zero vector has cosine 0 to all others, and a gradient that is finite."""
    edges, num_src, num_dst = square_graph()
    graph = build_graph(sorted(set(edges)), num_src, num_dst)
    problem = problem_of("cosine", graph, 2, 8)
    problem.inputs["x_src"][3] = 0.0
    with emulated_device():
        actual = problem.run()
    expected = problem.expected()
    # The gradient at the zero vector itself is 1e12 times a difference of sums.
    others = torch.arange(graph.num_dst) != 3
    for name, tensor in actual.items():
        rows = others if name in ("out", "grad x_src") else slice(None)
        torch.testing.assert_close(tensor[rows].double(), expected[name][rows], **elementwise("float32/few_terms"))
        assert tensor.isfinite().all(), name


@pytest.mark.parametrize("schedule", FORWARD)
def test_square_graph_with_two_tensors(schedule):
    """The cosine score where source and target have the same number of rows but are not the same tensor."""
    edges, num_src, num_dst = square_graph()
    graph = build_graph(sorted(set(edges)), num_src, num_dst)
    problem = problem_of("cosine", graph, 2, 8)
    problem.inputs["x_dst"] = torch.randn_like(problem.inputs["x_src"]).sign() + problem.inputs["x_src"]
    check(problem, graph, 0.0, op=f"attention/{schedule}", same_order=schedule != "block_mma")


@pytest.mark.parametrize("schedule", GENERAL)
def test_dropout_of_everything(schedule):
    problem = problem_of("dot", build_graph(*dense_graph()), 2, 8)
    problem.dropout_p = 1.0
    with emulated_device():
        actual = problem.run()
    assert_equal(actual, zeros(actual))
