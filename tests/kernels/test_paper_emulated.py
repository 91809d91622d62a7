"""The schedules `smmf` and `pmf` on the emulator, against the float64 reference and its gradients."""

from dataclasses import replace

import pytest
import torch

from pyg_dfgnn.dispatch import core as dispatch
from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.dispatch.attention import paper
from pyg_dfgnn.dispatch.attention.paper import ABLATIONS
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.chunks import most_edges
from pyg_dfgnn.ops.attention import functional as ops
from pyg_dfgnn.settings import settings
from tests.emu import ORDERS
from tests.emu.loader import compiler
from tests.kernels.covering import covering
from tests.kernels.emulated import emulated_device
from tests.kernels.test_emulated import GRAPHS, NAMES, Problem, build_graph, check, dense_graph, heavy_graph, label

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a host compiler (g++)")

CPU = torch.device("cpu")
SCORES = ("dot", "cosine", "add")
LAUNCHES = {
    "smmf": {"attention_smmf_forward", "attention_smmf_targets", "attention_paper_sources"},
    "pmf": {
        *("attention_pmf_forward_scores", "attention_pmf_forward"),
        *("attention_pmf_targets_scores", "attention_pmf_targets", "attention_paper_sources"),
    },
}
AXES = {
    "schedule": tuple(LAUNCHES),
    "graph": tuple(GRAPHS),
    "heads": (1, 3, 8),
    "channels": (1, 7, 16, 40),
    "dtype": tuple(NAMES),
    "edge": (False, True),
    "dropout": (0.0, 0.4),
    "order": ORDERS,
}
CASES = [
    row
    for score in SCORES
    for row in covering({"score": [score], **AXES}, lambda row: not (row["edge"] and row["score"] == "cosine"))
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=list(LAUNCHES))
def schedule(request):
    with settings(schedule=request.param):
        yield request.param


def check_schedule(name, *arguments):
    """:func:`check`, and that the weights apart, nothing but the kernels of the schedule ran."""
    with settings(schedule=name, fallback="error"):
        launched = check(*arguments)
    assert set(launched) - {"attention_weights", "attention_inverse_norm"} == LAUNCHES[name]


@pytest.mark.parametrize("row", CASES, ids=[f"{row['schedule']}-{label(row)}" for row in CASES])
def test_against_float64(row):
    graph = build_graph(*GRAPHS[row["graph"]]())
    problem = Problem(row["score"], graph, row["heads"], row["channels"], row["dtype"], row["edge"])
    check_schedule(row["schedule"], problem, graph, row["dropout"], row["order"])


# Several loads per lane, odd and even, heads in groups of blocks, more heads than a warp has lanes.
@pytest.mark.parametrize("shape", [(2, 131), (5, 33), (1, 512), (40, 4), (70, 1)], ids="H{0[0]}-C{0[1]}".format)
@pytest.mark.parametrize(("score", "dtype"), list(zip(SCORES, NAMES, strict=True)), ids=str)
def test_wide_rows(schedule, score, dtype, shape):
    graph = build_graph(*heavy_graph())
    check_schedule(schedule, Problem(score, graph, *shape, dtype, edge=score != "cosine"), graph, 0.3)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("room_heads", [1, 2])
def test_heads_that_do_not_fit_in_one_block(score, room_heads, monkeypatch):
    """With little shared memory, heads go to blocks of their own and edges take their lanes."""
    graph = build_graph(*heavy_graph())
    needed = most_edges(graph, graph.csr, 8) * 4 * (1 if score == "add" else 2) * room_heads
    monkeypatch.setitem(gpu.known, CPU, replace(gpu.H200, shared_bytes=4 * needed))
    check_schedule("smmf", Problem(score, graph, 7, 8, torch.float32, edge=False), graph, 0.3, "random")


@pytest.mark.parametrize("score", SCORES)
def test_more_than_1024_edges_in_a_block(schedule, score):
    """Shared memory follows the graph, not a bound on its degrees."""
    edges = [(j % 97, i) for i in range(8) for j in range(150)] + [(j, 9) for j in range(90)]
    graph = build_graph(edges, 97, 20)
    check_schedule(schedule, Problem(score, graph, 2, 4, torch.float32, edge=False), graph, 0.0)


def test_more_than_48_kib_of_shared_memory(schedule):
    """A super node trains: 13,000 edges of a row."""
    edges = torch.stack([torch.arange(13000) % 300, torch.zeros(13000, dtype=torch.long)])
    graph = Graph.of(torch.cat([edges, torch.tensor([[1, 2], [1, 1]])], 1), 300, 3)
    check_schedule(schedule, Problem("dot", graph, 1, 4, torch.float32, edge=False), graph, 0.0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("score", "dtype"), list(zip(SCORES, NAMES, strict=True)), ids=str)
def test_rows_shared_by_the_warps_of_a_block(score, dtype, order, monkeypatch):
    """Some warps of a row have no edges, some rows have none at all."""
    monkeypatch.setattr(paper, "_SHARED_ROW_EDGES", 0)
    graph = build_graph(*heavy_graph())
    check_schedule("pmf", Problem(score, graph, 3, 40, dtype, edge=score != "cosine"), graph, 0.3, order)


@pytest.mark.parametrize("score", SCORES)
def test_thread_order_changes_no_bit(schedule, score):
    graph = build_graph(*heavy_graph())
    problem = Problem(score, graph, 3, 8, torch.float32, edge=score != "cosine")
    results = []
    for order in ORDERS:
        torch.manual_seed(5)
        with emulated_device(order, seed=2):
            call = getattr(ops, f"{score}_attention")
            results.append(problem.run(lambda **inputs: call(graph, **inputs, dropout_p=0.2)))  # noqa: B023
    for other in results[1:]:
        assert [name for name in other if not torch.equal(other[name], results[0][name])] == []


@pytest.mark.parametrize(("num_src", "num_dst"), [(4, 3), (1, 1), (0, 3), (3, 0)])
@pytest.mark.parametrize("score", SCORES)
def test_no_edges(schedule, score, num_src, num_dst):
    graph = build_graph([], num_src, num_dst)
    problem = Problem(score, graph, 2, 4, torch.float32, edge=False)
    call = getattr(ops, f"{score}_attention")
    with emulated_device():
        actual = problem.run(lambda **inputs: call(graph, **inputs))
    for name, tensor in actual.items():
        assert torch.equal(tensor, torch.zeros_like(tensor)), name


def test_a_single_edge(schedule):
    graph = build_graph([(0, 0)], 1, 1)
    check_schedule(schedule, Problem("dot", graph, 1, 1, torch.float32, True), graph, 0.0)


def test_huge_logits_neither_overflow_nor_vanish(schedule):
    """The two best edges of a row share it, however large their logits are."""
    graph = Graph.of(torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1], [0, 0, 0, 1, 1, 1, 2, 2]]), 3, 3)
    value = torch.randn(3, 1, 4)
    alpha_src, alpha_dst = torch.tensor([[5000.0], [5000.0], [-4000.0]]), torch.tensor([[9.0], [-1e5], [1e30]])
    with emulated_device() as launched:
        out = ops.add_attention(graph, value, alpha_src, alpha_dst)
    assert f"attention_{schedule}_forward" in launched
    torch.testing.assert_close(out, value[:2].mean(0).expand(3, 1, 4), rtol=1e-6, atol=1e-6)


def test_zero_rows_under_the_norm(schedule):
    """A zero vector has cosine 0 to all others, and a gradient that is finite."""
    graph = build_graph(*GRAPHS["square"]())
    problem = Problem("cosine", graph, 2, 6, torch.float32, edge=False)
    problem.inputs["x_src"][3] = 0.0
    results = []
    for name in (schedule, "row_split"):
        with settings(schedule=name), emulated_device():
            results.append(problem.run(lambda **inputs: ops.cosine_attention(graph, **inputs)))
    keep = torch.arange(9) != 3  # The gradient at the zero vector itself is 1e12 times a difference of sums.
    for name, tensor in results[0].items():
        rows = keep if name in ("out", "grad x_src") else slice(None)
        torch.testing.assert_close(tensor[rows], results[1][name][rows], rtol=1e-5, atol=1e-5)
        assert tensor.isfinite().all(), name


def test_dropout_of_everything(schedule):
    graph = build_graph(*dense_graph())
    problem = Problem("dot", graph, 2, 8, torch.float32, edge=False)
    with emulated_device():
        actual = problem.run(lambda **inputs: ops.dot_attention(graph, **inputs, dropout_p=1.0))
    for name, tensor in actual.items():
        assert torch.equal(tensor, torch.zeros_like(tensor)), name


@pytest.mark.parametrize("score", SCORES)
def test_another_schedule_may_take_the_sources(schedule, score, monkeypatch):
    """The records of the pass over targets are those of `row_split`."""
    graph = build_graph(*heavy_graph())
    problem = Problem(score, graph, 3, 8, torch.float32, edge=False)
    choose = dispatch.choose

    def mixed(family, problem, graph, directions, current, **options):
        chosen = choose(family, problem, graph, directions, current, **options)
        rows = choose(family, problem, graph, directions, replace(current, schedule="row_split"), **options)
        return tuple(b if a.direction == "sources" else a for a, b in zip(chosen, rows, strict=True))

    monkeypatch.setattr(dispatch, "choose", mixed)
    launched = check(problem, graph, 0.3)
    assert f"attention_{schedule}_targets" in launched and "attention_backward_sources" in launched


@pytest.mark.parametrize("name", list(ABLATIONS))
@pytest.mark.parametrize(("score", "dtype"), list(zip(SCORES, NAMES, strict=True)), ids=str)
def test_ablations(name, score, dtype):
    """Each optimisation alone, switched off, leaves the results right."""
    graph = build_graph(*heavy_graph())
    problem = Problem(score, graph, 3, 40, dtype, edge=score != "cosine")
    with settings(schedule=name, fallback="error"):
        launched = check(problem, graph, 0.3, "random")
    assert "attention_smmf_forward" in launched
