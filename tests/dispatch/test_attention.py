"""The rules that choose attention kernels: what is refused and why, lane layouts, packing, column blocks."""

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch

from pyg_dfgnn.dispatch import attention as dispatch
from pyg_dfgnn.dispatch.attention import (
    AttentionProblem,
    lane_constants,
    norm_constants,
    pass_constants,
    plan,
    unsupported_reasons,
)
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.settings import settings
from tests.zoo import hub, random, zoo

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WALKS = ("forward", "targets", "sources")
PROBLEM = AttentionProblem("dot", 8, 16, torch.float32, torch.device("cuda", 0), False, False, True)


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch):
    """A device to plan for, with CuPy, whatever this machine has."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(dispatch, "_HAS_CUPY", True)
    monkeypatch.setattr(dispatch, "cache_bytes", lambda device: 50 << 20)


def graph_of(case):
    return Graph.of(case.edge_index.clone(), case.num_src, case.num_dst)


# Reasons --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("score", "dtype"), list(product(dispatch.SCORES, DTYPES)))
@pytest.mark.parametrize("size", [(1, 1), (3, 7), (64, 512), (65535, 1)], ids=str)
def test_what_runs(score, dtype, size):
    heads, channels = size
    problem = replace(PROBLEM, score=score, dtype=dtype, heads=heads, channels=channels)
    assert unsupported_reasons(problem) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"score": "l2"}, "score 'l2' has no fused kernel (one of dot, cosine, add, gatv2)"),
        ({"device": torch.device("cpu")}, "tensors are on cpu, the kernels run on CUDA devices"),
        ({"dtype": torch.float64}, "torch.float64 has no fused kernel (float32, float16, bfloat16)"),
        ({"channels": 0}, "0 channels per head, the kernels take 1 to 512"),
        ({"channels": 513}, "513 channels per head, the kernels take 1 to 512"),
        ({"heads": 0}, "0 heads, the kernels take 1 to 65535"),
        ({"heads": 65536}, "65536 heads, the kernels take 1 to 65535"),
        ({"score": "cosine", "edge": True}, "the cosine score takes no edge features"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_each_reason(changes, reason):
    assert unsupported_reasons(replace(PROBLEM, **changes)) == [reason]


def test_reasons_of_the_machine(monkeypatch):
    monkeypatch.setattr(dispatch, "_HAS_CUPY", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert unsupported_reasons(PROBLEM) == [
        "CuPy is not installed (pip install 'pyg_dfgnn[cuda13]' or 'pyg_dfgnn[cuda12]')",
        "the kernels need compute capability 8.0 or newer",
    ]


def test_all_reasons_at_once():
    problem = replace(PROBLEM, device=torch.device("cpu"), dtype=torch.int32, channels=600, heads=0, edge=True)
    assert len(unsupported_reasons(replace(problem, score="cosine"))) == 5


def test_neither_rules_nor_operators_import_cupy():
    code = (
        "import sys, torch, pyg_dfgnn.ops\n"
        "from pyg_dfgnn.dispatch.attention import AttentionProblem, plan, unsupported_reasons\n"
        "from pyg_dfgnn.graph import Graph\n"
        "problem = AttentionProblem('dot', 2, 4, torch.float32, torch.device('cpu'), False, False, True)\n"
        "unsupported_reasons(problem), plan(problem, Graph.of(torch.tensor([[0, 1], [1, 0]]), 2))\n"
        "sys.exit(any(name.split('.')[0].startswith('cupy') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 33, 64])
def test_every_element_is_loaded_once(heads, itemsize):
    for channels in (1, 2, 3, 4, 6, 7, 8, 12, 16, 31, 32, 40, 64, 67, 100, 128, 131, 160, 256, 300, 511, 512):
        offsets = covered(lane_constants(heads, channels, itemsize, False))
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
    norms = norm_constants(heads, channels, dtype)
    assert {name: norms[name] for name in expected} == expected


def test_constants_are_plain_numbers_and_read_only():
    """They become #define lines and part of a cache key."""
    for score, walk, wide in product(dispatch.SCORES, WALKS, (False, True)):
        constants = pass_constants(replace(PROBLEM, score=score), walk, wide)
        assert all(type(value) is int for value in constants.values())
        assert constants["UNROLL"] in (1, 2, 4, 8) and constants["MIN_BLOCKS"] >= 1
    with pytest.raises(TypeError):
        lane_constants(1, 1, 4, True)["VEC"] = 2


@pytest.mark.parametrize(("edge", "dropout"), list(product((False, True), repeat=2)))
def test_options_are_part_of_the_specialisation(edge, dropout):
    for dtype, number in zip(DTYPES, (0, 1, 2), strict=True):
        constants = pass_constants(replace(PROBLEM, dtype=dtype, edge=edge, dropout=dropout), "forward", False)
        assert [constants[name] for name in ("EDGE", "DROPOUT", "STORAGE")] == [edge, dropout, number]


# Plans ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", dispatch.SCORES)
def test_plans_of_the_zoo(case, score):
    """Each graph has a plan, an empty one too."""
    found = plan(replace(PROBLEM, score=score), graph_of(case))
    assert found.schedule == "rows" and found.reason == "the general schedule"
    for walk in (found.forward, found.targets, found.sources):
        assert walk.constants["WARP_ROWS"] * walk.constants["EDGE_SLOTS"] >= 1 and walk.blocks == 1
        assert 256 <= walk.max_edges <= 1024


def test_no_backward_pass_without_gradients():
    found = plan(replace(PROBLEM, needs_grad=False), graph_of(hub(300)))
    assert found.targets is None and found.sources is None
    assert "backward" not in str(found)


def test_a_plan_reads_as_text():
    text = str(plan(replace(PROBLEM, heads=2, channels=4), graph_of(random(50, 50, 100))))
    assert text.splitlines()[0] == "schedule rows (the general schedule)"
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:]] == [
        "forward",
        "backward over targets",
        "backward over sources",
    ]
    assert "1 lanes per head, 2 x 1 heads, 4 elements per load" in text and "16 rows per warp" in text


def test_the_schedule_that_was_asked_for():
    with settings(schedule="rows"):
        assert plan(PROBLEM, graph_of(hub(300))).reason == "asked for"


def test_rows_are_packed_until_lanes_can_share_them():
    """Two full steps per row on average make sharing worthwhile; each side of the graph decides for itself."""
    small = replace(PROBLEM, heads=1, channels=4)
    step = 2 * pass_constants(small, "forward", False)["UNROLL"]
    for num_edges, packed in ((10 * step - 1, True), (10 * step, False)):
        constants = plan(small, graph_of(random(1000, 10, num_edges))).forward.constants
        assert (constants["WARP_ROWS"] > 1) == packed
        assert constants["EDGE_SLOTS"] * constants["WARP_ROWS"] == 32
    found = plan(small, graph_of(random(1000, 10, 10 * step)))
    assert found.targets.constants["WARP_ROWS"] == 1 and found.sources.constants["WARP_ROWS"] == 32


def test_a_full_warp_has_nothing_to_share():
    wide = replace(PROBLEM, heads=1, channels=128)
    for num_edges in (100, 100_000):
        constants = plan(wide, graph_of(random(100, 100, num_edges))).forward.constants
        assert constants["EDGE_SLOTS"] == constants["WARP_ROWS"] == 1


@pytest.mark.parametrize(
    ("num_edges", "expected"), [(0, 256), (1 << 20, 256), (5 << 20, 512), (1 << 24, 1024), (1 << 30, 1024)]
)
def test_length_of_chunks(num_edges, expected):
    assert dispatch._max_edges(num_edges) == expected


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
    monkeypatch.setattr(dispatch, "cache_bytes", lambda device: l2_bytes)
    problem = replace(PROBLEM, score=score)
    rows = FakeSide(100_000, 100_000 * degree)
    assert dispatch._blocks(problem, "forward", rows, 100_000) == expected


def test_half_storage_halves_the_blocks(monkeypatch):
    monkeypatch.setattr(dispatch, "cache_bytes", lambda device: 10_000_000)
    rows = FakeSide(100_000, 100_000_000)
    single = dispatch._blocks(PROBLEM, "forward", rows, 100_000)
    half = dispatch._blocks(replace(PROBLEM, dtype=torch.bfloat16), "forward", rows, 100_000)
    assert (single, half) == (13, 7)


def test_sweeps_take_one_row_per_warp(monkeypatch):
    """Packed rows are never swept: their kernels have no carried state."""
    monkeypatch.setattr(dispatch, "cache_bytes", lambda device: 1)
    monkeypatch.setattr(dispatch, "_MIN_BLOCK_EDGES", 0)
    small = replace(PROBLEM, heads=1, channels=4)
    for case in zoo():
        found = plan(small, graph_of(case))
        for walk in (found.forward, found.targets, found.sources):
            assert walk.blocks == 1 or walk.constants["WARP_ROWS"] == 1
    found = plan(small, graph_of(random(50, 10, 400)))
    assert found.forward.blocks > 1
    assert "sweeps over blocks of columns" in str(found.forward)


def test_cache_of_a_cpu_is_a_constant(monkeypatch):
    monkeypatch.undo()
    assert dispatch.cache_bytes(torch.device("cpu")) > 0
