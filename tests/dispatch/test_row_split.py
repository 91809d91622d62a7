"""The schedule `row_split`: lane layouts, packing, chunks, column blocks."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.dispatch.attention import row_split as rows
from pyg_dfgnn.dispatch.attention.problem import SCORES
from pyg_dfgnn.dispatch.attention.row_split import pass_constants, plan_pass
from pyg_dfgnn.dispatch.traversal import items_per_block, lane_constants
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference.zoo import random, zoo
from pyg_dfgnn.statements.op import DIRECTIONS
from tests.dispatch.test_core import DTYPES, PROBLEM, graph_of


def cache_of(monkeypatch, cache_bytes):
    monkeypatch.setitem(gpu.known, PROBLEM.device, replace(gpu.H200, cache_bytes=cache_bytes))


# Lanes ----------------------------------------------------------------------------------------------------------------


def covered(c):
    """Offsets in a row [H, C] that the lanes of all head groups load, in elements, as storage.cuh addresses them."""
    group_heads = c["HEAD_SLOTS"] * c["LANE_HEADS"]
    offsets = []
    for group in range(-(-c["HEADS"] // group_heads)):
        for lane in range(c["HEAD_LANES"] * c["HEAD_SLOTS"]):
            head_lane, slot = lane % c["HEAD_LANES"], lane // c["HEAD_LANES"]
            for h in range(c["LANE_HEADS"]):
                head = group * group_heads + slot + h * c["HEAD_SLOTS"]
                if head >= c["HEADS"]:
                    continue
                for k in range(c["LANE_VECS"]):
                    first = (k * c["HEAD_LANES"] + head_lane) * c["VEC"]
                    if first < c["CHANNELS"]:
                        offsets += [head * c["CHANNELS"] + first + v for v in range(c["VEC"])]
    return offsets


@pytest.mark.parametrize("wide", [False, True], ids=["packed", "wide"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_lanes_of_all_shapes(itemsize, wide):
    def is_power_of_two(n):
        return n > 0 and n & (n - 1) == 0

    for heads, channels in product(range(1, 65), range(1, 513)):
        c = lane_constants(heads, channels, itemsize, wide)
        shape = (heads, channels)
        lanes = ("HEAD_LANES", "HEAD_SLOTS", "EDGE_SLOTS", "WARP_ROWS")
        assert c["HEAD_LANES"] * c["HEAD_SLOTS"] * c["EDGE_SLOTS"] * c["WARP_ROWS"] == 32, shape
        assert all(is_power_of_two(c[name]) for name in (*lanes, "VEC", "LANE_HEADS")), shape
        # One load is at most 16 bytes, and every row and head begins at a multiple of it.
        assert c["VEC"] * itemsize <= 16 and channels % c["VEC"] == 0, shape
        # All channels of a head, and no load that no lane needs.
        per_lane = c["VEC"] * c["HEAD_LANES"]
        assert per_lane * c["LANE_VECS"] >= channels > per_lane * (c["LANE_VECS"] - 1), shape
        # More lanes would idle, fewer would each hold more.
        assert c["HEAD_LANES"] == 1 or per_lane * c["LANE_VECS"] < 2 * channels, shape
        assert c["HEAD_SLOTS"] < 2 * heads and c["LANE_HEADS"] * c["HEAD_SLOTS"] < 2 * heads, shape
        # A lane goes through several heads only while its registers allow; one head may need more by itself.
        elements = c["LANE_VECS"] * c["VEC"]
        assert elements <= 16 and c["LANE_HEADS"] * elements <= 16, shape
        assert (c["EDGE_SLOTS"] == 1) or (c["WARP_ROWS"] == 1), shape
        assert (c["WARP_ROWS"] == 1) or not wide, shape
        assert -(-heads // (c["HEAD_SLOTS"] * c["LANE_HEADS"])) <= 65535, shape


@pytest.mark.parametrize("loads", [1, 2, 4])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 33, 64])
def test_every_element_is_loaded_once(heads, itemsize, loads):
    for channels in (1, 2, 3, 4, 6, 7, 8, 12, 16, 31, 32, 40, 64, 67, 100, 128, 131, 160, 256, 300, 511, 512):
        offsets = covered(lane_constants(heads, channels, itemsize, False, loads))
        assert sorted(offsets) == list(range(heads * channels)), channels


def test_constants_are_plain_numbers_and_read_only():
    """They become #define lines and part of a cache key."""
    for score, direction, wide in product(SCORES, DIRECTIONS, (False, True)):
        constants = pass_constants(replace(PROBLEM, score=score), direction, wide)
        assert all(type(value) is int for value in constants.values())
        assert constants["UNROLL"] in (1, 2, 4, 8) and constants["MIN_BLOCKS"] >= 1
    with pytest.raises(TypeError):
        lane_constants(1, 1, 4, True)["VEC"] = 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_adds_in_the_order_of_inference(dtype):
    for heads, channels, wide in product((1, 8), (16, 40, 128), (False, True)):
        problem = replace(PROBLEM, score="add", dtype=dtype, heads=heads, channels=channels)
        found = [dict(pass_constants(problem, direction, wide)) for direction in ("forward", "dout_dlogit")]
        assert [c.pop("DOUT_DLOGIT") for c in found] == [0, 1]
        assert len({tuple(c[name] for name in c if name != "MIN_BLOCKS") for c in found}) == 1


@pytest.mark.parametrize(("edge", "dropout"), list(product((False, True), repeat=2)))
def test_options_are_part_of_the_specialisation(edge, dropout):
    for dtype, number in zip(DTYPES, (0, 1, 2), strict=True):
        constants = pass_constants(replace(PROBLEM, dtype=dtype, edge=edge, dropout=dropout), "forward", False)
        assert [constants[name] for name in ("EDGE", "DROPOUT", "STORAGE")] == [edge, dropout, number]


# Passes ---------------------------------------------------------------------------------------------------------------


def test_rows_are_packed_until_lanes_can_share_them():
    """More than two steps per row on average make sharing worthwhile; each side of the graph decides for itself."""
    small = replace(PROBLEM, heads=1, channels=4)
    shared = pass_constants(small, "forward", True)
    step = 2 * shared["UNROLL"] * shared["EDGE_SLOTS"]
    for num_edges, packed in ((10 * step, True), (10 * step + 1, False)):
        constants = plan_pass(small, "forward", graph_of(random(1000, 10, num_edges))).constants
        assert (constants["WARP_ROWS"] > 1) == packed
        assert constants["EDGE_SLOTS"] * constants["WARP_ROWS"] == 32
    graph = graph_of(random(1000, 10, 10 * step + 1))
    assert plan_pass(small, "targets", graph).constants["WARP_ROWS"] == 1
    assert plan_pass(small, "sources", graph).constants["WARP_ROWS"] == 32


def test_a_full_warp_has_nothing_to_share():
    wide = replace(PROBLEM, heads=1, channels=512)
    for num_edges in (100, 100_000):
        constants = plan_pass(wide, "forward", graph_of(random(100, 100, num_edges))).constants
        assert constants["EDGE_SLOTS"] == constants["WARP_ROWS"] == 1


class FakeSide:
    """What the rule for column blocks reads of an adjacency."""

    rows = cols = "nodes"

    def __init__(self, num_rows, num_edges):
        self.num_rows, self.num_edges = num_rows, num_edges


def test_more_column_blocks_where_less_fits_the_cache(monkeypatch):
    """One block where all gathered rows fit; more for a smaller cache, more tensors, and wider storage."""
    side = FakeSide(100_000, 100_000 * 500)

    def blocks(cache_bytes, side=side, **changes):
        cache_of(monkeypatch, cache_bytes)
        return rows._blocks(replace(PROBLEM, **changes), "forward", side, 100_000, PROBLEM.heads)

    assert blocks(1 << 40) == 1
    sizes = [blocks(cache_bytes) for cache_bytes in (100_000_000, 50_000_000, 25_000_000, 10_000_000)]
    assert sizes == sorted(sizes) and 1 < sizes[0] < sizes[-1]
    assert blocks(25_000_000, score="add") < blocks(25_000_000, score="dot")
    assert blocks(10_000_000, dtype=torch.bfloat16) < blocks(10_000_000)
    # Too few edges of a row in each block: its state would travel more than the rows it saves.
    assert blocks(25_000_000, side=FakeSide(100_000, 100_000)) == 1


def test_groups_of_heads_gather_one_after_the_other(monkeypatch):
    """What counts is the group's share of a row, not the whole row."""
    cache_of(monkeypatch, 10_000_000)
    problem = replace(PROBLEM, heads=64, channels=16)
    graph = FakeGraph(100_000, 1 << 40, 2000)
    found = plan_pass(problem, "forward", graph)
    group = found.constants["HEAD_SLOTS"] * found.constants["LANE_HEADS"]
    assert group < 64
    assert found.blocks == rows._blocks(problem, "forward", graph.csr, 100_000, group)
    assert found.blocks < rows._blocks(problem, "forward", graph.csr, 100_000, 64)


def test_sweeps(monkeypatch):
    """Rows too short to share their edges are never swept."""
    cache_of(monkeypatch, 1)
    monkeypatch.setattr(rows, "_MIN_BLOCK_EDGES", 0)
    small = replace(PROBLEM, heads=1, channels=4)
    for case in zoo():
        for direction in DIRECTIONS:
            found = plan_pass(small, direction, graph_of(case))
            assert found.blocks == 1 or found.constants["WARP_ROWS"] == 1
    graph = graph_of(random(50, 10, 4000))
    found = plan_pass(small, "forward", graph)
    assert found.blocks > 1 and "sweeps over blocks of columns" in str(found)
    weights = plan_pass(small, "weights", graph)
    assert weights.blocks == 1 and weights.constants == found.constants


@pytest.mark.parametrize("score", SCORES)
def test_passes_of_the_zoo(case, score):
    """Each graph has its passes, an empty one too."""
    for direction in DIRECTIONS:
        found = plan_pass(replace(PROBLEM, score=score), direction, graph_of(case))
        assert found.constants["WARP_ROWS"] * found.constants["EDGE_SLOTS"] >= 1 and found.blocks == 1
        assert 8 <= found.max_edges <= 1024


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("score", SCORES)
def test_long_rows_are_joined_in_a_block_or_come_first(score, direction):
    """A thread block that joins the chunks of a row goes through all of them; hubs come first where blocks cannot."""
    kinds = set()
    shapes = product(((1, 128), (8, 16), (3, 7), (8, 128)), DTYPES, (4, 8, 40, 170, 500, 40_000), (2_708, 20_000))
    for (heads, channels), dtype, degree, nodes in shapes:
        problem = replace(PROBLEM, score=score, heads=heads, channels=channels, dtype=dtype)
        found = plan_pass(problem, direction, FakeGraph(nodes, 4 * nodes, degree))
        c = found.constants
        assert not c["JOINED"] or degree <= found.max_edges * items_per_block(c)
        kinds.add("joined" if c["JOINED"] else "ordered" if c["ORDERED"] else "plain")
    assert kinds == {"plain", "joined", "ordered"}
    swept = plan_pass(replace(PROBLEM, score=score, heads=1, channels=128), direction, GRAPHS["c"])
    assert swept.blocks > 1 and not swept.constants["JOINED"]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rows_of_two_pieces_with_edge_features_are_not_joined(direction):
    def is_joined(degree, edge, nodes=40_962):
        problem = replace(PROBLEM, heads=16, channels=32, dtype=torch.bfloat16, edge=edge)
        return plan_pass(problem, direction, FakeGraph(nodes, 8 * nodes, degree)).constants["JOINED"] == 1

    assert not is_joined(36, edge=True)
    # Without edge features, of more pieces, and where few rows leave the device half empty.
    assert is_joined(36, edge=False) and is_joined(120, edge=True) and is_joined(36, edge=True, nodes=1_000)


def test_small_graphs_find_the_norms_from_what_they_read():
    """Only forward passes of the cosine score, of targets that are the sources, of rows that no merge finishes."""
    problem = replace(PROBLEM, score="cosine", heads=1, channels=128)

    def finds(num_edges=10_000, degree=4, direction="forward", graph=None, **changes):
        graph = graph or FakeGraph(20_000, num_edges, degree)
        return bool(plan_pass(replace(problem, **changes), direction, graph).constants["NORMS"])

    assert [finds(degree=degree) for degree in (4, 170, 40_000)] == [True, True, False]
    assert not finds(graph=GRAPHS["c"]) and not finds(num_edges=10_000_000)
    assert not any(finds(direction=direction) for direction in ("targets", "sources", "weights"))
    assert not any(finds(score=score) for score in SCORES if score != "cosine")
    bipartite = FakeGraph(20_000, 10_000, 4)
    bipartite.num_src += 1
    assert not finds(graph=bipartite)


# Costs ----------------------------------------------------------------------------------------------------------------


class FakeGraph:
    """What the cost model reads of a square graph."""

    is_measured, is_bare = True, False

    def __init__(self, num_nodes, num_edges, max_degree, longest=None):
        self.num_src = self.num_dst = num_nodes
        self.num_edges, self.longest = num_edges, longest
        self.csr = self.csc = FakeSide(num_nodes, num_edges)
        self.csr.max_degree, self.csr.num_cols = max_degree, num_nodes

    def side(self, direction):
        return self.csr

    def derived(self, key, build):
        if key[0] == "misses":
            return 0.5
        assert key == "diagonal_blocks"
        return self.longest and SimpleNamespace(longest=self.longest)


# Batches of 1024 graphs with 53 and 8 edges per node, a Reddit-like and a proteins-like graph.
GRAPHS = {
    "a": FakeGraph(122_039, 6_441_672, 89, 158),
    "c": FakeGraph(232_965, 115_842_382, 21_937),
    "d": FakeGraph(132_534, 79_880_426, 8_094),
    "e": FakeGraph(72_704, 581_632, 8, 71),
}
# Milliseconds of the passes on an H200, one head of 128: forward, targets, sources; None: not measured.
MEASURED = {
    ("dot", torch.float32): {"c": (13.3, 13.6, 14.6), "d": (9.01, 9.15, 9.6), "e": (0.070, 0.087, 0.098)},
    ("dot", torch.bfloat16): {"c": (6.56, 6.79, 8.27), "d": (4.32, 4.47, 5.28), "e": (0.050, 0.058, 0.083)},
    ("add", torch.float32): {"c": (6.56, None, 7.21), "d": (4.23, None, 4.84), "e": (0.035, None, 0.057)},
    ("add", torch.bfloat16): {"c": (3.84, None, 5.5), "d": (2.58, None, 3.47), "e": (0.044, None, 0.050)},
    ("cosine", torch.float32): {"c": (6.72, 7.3, 13.6), "d": (4.32, 4.48, 9.1), "e": (0.043, 0.060, 0.099)},
    ("cosine", torch.bfloat16): {"c": (5.32, 6.2, 10.6), "d": (3.52, 3.83, 6.34), "e": (None, 0.051, 0.083)},
}


def cost_of(problem, direction, graph, device=gpu.H200):
    return rows.cost(problem, direction, graph, plan_pass(problem, direction, graph), device)


@pytest.mark.parametrize(("score", "dtype"), MEASURED, ids=lambda value: str(value).removeprefix("torch."))
def test_estimates_are_near_what_was_measured(score, dtype):
    problem = replace(PROBLEM, score=score, dtype=dtype, heads=1, channels=128)
    for name, times in MEASURED[score, dtype].items():
        for direction, milliseconds in zip(DIRECTIONS, times, strict=True):
            if milliseconds is not None:
                ratio = 1e3 * cost_of(problem, direction, GRAPHS[name]).seconds / milliseconds
                assert 1 / 1.4 < ratio < 1.4, (name, direction, ratio)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_a_cost_grows_with(direction):
    problem = replace(PROBLEM, heads=1, channels=128)
    dense = cost_of(problem, direction, GRAPHS["c"])
    assert (
        cost_of(problem, direction, GRAPHS["c"], replace(gpu.H200, cache_bytes_per_s=1e12)).seconds > 4 * dense.seconds
    )
    near, far = (cost_of(problem, direction, FakeGraph(122_039, 6_441_672, 89, longest)) for longest in (158, 5000))
    assert near.overlapped["gathers"] == 0 < far.overlapped["gathers"] and near.seconds < far.seconds
    light, heavy = (cost_of(problem, direction, FakeGraph(2708, 10_880, degree)) for degree in (4, 2000))
    assert heavy.seconds > 3 * light.seconds and max(heavy.overlapped, key=heavy.overlapped.get) == "longest row"
    swept = plan_pass(problem, direction, GRAPHS["c"])
    assert swept.blocks > 1 and dense.added["launches"] == pytest.approx(swept.blocks * gpu.H200.launch_s)


def test_what_stays_near():
    batch = torch.arange(64).view(-1, 8)
    edges = torch.cartesian_prod(torch.arange(8), torch.arange(8)).T.repeat(1, 8) + batch[:, 0].repeat_interleave(64)
    found = Graph.of(edges, 64)
    assert rows.stays_near(found, gpu.H200.shared_bytes // 8, gpu.H200)
    assert not rows.stays_near(found, gpu.H200.shared_bytes // 8 + 1, gpu.H200)
    assert not rows.stays_near(graph_of(random(10, 20, 30)), 1, gpu.H200)


def test_the_tangent_spares_the_gathers_of_the_targets():
    problem = replace(PROBLEM, score="add", heads=1, channels=128)
    for graph in GRAPHS.values():
        without, at_hand = (cost_of(replace(problem, dout_dlogit=left), "targets", graph) for left in (False, True))
        assert at_hand.seconds < 0.8 * without.seconds
        assert cost_of(problem, "sources", graph) == cost_of(replace(problem, dout_dlogit=True), "sources", graph)


@pytest.mark.parametrize("score", SCORES)
def test_every_graph_has_a_cost(case, score):
    problem = replace(PROBLEM, score=score)
    assert all(0 < cost_of(problem, direction, graph_of(case)).seconds < 1e-3 for direction in DIRECTIONS)
