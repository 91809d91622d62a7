"""The maxima that `block_mma` fixes before it has seen all logits of a row, on the emulator."""

import math
from dataclasses import replace

import pytest
import torch

from pyg_dfgnn.dispatch.attention.family import FAMILY
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.node_ranges import diagonal_blocks
from pyg_dfgnn.ops.attention import functional as ops
from pyg_dfgnn.reference.tolerances import BACKWARD, assert_all_close, elementwise, tolerance
from pyg_dfgnn.settings import local_settings, settings
from pyg_dfgnn.statements.attention import FORWARD
from pyg_dfgnn.statements.op import DIRECTIONS
from tests.emu import needs_compiler
from tests.kernels.block_mma import (
    BLOCK_MMA,
    ENTRIES,
    KINDS,
    ROWS_ENTRIES,
    SCORES,
    build_graph,
    check,
    check_tf32,
    check_tiles,
    mix,
    problem_of,
    products,
    run,
    side_by_side,
)
from tests.kernels.emulated import emulated_device
from tests.kernels.passes import launch, values_of
from tests.kernels.problems import assert_largest_close
from tests.ops.problems import Problem, pairs

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def schedule(default_settings):
    settings(schedule="block_mma", fallback="error")


@pytest.fixture(params=SCORES)
def score(request):
    return request.param


LATE = 80
"""First of the columns of `late_graph` whose logits may be far above those before."""


def late_graph() -> Graph:
    """A graph of several windows and many steps. Row 20 has no edges, row 72 has none to the first 32 columns."""
    torch.manual_seed(1)
    dense = torch.ones(96, 96, dtype=torch.bool)
    dense[:, 20] = dense[:32, 72] = False
    return Graph.of(*side_by_side(dense))


def late_problem(graph: Graph, heads: int, dtype: torch.dtype, rise: float) -> Problem:
    """In the last head the late logits of rows 0 to 15 are larger by `rise`; all logits of row 90 are above 64.

    The products are exact, so that logits of any size are as accurate as small ones.
    """
    problem = problem_of("dot", graph, heads, dtype=dtype)
    query, key = (problem.inputs[name].mul_(4).round_().div_(8) for name in ("query", "key"))
    query[..., :2] = key[..., 0] = 0.0
    key[LATE:, :, 0] = key[..., 1] = 2.0
    query[:16, -1, 0] = 2 * rise
    query[90, :, 1] = 96.0
    return problem


def forward_pass(
    problem: Problem, graph: Graph, kind: str = "fp32", slope: float = 0.2
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Output and maxima, to base 2, that a forward pass leaves for others, and the columns of a step."""
    heads, channels = problem.grad_out.shape[1:]
    planned = AttentionProblem(
        problem.score, heads, channels, problem.dtype, graph.device, False, False, tf32=kind == "tf32"
    )
    x = {name: tensor.detach() for name, tensor in problem.inputs.items()}
    values = values_of(planned, graph) | {"slope": slope, "scale": channels**-0.5}
    if problem.score == "dot":
        values |= {"target": x["query"], "key": x["key"], "value": x["value"]}
    elif problem.score == "cosine":
        inverse = 1 / x["x_src"].float().norm(dim=-1)
        values |= {"target": x["x_src"], "value": x["x_src"], "parameter": x["beta"]}
        values |= {"target_scalars": inverse, "source_scalars": inverse}
    else:
        values |= {"value": x["value"], "target_scalars": x["alpha_dst"], "source_scalars": x["alpha_src"]}
    values |= {"out": torch.empty_like(problem.grad_out), "row_stats": torch.empty(graph.num_dst, heads, 2)}
    with emulated_device():
        constants = launch(FORWARD, "block_mma", planned, graph, values)
    return values["out"], values["row_stats"][..., 0] / math.log(2), constants["STEP"]


def largest(logits: torch.Tensor, graph: Graph, columns: int | None = None) -> torch.Tensor:
    """Of the logits [targets, heads, sources] the largest per row, to base 2, over its edges to the first columns."""
    edges = torch.zeros(graph.num_dst, 1, graph.num_src, dtype=torch.bool)
    edges[graph.edge_index[1], 0, graph.edge_index[0]] = True
    return (logits / math.log(2)).masked_fill(~edges, -torch.inf)[..., :columns].amax(-1)


def products_of(problem: Problem) -> torch.Tensor:
    """The logits of the dot score [targets, heads, sources] in float64."""
    query, key = (problem.inputs[name].detach().double() for name in ("query", "key"))
    return torch.einsum("ihc,jhc->ihj", query, key) * query.size(-1) ** -0.5


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_out_of_bounds_start_again(kind, heads):
    """The maximum of the first steps stays until a sum is too large; then only the block of that row starts again."""
    graph = late_graph()
    problem = late_problem(graph, heads, KINDS[kind], rise=29.0)
    out, maxima, step = forward_pass(problem, graph, kind)
    logits = products_of(problem)
    rows, first, later = (largest(logits, graph, columns) for columns in (None, step, 32 + step))
    close = {"rtol": 0.0, "atol": 0.02 if kind == "tf32" else 1e-4}
    # The whole block of rows 0 to 15, one row of which has no edges.
    taken = torch.arange(32) != 20
    torch.testing.assert_close(maxima[:32, -1][taken].double(), rows[:32, -1][taken], **close)
    assert bool((rows[:16, -1] > 40).all()) and not bool(maxima[20].any())
    # What other rows fixed is left alone, and so are the heads beside it: once all rows of a warp have edges.
    torch.testing.assert_close(maxima[48:64].double(), first[48:64], **close)
    torch.testing.assert_close(maxima[64:80].double(), later[64:80], **close)
    assert all(bool((rows > fixed + 0.1)[48:80].any()) for fixed in (first, later))
    # Large maxima are fixed nowhere in a warp.
    torch.testing.assert_close(maxima[80:].double(), rows[80:], **close)
    if heads > 1:
        torch.testing.assert_close(maxima[:16, 0].double(), first[:16, 0], **close)
    if kind == "tf32":
        assert_all_close({"out": (out, problem.expected()["out"])}, "tf32")
    else:
        assert_largest_close(problem.dtype, {"out": out}, problem.expected(), BLOCK_MMA)


@pytest.mark.parametrize("kind", KINDS)
def test_all_passes_after_a_start_again(kind):
    graph = late_graph()
    (check_tf32 if kind == "tf32" else check_tiles)(late_problem(graph, 2, KINDS[kind], rise=29.0), graph)


@pytest.mark.parametrize(("kind", "rise"), [("fp32", 20.0), ("bf16", 20.0), ("tf32", 20.0), ("fp16", 4.0)])
def test_sums_within_bounds_stay(kind, rise):
    """Weights far above 1, in all passes."""
    graph = late_graph()
    problem = late_problem(graph, 2, KINDS[kind], rise)
    _, maxima, step = forward_pass(problem, graph, kind)
    logits = products_of(problem)
    rows, first = largest(logits, graph), largest(logits, graph, step)
    torch.testing.assert_close(maxima[:16].double(), first[:16], rtol=0.0, atol=0.02 if kind == "tf32" else 1e-4)
    assert bool((rows - first > rise)[:16, -1].all())
    (check_tf32 if kind == "tf32" else check_tiles)(problem, graph)


@pytest.mark.parametrize(
    ("kind", "beta", "bound"),
    [
        *(("fp32", beta, True) for beta in (0.0, 0.25, -2.0, 13.5)),
        *(("fp32", beta, False) for beta in (-14.0, 30.0)),
        *(("fp16", beta, True) for beta in (-2.5, 0.0)),
        *(("fp16", beta, False) for beta in (3.0, 20.0)),
        *(("bf16", beta, True) for beta in (-13.0, 1.0)),
        ("bf16", 50.0, False),
        ("tf32", -13.0, True),
    ],
)
def test_cosine_takes_the_bound_of_a_small_beta(kind, beta, bound):
    graph = build_graph("isolated")
    problem = problem_of("cosine", graph, dtype=KINDS[kind])
    problem.inputs["beta"].fill_(beta)
    _, maxima, _ = forward_pass(problem, graph, kind)
    has_edges = graph.csr.rowptr.diff() > 0
    expected = abs(beta) / math.log(2)
    assert torch.allclose(maxima[has_edges], torch.tensor(expected), rtol=1e-6, atol=0.0) == bound
    assert not bool(maxima[~has_edges].any())
    (check_tf32 if kind == "tf32" else check_tiles)(problem, graph)


def add_logits(problem: Problem, slope: float) -> torch.Tensor:
    source, target = (problem.inputs[name].detach().double() for name in ("alpha_src", "alpha_dst"))
    return torch.nn.functional.leaky_relu(target[..., None] + source.t(), slope)


@pytest.mark.parametrize(
    ("kind", "slope", "spread", "factored"),
    [
        *(("fp32", slope, 1.0, True) for slope in (0.0, 0.2, 1.0)),
        *(("fp32", slope, 1.0, False) for slope in (-0.5, 1.5)),
        ("fp32", 0.2, 3.0, True),
        ("fp32", 0.0, 30.0, False),
        ("fp32", 0.2, 30.0, False),
        ("fp16", 0.2, 0.5, True),
        ("fp16", 0.2, 2.0, False),
        ("bf16", 0.0, 3.0, True),
        ("bf16", 0.2, 30.0, False),
        ("tf32", 0.2, 2.0, True),
    ],
)
def test_add_takes_factors_of_close_scalars(kind, slope, spread, factored):
    """Where the scalars of the sources lie close together, it is that of all columns and heads, with an edge or not."""
    graph = build_graph("far")
    problem = problem_of("add", graph, dtype=KINDS[kind])
    scalars = problem.inputs["alpha_src"].mul_(spread)
    scalars -= scalars.max()
    _, maxima, _ = forward_pass(problem, graph, kind, slope)
    logits, has_edges = add_logits(problem, slope), graph.csr.rowptr.diff() > 0
    source, target = (problem.inputs[name].detach().double() for name in ("alpha_src", "alpha_dst"))
    rows = largest(logits, graph)
    window = torch.nn.functional.leaky_relu(target + source.max(), slope) / math.log(2)
    torch.testing.assert_close(
        maxima[has_edges].double(), (window if factored else rows)[has_edges], **elementwise("float32/rounding")
    )
    assert bool((window > rows + 0.1)[has_edges].any())
    with products(kind), emulated_device():
        actual = problem.run(lambda **inputs: problem.call(**inputs, negative_slope=slope))
    expected = problem.expected(negative_slope=slope)
    if kind == "tf32":
        assert_all_close(pairs(actual, expected), "tf32")
    else:
        assert_largest_close(problem.dtype, actual, expected, BLOCK_MMA)


@pytest.mark.parametrize("name", ["alpha_src", "alpha_dst"])
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 1e30, -1e30])
def test_scalars_of_add_that_no_factor_holds(name, number):
    """As `row_split` has it, in the rows that see the number and in those that do not."""
    graph = build_graph("batch")
    problem = problem_of("add", graph)
    problem.inputs[name][20] = number
    results = {}
    for schedule in ("row_split", "block_mma"):
        with local_settings(schedule=schedule, fallback="error"), torch.no_grad(), emulated_device() as launched:
            results[schedule] = ops.add_attention(graph, **problem.inputs)
        assert (ENTRIES["forward"] in launched) == (schedule == "block_mma")
    torch.testing.assert_close(
        results["block_mma"], results["row_split"], **elementwise("float32/rounding"), equal_nan=True
    )
    assert bool(results["block_mma"][:17].isfinite().all())


@pytest.mark.parametrize("number", [1e3, -1e5, 1e8, 1e20])
def test_weights_of_large_scalars_sum_to_one(number):
    """A target's scalar that rounds those of its sources: all passes must see the same logits."""
    graph = build_graph("batch")
    problem = problem_of("add", graph)
    problem.inputs["alpha_dst"][::2] = number
    with torch.no_grad(), emulated_device() as launched:
        _, weights = ops.add_attention(graph, **problem.inputs, return_weights=True)
    assert ENTRIES["forward"] in launched
    total = torch.zeros(graph.num_dst, 2).index_add_(0, graph.edge_index[1], weights)[graph.csr.rowptr.diff() > 0]
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0.0, atol=5e-6)


@pytest.mark.parametrize("longest", [300, 513])
def test_bound_of_the_longest_segment(longest):
    """A graph whose edges are refilled has shorter segments than it has room for; factors take 512 columns at most."""
    graph = build_graph("batch")
    blocks = replace(diagonal_blocks(build_graph("batch")), longest=longest)
    graph.derived("diagonal_blocks", lambda: blocks)
    problem = problem_of("add", graph, channels=8)
    _, maxima, _ = forward_pass(problem, graph)
    is_largest = torch.isclose(
        maxima.double(), largest(add_logits(problem, 0.2), graph), **elementwise("float32/rounding")
    )
    assert bool(is_largest[graph.csr.rowptr.diff() > 0].all()) == (longest > 512)
    check_tiles(problem, graph)


@pytest.mark.parametrize("size", [512, 520])
def test_segment_around_the_most_columns_of_factors(size):
    torch.manual_seed(1)
    dense = torch.rand(size, size) < 0.025
    dense.fill_diagonal_(True)
    dense[0, -1] = True
    graph = Graph.of(*side_by_side(dense))
    problem = problem_of("add", graph, 2, 8)
    planned = AttentionProblem("add", 2, 8, torch.float32, graph.device, False, False)
    chosen = FAMILY.candidates["block_mma"].plan_pass(planned, "forward", graph)
    assert chosen.constants["FACTORED"] == (size <= 512)
    with torch.no_grad(), emulated_device() as launched:
        out = ops.add_attention(graph, **problem.inputs)
    assert launched == [ENTRIES["forward"]]
    assert_largest_close(problem.dtype, {"out": out}, problem.expected(), BLOCK_MMA)


@pytest.mark.parametrize("name", ["key", "query"])
@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_gradients_of_rows_that_are_no_numbers(kind, name):
    """All sources of a row whose weights are NaN get no finite gradient: a loss that went wrong does not hide."""
    graph = build_graph("batch")
    problem = problem_of("dot", graph, dtype=KINDS[kind])
    problem.inputs[name][20] = torch.nan
    actual, _ = run(problem, graph)
    source, target = graph.edge_index
    rows = target[source == 20] if name == "key" else torch.tensor([20])
    assert not bool(actual["out"][rows].isfinite().any()) and len(rows) > 0
    seen = source[torch.isin(target, rows)].unique()
    assert not bool(actual["grad value"][seen].isfinite().any()) and len(seen) > 10


@pytest.mark.parametrize("by_rows", [("targets",), ("sources",), ("targets", "sources")], ids="+".join)
def test_rows_may_take_the_backward_of_a_fixed_maximum(score, by_rows, monkeypatch):
    """Maxima that are far from the largest logits, and the weights of the edges under them."""
    mix(monkeypatch, by_rows)
    graph = late_graph() if score == "dot" else build_graph("far")
    problem = late_problem(graph, 2, torch.float32, 20.0) if score == "dot" else problem_of(score, graph)
    if score == "cosine":
        problem.inputs["beta"].fill_(-10.0)
    if score == "add":
        problem.inputs["alpha_src"].mul_(6.0)
    launched = check(problem, graph)
    assert {direction for direction in DIRECTIONS if ROWS_ENTRIES[direction] in launched} == {*by_rows}
    with torch.no_grad(), emulated_device():
        weights = problem.call(return_weights=True)[1]
    bound = tolerance(torch.float32, BACKWARD, BLOCK_MMA).largest
    assert (weights - problem.expected()["weights"]).abs().max() <= bound
