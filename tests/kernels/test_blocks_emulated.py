"""Row kernels whose thread blocks join chunks or hold whole graphs, and rows in another order, on the emulator."""

from functools import partial

import pytest
import torch

from pyg_dfgnn.dispatch import traversal
from pyg_dfgnn.dispatch.attention import row_split, smem
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.node_ranges import node_ranges
from pyg_dfgnn.ops.attention import functional as ops
from pyg_dfgnn.reference import attention as reference
from pyg_dfgnn.reference.tolerances import relative_error
from pyg_dfgnn.settings import local_settings, settings
from tests.covering import Row, covering, product
from tests.emu import ORDERS, needs_compiler
from tests.kernels.emulated import emulated_device
from tests.kernels.problems import (
    NAMES,
    assert_largest_close,
    batch_graph,
    build_graph,
    check,
    heavy_graph,
    label,
    problem_of,
    square_graph,
    take_sweeps,
)
from tests.ops.problems import SCORES

pytestmark = needs_compiler


GRAPHS = {"heavy": heavy_graph, "square": square_graph, "batch": batch_graph}


def cases(graphs: tuple[str, ...], shapes: tuple[tuple[int, int], ...], scores: tuple[str, ...] = SCORES) -> list[Row]:
    axes = {
        "score": scores,
        "graph": graphs,
        "shape": shapes,
        "dtype": tuple(NAMES) if scores == SCORES else (torch.float32,),
        "edge": (False, True),
        "dropout": (0.0, 0.3),
        "order": ORDERS,
    }
    rows = covering(axes, lambda row: not (row["edge"] and row["score"] == "cosine"))
    return [{**row, "heads": row["shape"][0], "channels": row["shape"][1]} for row in rows]


def run(row: Row) -> set[str]:
    torch.manual_seed(0)
    graph = build_graph(*GRAPHS[row["graph"]]())
    problem = problem_of(row["score"], graph, *row["shape"], row["dtype"], row["edge"])
    return set(check(problem, graph, row["dropout"], row["order"]))


@pytest.fixture
def joined(monkeypatch, default_settings):
    """Chunks of two edges and more; nothing is left to a merge kernel."""
    settings(schedule="row_split")
    monkeypatch.setattr(traversal, "JOINED_EDGES", 2)


@pytest.fixture
def small_blocks(monkeypatch, default_settings):
    """Ranges of a few nodes for two warps, so that the rows of a block take several rounds."""
    settings(schedule="smem", fallback="error")
    constants = smem.constants_of
    monkeypatch.setattr(smem, "constants_of", lambda *a: {**constants(*a), "WARPS": 2})
    monkeypatch.setattr(smem, "_ranges", lambda problem, direction, graph: node_ranges(graph, 14))
    monkeypatch.setattr(row_split, "saves_dout_dlogit", lambda *a: False)


JOINED = cases(("heavy", "square"), ((1, 128), (3, 7), (8, 16)))


@pytest.mark.parametrize("row", JOINED, ids=map(label, JOINED))
def test_joined_chunks(joined, row):
    launched = run(row)
    assert {"attention_forward", "attention_backward_sources"} <= launched
    assert not [name for name in launched if name.endswith("_merge")]


@pytest.mark.parametrize("row", JOINED, ids=map(label, JOINED))
def test_joined_chunks_in_order(joined, row, monkeypatch):
    """As of many rows: the longest first."""
    monkeypatch.setattr(row_split, "_FEW_BLOCKS", 0)
    graph = build_graph(*GRAPHS[row["graph"]]())
    planned = AttentionProblem(
        row["score"], *row["shape"], row["dtype"], graph.device, row["edge"], row["dropout"] > 0, True
    )
    for direction in ("forward", "sources"):
        constants = row_split.plan_pass(planned, direction, graph).constants
        assert constants["JOINED"] and constants["ORDERED"] == (constants["WARP_ROWS"] > 1)
    assert not [name for name in run(row) if name.endswith("_merge")]


@pytest.mark.parametrize("order", ORDERS)
def test_joined_chunks_of_half_of_the_heads(joined, order):
    """The other heads lie in blocks of their own; a hub on both sides, rows without edges."""
    torch.manual_seed(0)
    graph = build_graph(*hub_graph())
    planned = AttentionProblem("dot", 8, 16, torch.float32, graph.device, False, False)
    constants = row_split.plan_pass(planned, "forward", graph).constants
    assert constants["JOINED"] and (constants["HEAD_SLOTS"], constants["WARP_ROWS"]) == (4, 2)
    launched = check(problem_of("dot", graph, 8, 16), graph, 0.0, order)
    assert not [name for name in launched if name.endswith("_merge")]


RESIDENT = cases(("batch",), ((1, 128), (8, 16), (2, 10)))


@pytest.mark.parametrize("row", RESIDENT, ids=map(label, RESIDENT))
def test_resident_rows(small_blocks, row):
    assert {"attention_forward", "attention_backward_targets", "attention_backward_sources"} <= run(row)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["batch", "isolated"])
def test_resident_rows_of_narrow_heads(small_blocks, name, order):
    """Two loads of each of eight heads, two rows in a warp."""
    torch.manual_seed(0)
    graph = build_graph(*{"batch": batch_graph, "isolated": isolated_graph}[name]())
    planned = AttentionProblem("gatv2", 8, 16, torch.float32, graph.device, False, False)
    assert smem.constants_of(planned, "forward")["LANE_VECS"] == 2
    check(problem_of("gatv2", graph, 8, 16), graph, 0.0, order)


@pytest.mark.parametrize("in_shared", [0, 1], ids=["cache", "shared"])
def test_resident_rows_of_either_memory(small_blocks, in_shared, monkeypatch):
    constants = smem.constants_of
    monkeypatch.setattr(smem, "constants_of", lambda *a: {**constants(*a), "IN_SHARED": in_shared})
    graph = build_graph(*batch_graph())
    check(problem_of("dot", graph, 1, 16), graph, 0.0)


def isolated_graph() -> tuple[list[tuple[int, int]], int, int]:
    """Ranges whose rows are all empty, and nodes that only have an edge to themselves."""
    return [(0, 1), (1, 0), (40, 40)], 60, 60


NORMS = [
    (1, 128, torch.float32),
    (8, 16, torch.float32),
    (2, 10, torch.float32),
    (1, 128, torch.bfloat16),
    (3, 20, torch.float16),
]
# Several groups of heads, and several heads of a lane, which `smem` does not take.
GROUPED_NORMS = [(20, 64, torch.float32)]


def hub_graph() -> tuple[list[tuple[int, int]], int, int]:
    """A row of many chunks and a column of many rows, beside light and empty ones."""
    return [(j, 3) for j in range(19)] + [(2, i) for i in range(13)] + [(4, 5)] * 3 + [(0, 0)], 20, 20


NORM_GRAPHS = {
    "batch": batch_graph,
    "isolated": isolated_graph,
    "node": lambda: ([(0, 0)], 1, 1),
    "hub": hub_graph,
    "square": square_graph,
    "edgeless": lambda: ([], 3, 3),
}


NORM_CASES = [
    (schedule, row["name"], *row["case"])
    for schedule, names, cases in (
        ("small_blocks", ("batch", "isolated", "node"), NORMS),
        ("joined", tuple(NORM_GRAPHS), NORMS + GROUPED_NORMS),
    )
    for row in product({"name": names, "case": cases})
]


@pytest.mark.parametrize(("schedule", "name", "heads", "channels", "dtype"), NORM_CASES, ids=str)
def test_forward_finds_the_norms(request, monkeypatch, schedule, name, heads, channels, dtype):
    """No kernel of their own and the same bits in all that reads them."""
    request.getfixturevalue(schedule)
    graph = build_graph(*NORM_GRAPHS[name]())
    problem = problem_of("cosine", graph, heads, channels, dtype, edge=False)
    problem.inputs["x_src"][0, 0] = 0.0
    problem.inputs["x_src"][-1, -1, :-1] = 0.0
    call = partial(ops.cosine_attention, graph)
    with emulated_device() as launched:
        first = problem.run(lambda **inputs: call(**inputs))
        again = problem.run(lambda **inputs: call(**inputs))
        out, weights = call(**problem.inputs, return_weights=True)
        with torch.no_grad():
            results = [*call(**problem.inputs, return_weights=True), call(**problem.inputs)]
    assert "attention_inverse_norm" not in launched
    assert [key for key in first if not torch.equal(first[key], again[key])] == []
    assert all(map(torch.equal, results, (out, weights, out)))
    exact = reference.cosine_attention(graph.edge_index, graph.num_dst, **_wide(problem.inputs))
    assert torch.equal(out, first["out"]) and relative_error(weights, exact[1]) < 1e-6
    assert relative_error(out, exact[0]) < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]


def _wide(inputs):
    return {name: tensor.detach().double() for name, tensor in inputs.items()}


# The launches of norms: `smem` finds those of the sources, `row_split` those of targets that are the sources.
NORM_LAUNCHES = {"small_blocks": 1, "joined": 2}


@pytest.mark.parametrize(("heads", "channels", "dtype"), NORMS[1:4], ids=str)
@pytest.mark.parametrize("name", ["batch", "hub"])
@pytest.mark.parametrize("schedule", NORM_LAUNCHES)
def test_targets_that_are_no_sources_have_norms_of_their_own(request, schedule, name, heads, channels, dtype):
    if name == "hub" and schedule == "small_blocks":
        pytest.skip("an edge leaves every range of nodes")
    request.getfixturevalue(schedule)
    graph = build_graph(*NORM_GRAPHS[name]())
    problem = problem_of("cosine", graph, heads, channels, dtype, edge=False)
    problem.inputs["x_dst"] = torch.randn_like(problem.inputs["x_src"])
    call = partial(ops.cosine_attention, graph)
    with emulated_device() as launched:
        first = problem.run(lambda **inputs: call(**inputs))
        launched.clear()
        again = problem.run(lambda **inputs: call(**inputs))
        assert launched[:-2] == ["attention_inverse_norm"] * NORM_LAUNCHES[schedule] + ["attention_forward"]
        launched.clear()
        with torch.no_grad():
            alone = call(**problem.inputs)
    # Nothing but backward reads those that `row_split` finds.
    assert launched == ["attention_inverse_norm"] * (schedule == "small_blocks") + ["attention_forward"]
    assert [key for key in first if not torch.equal(first[key], again[key])] == []
    assert torch.equal(alone, first["out"])
    assert_largest_close(problem.dtype, again, problem.expected())


@pytest.mark.parametrize("schedule", NORM_LAUNCHES)
def test_an_edited_output_is_computed_again_with_its_norms(request, schedule):
    request.getfixturevalue(schedule)
    graph = build_graph(*batch_graph())
    problem = problem_of("cosine", graph, 2, 10)
    with emulated_device() as launched:
        for _ in range(2):
            launched.clear()
            actual = problem.run(lambda **inputs: ops.cosine_attention(graph, **inputs).mul_(0.5))
    assert launched.count("attention_forward") == 2 and "attention_inverse_norm" not in launched
    assert_largest_close(problem.dtype, actual, {name: tensor * 0.5 for name, tensor in problem.expected().items()})


ORDERED = cases(("heavy", "square"), ((1, 128), (8, 16)), ("dot", "add"))


@pytest.mark.parametrize("row", ORDERED, ids=map(label, ORDERED))
def test_ordered_rows(default_settings, monkeypatch, row):
    """Rows by descending length, with chunks that are merged, swept where a warp has one row."""
    settings(schedule="row_split")
    monkeypatch.setattr(row_split, "_JOINED_BYTES", 0)
    monkeypatch.setattr(row_split, "max_edges_of", lambda *sizes: 2)
    monkeypatch.setattr(row_split, "ORDERED_EDGES", 3)
    take_sweeps(monkeypatch, 2)
    assert "attention_forward_merge" in run(row)


def test_nodes_without_edges():
    """A range whose rows are all empty, next to one that has edges."""
    graph = Graph.of(torch.tensor([[0, 1, 40], [1, 0, 40]]), 60)
    with local_settings(schedule="smem", fallback="error"):
        check(problem_of("dot", graph, 1, 16), graph, 0.0)


@pytest.mark.parametrize("score", ["dot", "add", "gatv2"])
def test_a_hub_of_many_chunks_adds_up(score, monkeypatch, default_settings):
    """Sums over 8,000 edges merged from as many chunks: what rounding costs must not grow with their number."""
    settings(schedule="row_split")
    monkeypatch.setattr(row_split, "max_edges_of", lambda *sizes: 1)
    monkeypatch.setattr(row_split, "ORDERED_EDGES", 1)
    monkeypatch.setattr(row_split, "_joined", lambda *chosen: None)
    nodes = 8000
    torch.manual_seed(1)
    graph = build_graph([(0, i) for i in range(nodes)] + [(i, 0) for i in range(1, nodes)], nodes, nodes)
    problem = problem_of(score, graph, 1, 4)
    # Terms of one sign, so that the sums do not cancel.
    problem.inputs = {name: tensor.abs() for name, tensor in problem.inputs.items()}
    problem.grad_out.abs_()
    with emulated_device() as launched:
        actual = problem.run(lambda **inputs: getattr(ops, f"{score}_attention")(graph, **inputs))
    assert "attention_forward_merge" in launched and "attention_backward_sources_merge" in launched
    expected = problem.expected()
    for name in {"out", "grad value", "grad key", "grad alpha_src", "grad x_src"} & set(actual):
        assert relative_error(actual[name][0], expected[name][0]) < 5e-7, name
