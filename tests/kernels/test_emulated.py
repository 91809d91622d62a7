"""The kernels, run by the package's own host code on the emulator, against the float64 reference and its gradients."""

import pytest
import torch

from pyg_dfgnn.dispatch.attention import row_split
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.ops.attention import functional as ops
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.reference.tolerances import elementwise
from pyg_dfgnn.settings import settings
from tests.covering import over
from tests.emu import ORDERS, needs_compiler
from tests.kernels.emulated import emulated_device
from tests.kernels.problems import (
    AXES,
    GRAPHS,
    NAMES,
    assert_largest_close,
    build_graph,
    cases,
    check,
    heavy_graph,
    label,
    problem_of,
    sparse_graph,
    take_sweeps,
)
from tests.ops.problems import SCORES

pytestmark = needs_compiler

CHUNK = 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, default_settings):
    """Rows of more than a few edges count as heavy in the schedule under test."""
    settings(schedule="row_split")
    monkeypatch.setattr(row_split, "max_edges_of", lambda *sizes: CHUNK)
    monkeypatch.setattr(row_split, "ORDERED_EDGES", CHUNK)


CASES = cases(tuple(SCORES), [("dropout", "graph")], **AXES)


@pytest.mark.parametrize("row", CASES, ids=map(label, CASES))
def test_against_float64(row):
    graph = build_graph(*GRAPHS[row["graph"]]())
    problem = problem_of(row["score"], graph, row["heads"], row["channels"], row["dtype"], row["edge"])
    launched = check(problem, graph, row["dropout"], row["order"])
    passes = {"attention_forward", "attention_backward_targets", "attention_backward_sources"}
    if row["graph"] == "heavy":
        passes |= {f"{name}_merge" for name in passes}
    if row["score"] == "add" and not row["edge"]:
        passes -= {"attention_backward_targets", "attention_backward_targets_merge"}
        passes.add("attention_backward_nodes")
    assert passes <= set(launched)
    assert ("attention_backward_targets" in launched) == ("attention_backward_targets" in passes)


SCORES_WITH_DTYPES = tuple(zip(SCORES, [*NAMES, torch.float32], strict=True))
SCORE_AND_DTYPE = [pytest.param(score, dtype, id=f"{score}-{NAMES[dtype]}") for score, dtype in SCORES_WITH_DTYPES]


# Several loads per lane, odd and even, and heads in groups of blocks.
@over(score_and_dtype=SCORES_WITH_DTYPES, shape=((2, 131), (5, 33), (1, 512), (40, 4)))
def test_wide_rows(score_and_dtype, shape):
    score, dtype = score_and_dtype
    graph = build_graph(*heavy_graph())
    check(problem_of(score, graph, *shape, dtype, edge=score != "cosine"), graph, dropout_p=0.3)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("score", ["dot", "add"])
def test_an_infinite_value(score, train, name):
    """Reaches the targets of its source as infinity, wherever its edge lies in their rows, and no others."""
    graph = build_graph(*GRAPHS[name]())
    problem = problem_of(score, graph, 2, 8)
    call, exact = (getattr(module, f"{score}_attention") for module in (ops, reference))
    for source in range(0, graph.num_src, 3):
        inputs = {name: tensor.clone() for name, tensor in problem.inputs.items()}
        inputs["value"][source] = torch.inf
        inputs["value"].requires_grad_(train)
        with emulated_device():
            actual = call(graph, **inputs).detach()
        expected = exact(graph.edge_index, graph.num_dst, **inputs)[0].detach()
        torch.testing.assert_close(actual, expected, **elementwise("float32/few_terms"))


@pytest.mark.parametrize("negative_slope", [1.0, 0.0, -0.5, 3.0])
@pytest.mark.parametrize("dout_dlogit", [False, True], ids=["edges", "nodes"])
def test_slopes(dout_dlogit, negative_slope, monkeypatch):
    """The gradient of the target scalars, with the derivative that the forward pass leaves and without."""
    monkeypatch.setattr(row_split, "saves_dout_dlogit", lambda *arguments: dout_dlogit)
    graph = build_graph(*heavy_graph())
    problem = problem_of("add", graph, 3, 8)
    with emulated_device() as launched:
        actual = problem.run(lambda **inputs: problem.call(**inputs, negative_slope=negative_slope))
        with torch.no_grad():
            inference = problem.call(negative_slope=negative_slope)
    assert torch.equal(inference, actual["out"])
    expected = problem.expected(negative_slope=negative_slope)
    assert ("attention_backward_nodes" in launched) == dout_dlogit
    assert_largest_close(problem.dtype, actual, expected)
    if negative_slope == 1.0:
        assert float(actual["grad alpha_dst"].abs().max()) < 1e-6


def test_target_scalars_that_do_not_matter():
    """Where all pre-activations have one sign the softmax does not depend on the target's term."""
    graph = build_graph(*heavy_graph())
    problem = problem_of("add", graph, 2, 8)
    problem.inputs["alpha_src"].abs_()
    problem.inputs["alpha_dst"].abs_()
    problem.inputs["value"] += 10.0
    with emulated_device():
        actual = problem.run(lambda **inputs: ops.add_attention(graph, **inputs))
    assert not actual["grad alpha_dst"].any()


def test_without_target_scalars():
    graph = build_graph(*heavy_graph())
    problem = problem_of("add", graph, 2, 6, torch.float32, edge=True)
    del problem.inputs["alpha_dst"]
    check(problem, graph, 0.0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("score", "dtype"), SCORE_AND_DTYPE)
def test_sweeps_over_column_blocks(score, dtype, order, monkeypatch):
    """Each pass takes three launches, and rows are heavy in some of the column blocks only."""
    take_sweeps(monkeypatch, 3)
    edges, num_src, num_dst = heavy_graph()
    graph = build_graph([(j, i) for i in range(num_dst) for j in range(i % 3, num_src, 2)] + edges, num_src, num_dst)
    problem = problem_of(score, graph, 3, 40, dtype, edge=score != "cosine")
    launched = check(problem, graph, 0.3, order)
    for name in ("attention_backward_targets", "attention_backward_sources"):
        assert launched.count(name) == 3, name
        assert launched.count(f"{name}_merge") >= 2, name
    # Once with gradients and once for the weights.
    assert launched.count("attention_forward") == 6


@pytest.mark.parametrize(("score", "dtype"), SCORE_AND_DTYPE)
def test_rows_of_a_local_graph_are_not_swept(score, dtype, monkeypatch):
    """Their edges are taken by ascending column, whatever their order; rows are heavy, light and empty."""
    take_sweeps(monkeypatch, 3, local=True)
    monkeypatch.setattr(row_split, "max_edges_of", lambda *sizes: 8)
    edges, num_src, num_dst = heavy_graph()
    edges = [(j, i) for i in range(num_dst) for j in range(i % 3, num_src, 2)] + edges
    graph = build_graph([edges[place] for place in torch.randperm(len(edges)).tolist()], num_src, num_dst)
    launched = check(problem_of(score, graph, 3, 40, dtype, edge=score != "cosine"), graph, 0.3)
    assert launched.count("attention_forward") == 2 and "attention_forward_merge" in launched
    assert graph.get(("ascending", "targets", "sources")) is not None


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_sweeps_that_leave_the_tangent(dtype, monkeypatch):
    take_sweeps(monkeypatch, 3)
    edges, num_src, num_dst = heavy_graph()
    graph = build_graph([(j, i) for i in range(num_dst) for j in range(i % 3, num_src, 2)] + edges, num_src, num_dst)
    launched = check(problem_of("add", graph, 3, 40, dtype, edge=False), graph, 0.3)
    assert launched.count("attention_forward") == 6
    assert launched.count("attention_backward_nodes") == 1
    assert "attention_backward_targets" not in launched


NARROW_CASES = [
    pytest.param(dtype, order, id=f"{NAMES[dtype]}-{order}")
    for dtype in (torch.float16, torch.bfloat16)
    for order in ORDERS
]


@pytest.mark.parametrize(("dtype", "order"), NARROW_CASES)
@pytest.mark.parametrize("name", ["sparse", "edges"])
def test_packed_rows_of_whole_heads(name, dtype, order):
    """A lane per head on four rows of a warp, some without edges; the pass that leaves `dout_dlogit` has two lanes."""
    edges, num_src, num_dst = sparse_graph() if name == "sparse" else ([(0, 2), (5, 2), (6, 2), (5, 0)], 7, 9)
    graph = build_graph(edges, num_src, num_dst)
    problem = AttentionProblem("add", 8, 16, dtype, graph.device, False, False)
    lanes = [
        row_split.plan_pass(problem, direction, graph).constants["HEAD_LANES"]
        for direction in ("forward", "dout_dlogit", "sources", "weights")
    ]
    assert lanes == [1, 2, 1, 1]
    launched = check(problem_of("add", graph, 8, 16, dtype, edge=False), graph, 0.0, order, same_order=False)
    assert "attention_backward_nodes" in launched and "attention_backward_targets" not in launched


@pytest.mark.parametrize(("dtype", "order"), NARROW_CASES)
@pytest.mark.parametrize("square", [False, True], ids=["bipartite", "square"])
def test_sweeps_of_whole_heads(square, dtype, order, monkeypatch):
    """A lane per head on four edges of a row: hubs, rows without edges, and some without any in a block of columns."""
    take_sweeps(monkeypatch, 3)
    edges, num_src, num_dst = heavy_graph()
    num_src, num_dst = (24, 24) if square else (num_src, num_dst)
    edges = edges + [(j, i) for i in range(num_dst - 2) for j in range(i % 3, 20, 2)] * 2
    graph = build_graph(edges, num_src, num_dst)
    problem = AttentionProblem("cosine", 8, 16, dtype, graph.device, False, False)
    for direction in ("targets", "sources"):
        found = row_split.plan_pass(problem, direction, graph)
        assert found.blocks == 3 and (found.constants["HEAD_LANES"], found.constants["EDGE_SLOTS"]) == (1, 4)
    launched = check(problem_of("cosine", graph, 8, 16, dtype, edge=False), graph, 0.0, order)
    for name in ("attention_backward_targets", "attention_backward_sources"):
        assert launched.count(name) == 3 and launched.count(f"{name}_merge") >= 2


@pytest.mark.parametrize(
    ("score", "dtype"), [("add", torch.float32), ("cosine", torch.float32), ("dot", torch.bfloat16)], ids=str
)
def test_sweeps_of_rows_that_share_a_warp(score, dtype, monkeypatch):
    """Some rows have no edge in a block of columns while those beside them have."""
    take_sweeps(monkeypatch, 3)
    num_src = num_dst = 12
    edges = [(j, i) for i in range(num_dst) for j in range(num_src) if i % 4 or j // 4 != i // 4] * 2
    graph = build_graph([*edges, *[(0, 1)] * 40], num_src, num_dst)
    packed, _ = row_split.swept_constants(
        AttentionProblem(score, 1, 128, dtype, torch.device("cpu"), False, False), "forward"
    )
    assert packed["WARP_ROWS"] > 1
    launched = check(problem_of(score, graph, 1, 128, dtype, edge=False), graph, 0.0)
    assert launched.count("attention_forward") == launched.count("attention_backward_sources") * 2 == 6
