"""The schedule `smem`: where it can run, its passes and its costs."""

import re
from dataclasses import replace

import pytest
import torch

from benchmarks.graphs import benchmark_graph
from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.dispatch.attention import row_split as rows
from pyg_dfgnn.dispatch.attention import smem as resident
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.core import BACKWARD, FORWARD
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.graph.node_ranges import node_ranges
from pyg_dfgnn.settings import Settings
from pyg_dfgnn.statements.op import DIRECTIONS
from pyg_dfgnn.statements.scores import SCORES
from tests.dispatch.test_core import choose
from tests.ops.problems import SCORES as TUNED

PROBLEM = AttentionProblem("dot", 1, 128, torch.float32, torch.device("cpu"), False, False)
# Microseconds of the passes on an H200, heads and dtype: forward, targets, sources.
MEASURED = {
    (1, torch.float32): (55.4, 68.7, 80.2),
    (8, torch.float32): (57.4, 76.9, 83.4),
    (1, torch.bfloat16): (42.7, 51.7, 69.2),
    (8, torch.bfloat16): (48.1, 52.6, 64.5),
}


@pytest.fixture(scope="module")
def superpixels():
    """The batch of 1,024 graphs of 71 nodes that was timed."""
    bench = benchmark_graph("e", "cpu")
    return Graph.of(bench.edge_index, bench.num_src, bench.num_dst)


def batch(size, count=3):
    """Rings side by side."""
    node = torch.arange(size * count)
    return Graph.of(torch.stack([node, node // size * size + (node + 1) % size]), size * count)


@pytest.mark.parametrize(
    ("change", "graph", "reason"),
    [
        ({"channels": 3, "dtype": torch.bfloat16}, batch(4), "rows of 6 bytes are no multiple of 4"),
        ({"heads": 64, "channels": 32}, batch(4), "a warp takes .* heads at once, not 64"),
        ({}, Graph.of(torch.empty(2, 0, dtype=torch.long), 4), "the graph has no edges"),
        ({}, Graph.of(torch.tensor([[0], [1]]), 2, 3), "sources and targets are not the same nodes"),
        ({}, Graph.of(torch.zeros(2, 600, dtype=torch.long), 4), "a row has 600 edges, a warp takes up to 512"),
        ({}, batch(300), r"300 nodes .* need \d+ bytes and more, a block has 232448"),
    ],
)
def test_reasons(change, graph, reason):
    for direction in DIRECTIONS:
        (found,) = resident.reasons_against(replace(PROBLEM, **change), direction, graph)
        assert re.search(reason, found)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_fit_their_multiprocessor(score, dtype, superpixels):
    for heads, channels in ((1, 128), (8, 16), (4, 64), (2, 40)):
        problem = replace(PROBLEM, score=score, dtype=dtype, heads=heads, channels=channels)
        for direction in DIRECTIONS:
            assert not resident.reasons_against(problem, direction, superpixels)
            found = resident.plan_pass(problem, direction, superpixels)
            ranges = node_ranges(superpixels, found.bound)
            assert ranges.most_nodes == found.most_nodes >= 71 and found.constants["SMEM"] == 1
            if found.constants["IN_SHARED"]:
                assert found.shared_bytes >= 71 * resident.node_bytes(problem, direction) + 4 * ranges.most_edges
                assert found.shared_bytes <= gpu.H200.shared_bytes and "shared memory" in str(found)
            else:
                norms = 4 * heads * ranges.most_nodes if found.constants["NORMS"] else 0
                assert found.shared_bytes == norms and "L1 cache" in str(found)


def test_as_many_blocks_as_planned(superpixels):
    """Two thread blocks of float32 share a multiprocessor, and three or more of 16 bits."""
    for dtype in (torch.float32, torch.bfloat16):
        for direction in DIRECTIONS:
            found = resident.plan_pass(replace(PROBLEM, dtype=dtype), direction, superpixels)
            blocks = found.constants["MIN_BLOCKS"]
            assert blocks * (found.shared_bytes + 1024) <= gpu.H200.shared_bytes + 1024


@pytest.mark.parametrize(("heads", "dtype"), MEASURED, ids=str)
def test_estimates_are_near_what_was_measured(heads, dtype, superpixels):
    problem = replace(PROBLEM, heads=heads, channels=128 // heads, dtype=dtype)
    for direction, measured in zip(DIRECTIONS, MEASURED[heads, dtype], strict=True):
        chosen = resident.plan_pass(problem, direction, superpixels)
        seconds = resident.cost(problem, direction, superpixels, chosen, gpu.H200).seconds
        assert 1 / 1.2 < 1e6 * seconds / measured < 1.2, direction
        # All of these were faster than `row_split`.
        others = rows.cost(
            problem, direction, superpixels, rows.plan_pass(problem, direction, superpixels), gpu.H200
        ).seconds
        assert seconds < others, direction


# Microseconds on an H200 with 8 heads of 16 in float32: `smem`, `row_split`.
NARROW = {
    ("add", "forward"): (43.0, 45.4),
    ("gatv2", "forward"): (49.5, 64.6),
    ("cosine", "sources"): (89.7, 106.1),
    ("cosine", "targets"): (82.5, 71.9),
}


@pytest.mark.parametrize(("score", "direction"), NARROW)
def test_narrow_heads(score, direction, superpixels):
    """The estimates are in the order of the times, and near them."""
    problem = replace(PROBLEM, score=score, heads=8, channels=16)

    def seconds(schedule, problem=problem):
        return schedule.cost(
            problem, direction, superpixels, schedule.plan_pass(problem, direction, superpixels), gpu.H200
        ).seconds

    measured = NARROW[score, direction]
    estimates = [1e6 * seconds(schedule) for schedule in (resident, rows)]
    assert (estimates[0] < estimates[1]) == (measured[0] < measured[1])
    for estimate, time in zip(estimates, measured, strict=True):
        assert 1 / 1.25 < estimate / time < 1.25


def test_fewer_blocks_hide_less(superpixels):
    chosen = resident.plan_pass(PROBLEM, "targets", superpixels)
    alone = replace(chosen, shared_bytes=gpu.H200.shared_bytes)
    shared, slow = (resident.cost(PROBLEM, "targets", superpixels, each, gpu.H200) for each in (chosen, alone))
    assert slow.seconds > 1.2 * shared.seconds


def uneven(seed, num_graphs=32):
    """Graphs of very different sizes and densities."""
    generator = torch.Generator().manual_seed(seed)
    parts, first = [], 0
    for _ in range(num_graphs):
        size, degree = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((5, 60), (1, 17)))
        path = torch.arange(size - 1)
        parts.append(first + torch.stack([path, path + 1]))
        parts.append(first + torch.randint(size, (2, size * degree), generator=generator))
        first += size
    return Graph.of(torch.cat(parts, dim=1), first)


def test_the_ranges_that_run_are_those_that_were_sized():
    """Ranges packed for the length of the longest one found are others, and may hold more edges."""
    others = 0
    problems = [replace(PROBLEM, heads=heads, channels=8, dtype=torch.float16) for heads in (4, 8)]
    for seed in range(40):
        graph = uneven(seed)
        for problem in problems:
            for direction in DIRECTIONS:
                found = resident.plan_pass(problem, direction, graph)
                ranges = node_ranges(graph, found.bound)
                assert resident.shared_bytes(problem, direction, ranges) == found.shared_bytes
                others += node_ranges(graph, found.most_nodes).most_edges > ranges.most_edges
    assert others


def test_shared_memory_of_the_kernel_itself_has_room():
    """The pass over targets of gatv2 sums the gradient of its vector in 4 * 32 * 8 bytes per warp and more."""
    problem = replace(PROBLEM, score="gatv2", heads=4, channels=64)
    found = resident.plan_pass(problem, "targets", batch(20, 256))
    assert found.shared_bytes + 4 * found.constants["WARPS"] * 4 * 64 <= gpu.H200.shared_bytes


@pytest.mark.parametrize("score", TUNED)
def test_auto_takes_it_on_sparse_batches_and_leaves_dense_ones(score, superpixels):
    """As timed on an H200: it is the fastest forward and over sources on (e), and never on a batch of CLUSTER."""
    problem = replace(PROBLEM, score=score)
    dense = benchmark_graph("cluster_like", "cpu")
    dense_graph = Graph.of(dense.edge_index, dense.num_src, dense.num_dst)
    for directions in (FORWARD, BACKWARD):
        schedules = [choice.plan.schedule for choice in choose(problem, superpixels, directions, Settings())]
        assert schedules[-1] == "smem"
        schedules = [choice.plan.schedule for choice in choose(problem, dense_graph, directions, Settings())]
        assert "smem" not in schedules
