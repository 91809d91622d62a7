"""The schedule `row_split`: lane layouts, packing, chunks, column blocks."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.dispatch.attention import row_split as rows
from pyg_dfgnn.dispatch.attention.problem import SCORES, WALKS
from pyg_dfgnn.dispatch.attention.row_split import lane_constants, node_constants, pass_constants, plan_pass
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference.zoo import random, zoo
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
        # A lane walks through several heads only while its registers allow; one head may need more by itself.
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


@pytest.mark.parametrize(
    ("heads", "channels", "dtype", "expected"),
    [
        # One row of 128 floats takes the warp with one 16-byte load per lane, as one head or as eight.
        (1, 128, torch.float32, {"VEC": 4, "HEAD_LANES": 32, "HEAD_SLOTS": 1, "LANE_VECS": 1, "LANE_HEADS": 1}),
        (8, 16, torch.float32, {"VEC": 4, "HEAD_LANES": 4, "HEAD_SLOTS": 8, "LANE_VECS": 1, "LANE_HEADS": 1}),
        (8, 16, torch.bfloat16, {"VEC": 8, "HEAD_LANES": 2, "HEAD_SLOTS": 8, "LANE_VECS": 1, "LANE_HEADS": 1}),
        # An odd width has no loads of more than one element.
        (1, 7, torch.float16, {"VEC": 1, "HEAD_LANES": 8, "HEAD_SLOTS": 1, "LANE_VECS": 1, "LANE_HEADS": 1}),
        (3, 512, torch.float32, {"VEC": 4, "HEAD_LANES": 32, "HEAD_SLOTS": 1, "LANE_VECS": 4, "LANE_HEADS": 1}),
    ],
)
def test_known_layouts(heads, channels, dtype, expected):
    constants = lane_constants(heads, channels, dtype.itemsize, True)
    assert {name: constants[name] for name in expected} == expected


def test_node_kernels_take_two_loads_per_lane():
    found = node_constants(1, 128, torch.float32)
    expected = {"VEC": 4, "HEAD_LANES": 16, "LANE_VECS": 2, "WARP_ROWS": 2, "WARPS": 8}
    assert {name: found[name] for name in expected} == expected
    # One load is all there is.
    assert node_constants(1, 4, torch.float32)["LANE_VECS"] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_node_kernels_that_read_float32_share_narrow_heads(dtype):
    """Two loads of a head in 16 bits are 64 bytes in float32, which two lanes take."""
    found = [node_constants(8, 16, dtype, float_loads) for float_loads in (False, True)]
    assert [(c["HEAD_LANES"], c["LANE_VECS"]) for c in found] == [(1, 2), (2, 1)]
    for heads, channels, other in ((1, 128, dtype), (4, 64, dtype), (8, 40, dtype), (8, 16, torch.float32)):
        assert node_constants(heads, channels, other, True) == node_constants(heads, channels, other)


def test_constants_are_plain_numbers_and_read_only():
    """They become #define lines and part of a cache key."""
    for score, walk, wide in product(SCORES, WALKS, (False, True)):
        constants = pass_constants(replace(PROBLEM, score=score), walk, wide)
        assert all(type(value) is int for value in constants.values())
        assert constants["UNROLL"] in (1, 2, 4, 8) and constants["MIN_BLOCKS"] >= 1
    with pytest.raises(TypeError):
        lane_constants(1, 1, 4, True)["VEC"] = 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_adds_in_the_order_of_inference(dtype):
    for heads, channels, wide in product((1, 8), (16, 40, 128), (False, True)):
        problem = replace(PROBLEM, score="add", dtype=dtype, heads=heads, channels=channels)
        found = [pass_constants(problem, walk, wide) for walk in ("forward", "dout_dlogit")]
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


@pytest.mark.parametrize(
    ("num_edges", "max_degree", "expected"),
    [
        (0, 0, 128),
        (10_556, 168, 32),
        (1 << 20, 168, 64),
        (1 << 20, 100_000, 256),
        (5 << 20, 9, 512),
        (1 << 30, 9, 1024),
    ],
)
def test_length_of_chunks(num_edges, max_degree, expected):
    assert rows._max_edges(num_edges, max_degree) == expected


class FakeSide:
    """What the rule for column blocks reads of an adjacency."""

    def __init__(self, num_rows, num_edges):
        self.num_rows, self.num_edges = num_rows, num_edges


@pytest.mark.parametrize(
    ("l2_bytes", "score", "degree", "expected"),
    [
        # 100,000 rows of 512 bytes: one gathered tensor is 51 MB, of a cache 80 % may be used.
        (50_000_000, "add", 500, 2),
        (50_000_000, "dot", 500, 3),
        (1 << 30, "dot", 500, 1),
        # Where all rows fit exactly there is one block; one byte less makes two.
        (64_000_000, "add", 500, 1),
        (63_999_998, "add", 500, 2),
        # Too few edges of a row in each block: its state would travel more than the rows it saves.
        (50_000_000, "dot", 95, 1),
        (50_000_000, "dot", 96, 3),
        (50_000_000, "add", 64, 2),
    ],
)
def test_number_of_column_blocks(monkeypatch, l2_bytes, score, degree, expected):
    cache_of(monkeypatch, l2_bytes)
    problem = replace(PROBLEM, score=score)
    side = FakeSide(100_000, 100_000 * degree)
    assert rows._blocks(problem, "forward", side, 100_000, PROBLEM.heads) == expected


def test_half_storage_halves_the_blocks(monkeypatch):
    cache_of(monkeypatch, 10_000_000)
    side = FakeSide(100_000, 100_000_000)
    single = rows._blocks(PROBLEM, "forward", side, 100_000, PROBLEM.heads)
    half = rows._blocks(replace(PROBLEM, dtype=torch.bfloat16), "forward", side, 100_000, PROBLEM.heads)
    assert (single, half) == (13, 7)


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
        for walk in WALKS:
            found = plan_pass(small, walk, graph_of(case))
            assert found.blocks == 1 or found.constants["WARP_ROWS"] == 1
    graph = graph_of(random(50, 10, 4000))
    found = plan_pass(small, "forward", graph)
    assert found.blocks > 1 and "sweeps over blocks of columns" in str(found)
    weights = plan_pass(small, "weights", graph)
    assert weights.blocks == 1 and weights.constants == found.constants


@pytest.mark.parametrize("shape", [(1, 128), (8, 16), (1, 512), (2, 131), (3, 40)])
def test_layout_of_sweeps(shape):
    """Sweeps of the add score take two rows of 128 per warp, with and without the tangent alike; others share edges."""
    heads, channels = shape
    problem = replace(PROBLEM, score="add", heads=heads, channels=channels)
    forward, tangent = (dict(rows.swept_constants(problem, walk)) for walk in ("forward", "dout_dlogit"))
    assert forward["ORDERED"] and tangent["ORDERED"]
    assert (forward.pop("DOUT_DLOGIT"), tangent.pop("DOUT_DLOGIT")) == (0, 1)
    assert forward == tangent
    assert (forward["WARP_ROWS"], forward["EDGE_SLOTS"]) == ((2, 1) if heads * channels == 128 else (1, 1))
    for changed in (replace(problem, score="dot"), replace(problem, dropout=True)):
        wide = rows.pass_constants(changed, "forward", wide=True)
        assert rows.swept_constants(changed, "forward") == {**wide, "ORDERED": 1}


@pytest.mark.parametrize(
    ("score", "dtype", "expected"),
    [
        # From timings: sweeps and longest pieces of the three passes.
        ("cosine", torch.float32, ((1, 2048), (2, 1024), (7, 512))),
        ("add", torch.float32, ((1, 2048), (2, 1024), (2, 1024))),
        ("dot", torch.float32, ((3, 1024), (3, 1024), (4, 1024))),
        ("dot", torch.bfloat16, ((2, 2048), (3, 1024), (2, 1024))),
    ],
)
def test_number_of_sweeps(score, dtype, expected):
    problem = replace(PROBLEM, score=score, dtype=dtype, heads=1, channels=128)
    passes = [plan_pass(problem, walk, GRAPHS["d"]) for walk in WALKS]
    assert tuple((found.blocks, found.max_edges) for found in passes) == expected
    # Rows that seven sweeps would leave with fewer than 32 edges in each keep the fewer sweeps of other passes.
    short = FakeGraph(132_534, 132_534 * 150, 8_094)
    assert all(plan_pass(problem, walk, short).blocks in (1, 2, 3, 4) for walk in WALKS)


@pytest.mark.parametrize("score", SCORES)
def test_passes_of_the_zoo(case, score):
    """Each graph has its passes, an empty one too."""
    for walk in WALKS:
        found = plan_pass(replace(PROBLEM, score=score), walk, graph_of(case))
        assert found.constants["WARP_ROWS"] * found.constants["EDGE_SLOTS"] >= 1 and found.blocks == 1
        assert 8 <= found.max_edges <= 1024


@pytest.mark.parametrize("walk", WALKS)
def test_long_rows_are_joined_in_a_block_or_come_first(walk, monkeypatch):
    problem = replace(PROBLEM, heads=1, channels=128)

    def kind(degree, *, num_edges=100_000, **changes):
        graph = FakeGraph(20_000, num_edges, degree)
        found = plan_pass(replace(problem, **changes), walk, graph)
        c = found.constants
        assert not c["JOINED"] or degree <= found.max_edges * rows.items_per_block(c)
        return "joined" if c["JOINED"] else "ordered" if c["ORDERED"] else "plain"

    assert [kind(degree) for degree in (4, 8, 40, 170, 500, 40_000)] == ["plain"] * 2 + ["joined"] * 3 + ["ordered"]
    # Rows too wide for the states of a block's chunks, and a graph with warps enough.
    assert kind(170, heads=8, channels=128) == "ordered"
    assert kind(100, num_edges=10_000_000) == "plain"
    swept = plan_pass(problem, walk, GRAPHS["c"])
    assert swept.blocks > 1 and swept.constants["ORDERED"] and not swept.constants["JOINED"]


def test_packed_rows_joined_in_a_block_come_in_order():
    """As timed on PubMed: blocks of four warps, four loads for a few passes; not few rows, nor wide ones."""

    def found(score, walk, num_rows=19_717, num_edges=108_365, degree=171, **changes):
        changes = {"dtype": torch.float32, "heads": 1, "channels": 128, **changes}
        chosen = plan_pass(replace(PROBLEM, score=score, **changes), walk, FakeGraph(num_rows, num_edges, degree))
        c = chosen.constants
        assert c["JOINED"] and degree <= chosen.max_edges * rows.items_per_block(c)
        return c["ORDERED"], c["LANE_VECS"], c["WARP_ROWS"], c["UNROLL"], c["WARPS"], c["MIN_BLOCKS"], chosen.max_edges

    assert found("dot", "forward") == (1, 2, 2, 2, 4, 1, 32)
    assert found("dot", "targets") == found("cosine", "sources") == (1, 4, 4, 1, 4, 1, 16)
    assert found("dot", "sources") == (1, 2, 2, 2, 4, 5, 32)
    assert found("cosine", "forward") == (1, 4, 4, 1, 4, 1, 16)
    assert found("add", "forward") == found("add", "dout_dlogit") == found("add", "sources") == (1, 4, 4, 2, 4, 1, 16)
    half = {"dtype": torch.bfloat16}
    assert found("dot", "forward", **half) == (1, 2, 4, 2, 4, 1, 16)
    assert found("dot", "targets", **half) == (1, 2, 4, 2, 4, 1, 16)
    assert found("dot", "sources", **half) == (1, 2, 4, 1, 4, 4, 16)
    # Not by the layouts that were timed for other problems.
    assert found("cosine", "forward", dropout=True) == (1, 2, 2, 2, 4, 1, 32)
    assert found("cosine", "forward", **half)[1:4] == (1, 2, 4)
    assert found("dot", "sources", dropout=True, **half) == (1, 2, 4, 1, 4, 1, 16)
    assert found("dot", "targets", dropout=True)[:5] == (1, 2, 2, 2, 4)
    assert found("dot", "targets", heads=8, channels=16)[:5] == (1, 2, 2, 2, 4)
    # Four warps cannot walk the longest row in chunks of at most 32.
    assert found("dot", "forward", degree=400) == (1, 2, 2, 2, 8, 1, 32)
    assert found("dot", "forward", num_rows=4224, num_edges=20_000)[0] == 0
    assert found("dot", "forward", num_edges=400_000)[:3] == (0, 2, 1)


def test_small_graphs_find_the_norms_from_what_they_read():
    problem = replace(PROBLEM, score="cosine", heads=1, channels=128)

    def finds(num_edges=10_000, degree=4, walk="forward", graph=None, **changes):
        graph = graph or FakeGraph(20_000, num_edges, degree)
        return bool(plan_pass(replace(problem, **changes), walk, graph).constants["NORMS"])

    # Plain and joined rows; chunks that are left to a merge have no one to write the norm of their row.
    assert [finds(degree=degree) for degree in (4, 170, 40_000)] == [True, True, False]
    # More to read than a launch takes.
    assert finds(16_384) and not finds(16_385) and not finds(16_384, heads=8)
    assert finds(131_072, degree=170) and not finds(131_073, degree=170)
    assert not finds(131_072, degree=170, dtype=torch.bfloat16)
    assert not finds(graph=GRAPHS["c"]) and not finds(graph=GRAPHS["e"])
    assert not any(finds(walk=walk) for walk in ("targets", "sources", "weights"))
    assert not any(finds(score=score) for score in ("dot", "add", "gatv2"))
    bipartite = FakeGraph(20_000, 10_000, 4)
    bipartite.num_src += 1
    assert not finds(graph=bipartite)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_packed_rows_in_another_order_leave_room_for_their_sums(dtype):
    problem = replace(PROBLEM, score="dot", heads=1, channels=128, dtype=dtype)
    plain, skewed = (plan_pass(problem, "sources", FakeGraph(20_000, 100_000, degree)) for degree in (4, 40_000))
    assert plain.constants["WARP_ROWS"] > 1 and skewed.constants["WARP_ROWS"] > 1 and skewed.constants["ORDERED"]
    assert skewed.constants["MIN_BLOCKS"] < plain.constants["MIN_BLOCKS"]


# Narrow heads ---------------------------------------------------------------------------------------------------------

NARROW = replace(PROBLEM, heads=8, channels=16, dtype=torch.bfloat16)


def lanes_of(c):
    return tuple(c[name] for name in ("HEAD_LANES", "LANE_VECS", "HEAD_SLOTS", "EDGE_SLOTS", "WARP_ROWS", "UNROLL"))


@pytest.mark.parametrize("graph", ["c", "d"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sweeps_give_a_lane_a_whole_head(dtype, graph):
    """As timed: backward of cosine with 8 heads of 16. Two lanes share a head where anything is different."""
    cosine = replace(NARROW, score="cosine", dtype=dtype)

    def swept(walk, **changes):
        found = plan_pass(replace(cosine, **changes), walk, GRAPHS[graph])
        assert found.blocks > 1
        return found.constants

    for walk in ("targets", "sources"):
        assert lanes_of(swept(walk)) == (1, 2, 8, 4, 1, 2)
        assert swept(walk)["MIN_BLOCKS"] == 1 and swept(walk)["ORDERED"]
        for changes in ({"dropout": True}, {"score": "dot"}, {"score": "add"}, {"score": "gatv2"}):
            assert swept(walk, **changes)["HEAD_LANES"] == 2
        for heads, channels in ((8, 40), (4, 64), (4, 16), (8, 32)):
            problem = replace(cosine, heads=heads, channels=channels)
            wide = pass_constants(problem, walk, wide=True)
            assert rows.swept_constants(problem, walk) == {**wide, "ORDERED": 1}


def test_blocks_of_heads_that_two_lanes_share():
    """Cosine forward, wide rows: one block more than with one head, whose lanes have other sums to exchange."""

    def blocks(wide=True, **changes):
        return pass_constants(replace(NARROW, score="cosine", **changes), "forward", wide)["MIN_BLOCKS"]

    assert blocks() == blocks(dtype=torch.float16) == 5
    for changes in ({"heads": 1, "channels": 128}, {"heads": 4, "channels": 64}, {"wide": False}):
        assert blocks(**changes) == 4
    # Rows in another order have the same room.
    for wide in (False, True):
        c = pass_constants(replace(NARROW, score="cosine"), "forward", wide)
        assert rows.ordered(replace(NARROW, score="cosine"), "forward", c)["MIN_BLOCKS"] == c["MIN_BLOCKS"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_packed_rows_give_a_lane_a_whole_head(dtype):
    """As timed: add on even rows. Neither with the tangent, nor with chunks, nor in order of length."""
    add = replace(NARROW, score="add", dtype=dtype)
    for walk in ("forward", "sources", "weights"):
        assert lanes_of(plan_pass(add, walk, GRAPHS["e"]).constants) == (1, 2, 8, 1, 4, 2)
    assert plan_pass(add, "dout_dlogit", GRAPHS["e"]).constants == pass_constants(add, "dout_dlogit", wide=False)
    assert plan_pass(add, "targets", GRAPHS["e"]).constants == pass_constants(add, "targets", wide=False)
    joined, skewed = (FakeGraph(20_000, 80_000, degree) for degree in (170, 40_000))
    for walk in ("forward", "sources"):
        found = [plan_pass(add, walk, graph).constants for graph in (joined, skewed)]
        assert [(c["JOINED"], c["ORDERED"], c["HEAD_LANES"]) for c in found] == [(1, 1, 2), (0, 1, 2)]
        for changes in ({"score": "dot"}, {"score": "cosine"}, {"dropout": True}, {"edge": True}):
            changed = replace(add, **changes)
            if not (changed.edge and changed.score == "cosine"):
                assert plan_pass(changed, walk, GRAPHS["e"]).constants["HEAD_LANES"] == 2


def test_small_graphs_take_half_of_the_heads_in_a_warp():
    """As timed on (b): dot forward in float32 with 8 heads of 16. Larger graphs have warps enough."""
    dot = replace(NARROW, score="dot", dtype=torch.float32)

    def found(problem=dot, walk="forward", nodes=2708):
        c = plan_pass(problem, walk, FakeGraph(nodes, 4 * nodes, 205)).constants
        assert c["JOINED"]
        return lanes_of(c)

    assert found() == found(walk="weights") == (4, 1, 4, 1, 2, 4)
    whole = (2, 2, 8, 1, 2, 4)
    assert found(walk="targets") == whole and found(replace(dot, dropout=True)) == whole
    assert found(nodes=20_000) == (2, 2, 8, 1, 2, 2)
    others = [replace(dot, score="gatv2"), replace(dot, heads=4), replace(dot, channels=32)]
    for problem in [*others, replace(dot, dtype=torch.bfloat16), replace(dot, heads=1, channels=128)]:
        lanes = pass_constants(problem, "forward", wide=False)
        assert found(problem)[:3] == tuple(lanes[name] for name in ("HEAD_LANES", "LANE_VECS", "HEAD_SLOTS"))


def test_few_rows_take_other_warps_and_lanes_in_the_forward_pass():
    """As timed on Cora and (b), float32: rows of 512 bytes whose longest waits for its steps."""

    def found(score, heads=1, walk="forward", nodes=2708, degree=205, **changes):
        problem = replace(NARROW, score=score, dtype=torch.float32, heads=heads, channels=128 // heads, **changes)
        chosen = plan_pass(problem, walk, FakeGraph(nodes, 4 * nodes, degree))
        c = chosen.constants
        assert c["JOINED"] and degree <= chosen.max_edges * rows.items_per_block(c)
        return c["LANE_VECS"], c["WARP_ROWS"], c["UNROLL"], c["WARPS"], chosen.max_edges

    for score, heads in product(("cosine", "gatv2"), (1, 8)):
        assert found(score, heads) == (2, 2, 2, 16, 8)
    assert found("dot") == (2, 2, 2, 16, 8) and found("dot", heads=8) == (1, 2, 4, 8, 16)
    # The tangent's chunks are those of the forward pass, so that training and inference add in one order.
    assert found("add")[:2] == (4, 4) and found("add", heads=8) == (1, 2, 4, 8, 16)
    assert all(found("add", heads)[-2:] == found("add", heads, "dout_dlogit")[-2:] for heads in (1, 8))
    # Chunks of eight edges are not halved; other passes and what was not timed keep their layout, many rows another.
    assert found("gatv2", degree=120) == (2, 2, 4, 8, 8)
    assert found("gatv2", walk="targets")[3] == found("gatv2", dropout=True)[3] == 8
    assert found("gatv2", nodes=20_000)[2:4] == (2, 4) and found("add", 8, nodes=20_000)[:2] == (2, 2)


# Costs ----------------------------------------------------------------------------------------------------------------


class FakeGraph:
    """What the cost model reads of a square graph."""

    is_static = False
    facts = None

    def __init__(self, num_nodes, num_edges, max_degree, max_graph_nodes=None):
        self.num_src = self.num_dst = num_nodes
        self.num_edges, self.max_graph_nodes = num_edges, max_graph_nodes
        self.csr = self.csc = FakeSide(num_nodes, num_edges)
        self.csr.max_degree = max_degree

    def derived(self, key, build):
        assert key == "diagonal_blocks"


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


def cost_of(problem, walk, graph, device=gpu.H200):
    return rows.cost(problem, walk, graph, plan_pass(problem, walk, graph), device)


@pytest.mark.parametrize(("score", "dtype"), MEASURED, ids=lambda value: str(value).removeprefix("torch."))
def test_estimates_are_near_what_was_measured(score, dtype):
    problem = replace(PROBLEM, score=score, dtype=dtype, heads=1, channels=128)
    for name, times in MEASURED[score, dtype].items():
        for walk, milliseconds in zip(WALKS, times, strict=True):
            if milliseconds is not None:
                ratio = 1e3 * cost_of(problem, walk, GRAPHS[name]).seconds / milliseconds
                assert 1 / 1.4 < ratio < 1.4, (name, walk, ratio)


@pytest.mark.parametrize("walk", WALKS)
def test_what_a_cost_grows_with(walk):
    problem = replace(PROBLEM, heads=1, channels=128)
    dense = cost_of(problem, walk, GRAPHS["c"])
    assert cost_of(problem, walk, GRAPHS["c"], replace(gpu.H200, cache_bytes_per_s=1e12)).seconds > 4 * dense.seconds
    near, far = (cost_of(problem, walk, FakeGraph(122_039, 6_441_672, 89, longest)) for longest in (158, 5000))
    assert near.overlapped["gathers"] == 0 < far.overlapped["gathers"] and near.seconds < far.seconds
    light, heavy = (cost_of(problem, walk, FakeGraph(2708, 10_880, degree)) for degree in (4, 2000))
    assert heavy.seconds > 3 * light.seconds and max(heavy.overlapped, key=heavy.overlapped.get) == "longest row"
    swept = plan_pass(problem, walk, GRAPHS["c"])
    assert swept.blocks > 1 and dense.added["launches"] == pytest.approx(swept.blocks * gpu.H200.launch_s)


def test_what_stays_near():
    """Segments that a batch declares, and those that are found."""
    batch = torch.arange(64).view(-1, 8)
    edges = torch.cartesian_prod(torch.arange(8), torch.arange(8)).T.repeat(1, 8) + batch[:, 0].repeat_interleave(64)
    found = Graph.of(edges, 64)
    assert found.max_graph_nodes is None
    for graph in (found, FakeGraph(64, 512, 8, 8)):
        assert rows.stays_near(graph, gpu.H200.shared_bytes // 8, gpu.H200)
        assert not rows.stays_near(graph, gpu.H200.shared_bytes // 8 + 1, gpu.H200)
    assert not rows.stays_near(graph_of(random(10, 20, 30)), 1, gpu.H200)


def test_the_tangent_spares_the_gathers_of_the_targets():
    problem = replace(PROBLEM, score="add", heads=1, channels=128)
    for graph in GRAPHS.values():
        without, at_hand = (cost_of(replace(problem, tangent=left), "targets", graph) for left in (False, True))
        assert at_hand.seconds < 0.8 * without.seconds
        assert cost_of(problem, "sources", graph) == cost_of(replace(problem, tangent=True), "sources", graph)


@pytest.mark.parametrize("score", SCORES)
def test_every_graph_has_a_cost(case, score):
    problem = replace(PROBLEM, score=score)
    assert all(0 < cost_of(problem, walk, graph_of(case)).seconds < 1e-3 for walk in WALKS)
