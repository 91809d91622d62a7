"""The schedules `smmf` and `pmf` on the emulator, against the float64 reference and its gradients."""

from dataclasses import replace

import pytest
import torch

from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.dispatch.attention import paper
from pyg_dfgnn.dispatch.attention.paper import ABLATIONS
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.chunks import most_edges
from pyg_dfgnn.settings import local_settings
from tests.covering import covering, over
from tests.emu import ORDERS, needs_compiler
from tests.kernels.block_mma import mix
from tests.kernels.problems import AXES, GRAPHS, NAMES, build_graph, cases, check, heavy_graph, label, problem_of

pytestmark = needs_compiler

CPU = torch.device("cpu")
SCORES = ("dot", "cosine", "add")
LAUNCHES = {
    "smmf": {"attention_smmf_forward", "attention_smmf_targets", "attention_paper_sources"},
    "pmf": {
        *("attention_pmf_forward_scores", "attention_pmf_forward"),
        *("attention_pmf_targets_scores", "attention_pmf_targets", "attention_paper_sources"),
    },
}
CASES = cases(SCORES, [("schedule", "operands")], schedule=tuple(LAUNCHES), **AXES)
# Several loads per lane, odd and even, heads in groups of blocks, more heads than a warp has lanes.
WIDE = covering(
    {
        "schedule": tuple(LAUNCHES),
        "score": SCORES,
        "dtype": tuple(NAMES),
        "shape": ((2, 131), (5, 33), (1, 512), (40, 4), (70, 1)),
    },
    pairs=[("schedule", "shape")],
)


@pytest.fixture(params=list(LAUNCHES))
def schedule(request):
    with local_settings(schedule=request.param):
        yield request.param


def check_schedule(name, *arguments):
    """:func:`check`, and that the weights apart, nothing but the kernels of the schedule ran."""
    with local_settings(schedule=name, fallback="error"):
        launched = check(*arguments)
    assert set(launched) - {"attention_weights", "attention_inverse_norm"} == LAUNCHES[name]


@pytest.mark.parametrize("row", CASES, ids=[f"{row['schedule']}-{label(row)}" for row in CASES])
def test_against_float64(row):
    graph = build_graph(*GRAPHS[row["graph"]]())
    problem = problem_of(row["score"], graph, row["heads"], row["channels"], row["dtype"], row["edge"])
    check_schedule(row["schedule"], problem, graph, row["dropout"], row["order"])


@pytest.mark.parametrize("row", WIDE, ids=lambda row: "-".join(str(value) for value in row.values()))
def test_wide_rows(row):
    graph = build_graph(*heavy_graph())
    problem = problem_of(row["score"], graph, *row["shape"], row["dtype"], edge=row["score"] != "cosine")
    check_schedule(row["schedule"], problem, graph, 0.3)


@over(score=SCORES, room_heads=(1, 2))
def test_heads_that_do_not_fit_in_one_block(score, room_heads, monkeypatch):
    """With little shared memory, heads go to blocks of their own and edges take their lanes."""
    graph = build_graph(*heavy_graph())
    needed = most_edges(graph, graph.csr, 8) * 4 * (1 if score == "add" else 2) * room_heads
    monkeypatch.setitem(gpu.known, CPU, replace(gpu.H200, shared_bytes=4 * needed))
    check_schedule("smmf", problem_of(score, graph, 7, 8), graph, 0.3, "random")


@pytest.mark.parametrize("score", SCORES)
def test_more_than_1024_edges_in_a_block(schedule, score):
    """Shared memory follows the graph, not a bound on its degrees."""
    edges = [(j % 97, i) for i in range(8) for j in range(150)] + [(j, 9) for j in range(90)]
    graph = build_graph(edges, 97, 20)
    check_schedule(schedule, problem_of(score, graph, 2, 4), graph, 0.0)


def test_more_than_48_kib_of_shared_memory(schedule):
    """A super node trains: 13,000 edges of a row."""
    edges = torch.stack([torch.arange(13000) % 300, torch.zeros(13000, dtype=torch.long)])
    graph = Graph.of(torch.cat([edges, torch.tensor([[1, 2], [1, 1]])], 1), 300, 3)
    check_schedule(schedule, problem_of("dot", graph, 1, 4), graph, 0.0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("score", "dtype"), list(zip(SCORES, NAMES, strict=True)), ids=str)
def test_rows_shared_by_the_warps_of_a_block(score, dtype, order, monkeypatch):
    """Some warps of a row have no edges, some rows have none at all."""
    monkeypatch.setattr(paper, "_SHARED_ROW_EDGES", 0)
    graph = build_graph(*heavy_graph())
    check_schedule("pmf", problem_of(score, graph, 3, 40, dtype, edge=score != "cosine"), graph, 0.3, order)


@pytest.mark.parametrize("score", SCORES)
def test_another_schedule_may_take_the_sources(schedule, score, monkeypatch):
    """The records of the pass over targets are those of `row_split`."""
    graph = build_graph(*heavy_graph())
    problem = problem_of(score, graph, 3, 8)
    mix(monkeypatch, ("sources",))
    launched = check(problem, graph, 0.3)
    assert f"attention_{schedule}_targets" in launched and "attention_backward_sources" in launched


@over(name=tuple(ABLATIONS), score_and_dtype=tuple(zip(SCORES, NAMES, strict=True)))
def test_ablations(name, score_and_dtype):
    """Each optimisation alone, switched off, leaves the results right."""
    score, dtype = score_and_dtype
    graph = build_graph(*heavy_graph())
    problem = problem_of(score, graph, 3, 40, dtype, edge=score != "cosine")
    with local_settings(schedule=name, fallback="error"):
        launched = check(problem, graph, 0.3, "random")
    assert "attention_smmf_forward" in launched
