"""The schedule `block_mma`: what speaks against it, what it plans, what it costs."""

from dataclasses import replace

import pytest
import torch

from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.dispatch.attention import block_mma
from pyg_dfgnn.dispatch.core import FORWARD
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph import Graph, block_sparse
from pyg_dfgnn.reference.zoo import hub, sbm
from pyg_dfgnn.settings import Settings, local_settings
from pyg_dfgnn.statements.op import DIRECTIONS
from tests.dispatch.test_core import PROBLEM, choose, graph_of, plan

SCORES = ("dot", "cosine", "add")
KIB = 1 << 10


def batch(num_graphs=6, nodes=40):
    return graph_of(sbm(num_graphs, nodes))


def path(num_nodes):
    """One segment with one edge per node: its blocks are all but empty."""
    nodes = torch.arange(num_nodes - 1)
    return Graph.of(torch.stack([nodes, nodes + 1]), num_nodes)


def full(num_src, num_dst):
    return Graph.of(torch.ones(num_src, num_dst).nonzero().t(), num_src, num_dst)


# Reasons --------------------------------------------------------------------------------------------------------------


def kinds(graph):
    """Kinds of values that have been derived from a graph."""
    return {key if isinstance(key, str) else key[0] for key in graph.derived_bytes()}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 8), (1, 128), (8, 16), (4, 64), (3, 24), (65535, 8)], ids=str)
def test_what_runs(direction, dtype, size):
    heads, channels = size
    for score in SCORES:
        problem = replace(PROBLEM, score=score, dtype=dtype, heads=heads, channels=channels)
        assert block_mma.reasons_against(problem, direction, batch()) == []
        assert block_mma.reasons_against(replace(problem, tf32=True), direction, full(70, 40)) == []
        if dtype != torch.float32:
            assert block_mma.reasons_against(problem, direction, full(70, 40)) == []


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"score": "gatv2"}, "the gatv2 score is no matrix product"),
        ({"edge": True}, "blocks of bits have no place for edge features"),
        ({"dropout": True}, "blocks of bits have no edge ids to draw the dropout mask by"),
        ({"channels": 132}, "132 channels per head, blocks take up to 128"),
        ({"channels": 6}, "6 channels of torch.float32 are no multiple of 16 bytes"),
        ({"channels": 20, "dtype": torch.float16}, "20 channels of torch.float16 are no multiple of 16 bytes"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_each_reason_of_a_problem(direction, changes, reason):
    graph = batch()
    assert block_mma.reasons_against(replace(PROBLEM, **changes), direction, graph) == [reason]
    # Found without a look at the graph.
    assert not {"diagonal_blocks", "block_sparse"} & kinds(graph)


def test_all_reasons_of_a_problem_at_once():
    problem = replace(PROBLEM, score="gatv2", edge=True, dropout=True, channels=133)
    assert len(block_mma.reasons_against(problem, "forward", path(1))) == 6


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("num_src", "num_dst"), [(0, 0), (5, 5), (3, 0), (0, 3)])
def test_a_graph_without_edges(direction, num_src, num_dst):
    graph = Graph.of(torch.zeros(2, 0, dtype=torch.long), num_src, num_dst)
    assert block_mma.reasons_against(PROBLEM, direction, graph) == ["the graph has no edges"]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_listed_columns_in_full_float32(direction, monkeypatch):
    """Found before any block is built. Sources that are not the targets, and segments too long to be taken whole."""
    monkeypatch.setattr(block_mma, "MAX_SEGMENT", 40)
    for graph in (full(70, 40), full(41, 41)):
        assert block_mma.reasons_against(PROBLEM, direction, graph) == [
            "listed columns do not pay in full float32: it takes segments of nodes, 16 bits or TF32"
        ]
        assert "block_sparse" not in kinds(graph)
        for changes in ({"tf32": True}, {"dtype": torch.float16}, {"dtype": torch.bfloat16}):
            assert block_mma.reasons_against(replace(PROBLEM, **changes), direction, graph) == []
    assert block_mma.reasons_against(PROBLEM, direction, full(40, 40)) == []


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_too_few_bits(direction, monkeypatch):
    """The share in the reason is that of the graph, and at the threshold blocks are built."""
    graph = path(1600)
    share = graph.num_edges / 1600**2
    (reason,) = block_mma.reasons_against(PROBLEM, direction, graph)
    assert reason == f"{share:.2%} of the bits of its blocks would be set, at least {block_mma.MIN_FILL:.0%} are needed"
    assert "block_sparse" not in kinds(graph)
    monkeypatch.setattr(block_mma, "MIN_FILL", share)
    assert block_mma.reasons_against(PROBLEM, direction, graph) == []


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_duplicates(direction):
    """One edge of hundreds, twice, is enough."""
    edges = batch().edge_index
    graph = Graph.of(torch.cat([edges, edges[:, 5:6]], dim=1), 240)
    assert block_mma.reasons_against(PROBLEM, direction, graph) == ["some edge occurs twice, which a bit cannot tell"]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("score", SCORES)
def test_shared_memory(direction, score, monkeypatch):
    """Just enough is enough."""
    problem = replace(PROBLEM, score=score, heads=1, channels=128)
    graph = batch()
    needed = block_mma.plan_pass(problem, direction, graph).shared_bytes
    monkeypatch.setitem(gpu.known, PROBLEM.device, replace(gpu.H200, shared_bytes=needed))
    assert block_mma.reasons_against(problem, direction, graph) == []
    monkeypatch.setitem(gpu.known, PROBLEM.device, replace(gpu.H200, shared_bytes=needed - 1))
    (reason,) = block_mma.reasons_against(problem, direction, graph)
    assert reason == f"a block needs {needed} bytes of shared memory, the device has {needed - 1}"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_shape_fits_an_h200(direction, dtype, tf32):
    """In two blocks per multiprocessor at least, whatever the shape."""
    graph = batch()
    for score in SCORES:
        for heads in (1, 2, 3, 4, 8, 12):
            for channels in range(8, 129, 8):
                problem = replace(PROBLEM, score=score, dtype=dtype, heads=heads, channels=channels, tf32=tf32)
                assert 0 < block_mma.plan_pass(problem, direction, graph).shared_bytes <= 114 * KIB


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_the_zoo(case, score, tf32):
    """Every graph has either a reason or a plan with a cost, for each pass."""
    graph = graph_of(case)
    problem = replace(PROBLEM, score=score, tf32=tf32)
    for direction in DIRECTIONS:
        if not block_mma.reasons_against(problem, direction, graph):
            chosen = block_mma.plan_pass(problem, direction, graph)
            assert chosen.schedule == "block_mma"
            assert block_mma.cost(problem, direction, graph, chosen, gpu.H200).seconds > 0


# Plans ----------------------------------------------------------------------------------------------------------------


def test_listed_columns_where_segments_do_not_help(monkeypatch):
    """Sources that are not the targets, and segments too long to be taken whole."""
    problem = replace(PROBLEM, dtype=torch.float16)
    assert not block_mma.plan_pass(problem, "forward", batch()).compact
    assert block_mma.plan_pass(problem, "forward", full(70, 40)).compact
    long, fits = (full(size, size) for size in (41, 40))
    monkeypatch.setattr(block_mma, "MAX_SEGMENT", 40)
    assert block_mma.plan_pass(problem, "forward", long).compact
    assert not block_mma.plan_pass(problem, "forward", fits).compact


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_long_sums_are_folded(direction):
    """In full float32 only: rounding the factors loses more than tensor cores cut off the sums."""

    def folds(size, **changes):
        return block_mma.plan_pass(replace(PROBLEM, **changes), direction, full(size, size)).constants["FOLD"]

    assert (folds(16), folds(500)) == (0, 1)
    assert folds(500, tf32=True) == folds(500, dtype=torch.float16) == folds(500, dtype=torch.bfloat16) == 0


def test_windows_suit_the_segments():
    """The fewest idle warps, in segments of 4, 5 or 9 units of 16 rows; of equals the first."""
    assert [block_mma._window_warps(((units, 3),), (4, 5)) for units in (4, 5, 9)] == [4, 5, 5]
    assert block_mma._window_warps(((4, 9), (5, 1)), (4, 5)) == 4
    assert block_mma._window_warps(((4, 1), (5, 9)), (4, 5)) == 5
    assert block_mma._window_warps(((20, 1),), (4, 5)) == 4


def test_the_two_sides_have_tiles_of_their_own():
    graph = batch()
    forward, targets, sources = (block_sparse.of(graph, direction, 64, False) for direction in DIRECTIONS)
    assert forward is targets and forward is not sources


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tf32_changes_the_plan(direction):
    """One product instead of three; 16-bit products are exact either way."""
    graph = batch()
    plain, rounded = (block_mma.plan_pass(replace(PROBLEM, tf32=tf32), direction, graph) for tf32 in (False, True))
    assert plain != rounded and str(plain) != str(rounded)
    assert "three tf32 products each" in str(plain)
    assert "tf32 products" in str(rounded) and "three" not in str(rounded)
    cost = [
        block_mma.cost(replace(PROBLEM, tf32=tf32), direction, graph, chosen, gpu.H200).overlapped["products"]
        for tf32, chosen in ((False, plain), (True, rounded))
    ]
    assert cost[0] > cost[1]
    half = replace(PROBLEM, dtype=torch.bfloat16)
    assert "product" not in str(block_mma.plan_pass(half, direction, graph))


def test_a_pass_reads_as_text():
    graph = batch()
    fill = graph.num_edges / (6 * 48 * 48)
    chosen = block_mma.plan_pass(replace(PROBLEM, dtype=torch.float16), "forward", graph)
    text = str(chosen)
    assert text.startswith(f"windows of {chosen.rows} rows over the nodes of the segment, ")
    assert f"{fill:.1%} of the bits set" in text and f"{chosen.shared_bytes} bytes of shared memory" in text
    listed = block_mma.plan_pass(replace(PROBLEM, dtype=torch.float16), "forward", full(70, 40))
    assert "over the columns that occur" in str(listed)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("score", SCORES)
def test_cost_grows_with_the_area(direction, score):
    """Also where the number of edges does not, and with heads and channels."""
    problem = replace(PROBLEM, score=score, dtype=torch.float16)

    def cost(problem, graph):
        return block_mma.cost(problem, direction, graph, block_mma.plan_pass(problem, direction, graph), gpu.H200)

    # One loop per node, in segments of 32 or of 128.
    def loops(size):
        ends = torch.arange(0, 640, size)
        edges = torch.cat([torch.arange(640).expand(2, 640), torch.stack([ends, ends + size - 1])], dim=1)
        return Graph.of(edges.unique(dim=1), 640)

    few, many = cost(problem, loops(32)), cost(problem, loops(128))
    assert 0 < few.added["numbers"] < many.added["numbers"] and few.seconds < many.seconds
    graph = batch()
    base = cost(problem, graph)
    assert base.added["numbers"] < cost(replace(problem, heads=16), graph).added["numbers"]
    assert base.overlapped["products"] < cost(replace(problem, channels=32), graph).overlapped["products"]
    assert base.seconds <= cost(problem, batch(num_graphs=12)).seconds


# Choices --------------------------------------------------------------------------------------------------------------


def test_the_plan_of_a_batch():
    with local_settings(schedule="block_mma", fallback="error"):
        found = plan(PROBLEM, batch())
    assert found.schedule == "block_mma" and found.deterministic
    assert [choice.reason for choice in found] == ["asked for"] * 3
    assert str(found).count("block_mma (asked for), windows of ") == 3


@pytest.mark.parametrize(
    ("problem", "graph", "message"),
    [
        pytest.param(replace(PROBLEM, dropout=True), batch, "dropout mask", id="dropout"),
        pytest.param(PROBLEM, lambda: path(1600), "of the bits of its blocks would be set", id="sparse"),
        pytest.param(PROBLEM, lambda: graph_of(hub(300)), "some edge occurs twice", id="duplicates"),
    ],
)
def test_an_unsuited_call_is_refused(problem, graph, message):
    """As an error with all its reasons, or in favour of `row_split`."""
    graph = graph()
    with pytest.raises(UnsupportedError, match=message):
        choose(problem, graph, FORWARD, Settings(schedule="block_mma", fallback="error"))
    (choice,) = choose(problem, graph, FORWARD, Settings(schedule="block_mma", fallback="silent"))
    assert choice.plan.schedule == "row_split" and choice.reason == "block_mma cannot run"
