"""The schedule `smem` and joined chunks on a GPU: against float64, the same bits in every run, capture."""

from itertools import product

import pytest
import torch

from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.attention.row_split import plan_pass
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference.zoo import hub, sbm, skewed
from pyg_dfgnn.settings import local_settings
from tests.ops.problems import SCORES
from tests.ops.test_attention_block_mma_cuda import superpixels
from tests.ops.test_attention_cuda import DEVICE, assert_equal, assert_matches, capture, setup_of

pytestmark = pytest.mark.cuda

# Heads, channels, dtype, edge features and dropout.
SETUPS = [
    (1, 128, torch.float32, False),
    (8, 16, torch.float32, False),
    (1, 128, torch.bfloat16, False),
    (8, 16, torch.float16, False),
    (2, 20, torch.float32, True),
]
# A hub of 170 edges is what one thread block joins; many rows come in order of length then.
SKEWED = skewed(9_000, 12_000, 30_000), skewed(10_000, 10_000, 40_000)
GRID = [
    ("smem", superpixels()),
    ("smem", sbm(num_graphs=30, nodes=40)),
    ("row_split", hub(170)),
    *(("row_split", case) for case in SKEWED),
]


@pytest.fixture(scope="module", autouse=True)
def compiled_kernels(compile_once):
    """What the grid needs, found by running it."""
    with compile_once():
        for score, setup, (schedule, case) in product(SCORES, SETUPS, GRID):
            with local_settings(schedule=schedule):
                setup_of(score, case, *setup).run()


@pytest.mark.parametrize(("schedule", "case"), GRID, ids=str)
def test_against_float64(score, schedule, case):
    for setup in SETUPS:
        problem = setup_of(score, case, *setup)
        with local_settings(schedule=schedule, fallback="error"):
            actual = problem.run(seed=3)
            out = problem.call(seed=3)
            also_out, actual["weights"] = problem.call(seed=3, return_weights=True)
            assert torch.equal(also_out, out)
            assert_matches(problem, actual, problem.kept(seed=3))
            assert_equal(problem.run(seed=3), actual)


@pytest.mark.parametrize("case", SKEWED, ids=str)
def test_packed_rows_come_in_order(case):
    graph = Graph.of(case.edge_index.to(DEVICE), case.num_src, case.num_dst)
    for score, (heads, channels, dtype, more), direction in product(SCORES, SETUPS, ("forward", "targets", "sources")):
        problem = AttentionProblem(score, heads, channels, dtype, DEVICE, False, more)
        constants = plan_pass(problem, direction, graph).constants
        assert constants["JOINED"] and constants["ORDERED"] and constants["WARP_ROWS"] > 1


@pytest.mark.parametrize(("schedule", "case"), GRID[1:], ids=str)
def test_capture(schedule, case):
    problem = setup_of("dot", case, 1, 128, torch.float32, False)
    results = {}
    with local_settings(schedule=schedule, fallback="error"):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in problem.inputs.items()}
        captured = capture(problem, leaves, results)
        captured.replay()
        torch.cuda.synchronize()
        expected = problem.run()
    assert_equal({name: results[name] for name in expected}, expected)
