"""The schedules `smmf` and `pmf`: the paper's rule, what fits in shared memory, heads of a block."""

from dataclasses import replace

import pytest
import torch

from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.dispatch.attention.paper import ABLATIONS, pmf, rule, smmf
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference.zoo import hub
from pyg_dfgnn.statements.op import DIRECTIONS
from tests.dispatch.test_core import PROBLEM, graph_of

KIB = 1 << 10
# Largest degrees of the paper's graphs; it marks the last three as having super nodes.
DEGREES = {"Cora": 168, "Citeseer": 99, "Pubmed": 171, "PATTERN": 110, "ppa": 3241, "proteins": 7750, "Reddit": 21657}
STARRED = {"ppa", "proteins", "Reddit"}


def star(degree):
    """One target with `degree` edges."""
    return Graph.of(torch.stack([torch.arange(degree), torch.zeros(degree, dtype=torch.long)]), degree, 1)


# The rule -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity_bytes", "flagged"),
    [
        pytest.param(48 * KIB, {"Reddit"}, id="48KiB"),
        pytest.param(48 * KIB // 8, STARRED, id="48KiB-by-8-rows"),
        pytest.param(48 * KIB // 4, STARRED, id="48KiB-by-4-rows"),
        pytest.param(227 * KIB, set(), id="227KiB"),
    ],
)
@pytest.mark.parametrize("score", ["dot", "cosine"])
def test_what_the_capacity_flags(score, capacity_bytes, flagged):
    """Of the readings of the paper's rule, only that by rows of a block flags just the graphs it marks."""
    problem = replace(PROBLEM, score=score)
    found = {name for name, d in DEGREES.items() if rule(problem, star(d), capacity_bytes=capacity_bytes)[0] == "pmf"}
    assert found == flagged


def test_the_threshold_is_inclusive_and_of_this_device(monkeypatch):
    assert rule(PROBLEM, star(227 * KIB // 8 // 4))[0] == "pmf"
    assert rule(PROBLEM, star(227 * KIB // 8 // 4 - 1))[0] == "smmf"
    monkeypatch.setitem(gpu.known, PROBLEM.device, replace(gpu.H200, shared_bytes=48 * KIB))
    name, reason = rule(PROBLEM, star(1536))
    assert name == "pmf"
    assert reason == "super nodes and a dot score: largest degree 1536, super nodes from 1536 = 6144 / 4 bytes"
    assert rule(PROBLEM, star(1535))[0] == "smmf"


def test_an_add_score_takes_smmf_on_super_nodes():
    name, reason = rule(replace(PROBLEM, score="add"), star(20000))
    assert name == "smmf" and reason.startswith("super nodes, but no dot score")


def test_what_does_not_fit_takes_pmf():
    """More edges than shared memory holds scores, whatever the score and the capacity."""
    for score in ("dot", "cosine", "add"):
        problem = replace(PROBLEM, score=score)
        name, reason = rule(problem, star(60000), capacity_bytes=1 << 30)
        assert name == "pmf"
        assert (
            reason == "not smmf: the scores of 8 rows take up to 240000 bytes of shared memory, the device has 232448"
        )
    # The pass over targets keeps two numbers per edge.
    assert rule(PROBLEM, star(40000), capacity_bytes=1 << 30)[0] == "smmf"
    assert rule(PROBLEM, star(40000), ("targets", "sources"), capacity_bytes=1 << 30)[0] == "pmf"


# Shared memory --------------------------------------------------------------------------------------------------------


def test_blocks_of_rows_decide_not_single_rows():
    """Eight neighbouring rows share a block; eight rows of different blocks do not."""
    rows = torch.arange(8).repeat_interleave(58112 // 8 + 1)
    together, apart = (Graph.of(torch.stack([torch.zeros_like(rows), stride * rows]), 1, 64) for stride in (1, 8))
    assert together.csr.max_degree == apart.csr.max_degree
    assert smmf.reasons_against(PROBLEM, "forward", together) and not smmf.reasons_against(PROBLEM, "forward", apart)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("heads", [1, 2, 8, 33])
@pytest.mark.parametrize("degree", [1, 100, 3000, 9000, 29000])
def test_heads_of_a_block_fit(direction, heads, degree):
    problem = replace(PROBLEM, heads=heads)
    graph = star(degree)
    assert not smmf.reasons_against(problem, direction, graph)
    chosen = smmf.plan_pass(problem, direction, graph)
    c = chosen.constants
    group = c["HEAD_SLOTS"] * c["LANE_HEADS"]
    assert c["HEAD_LANES"] * c["HEAD_SLOTS"] * c["EDGE_SLOTS"] == 32 and c["WARP_ROWS"] == 1
    assert group <= 32 and group & (group - 1) == 0
    assert chosen.shared_bytes <= gpu.H200.shared_bytes
    if direction == "sources":
        assert chosen.shared_bytes == 0
        return
    assert chosen.shared_bytes == degree * (8 if direction == "targets" else 4) * group
    # Several blocks run side by side, or none could with fewer heads.
    assert 4 * chosen.shared_bytes <= gpu.H200.shared_bytes or group == 1


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_zoo_has_plans(case, direction):
    graph = graph_of(case)
    for candidate in (smmf, pmf, *ABLATIONS.values()):
        for score in ("dot", "cosine", "add"):
            problem = replace(PROBLEM, score=score)
            assert candidate.reasons_against(problem, direction, graph) == []
            chosen = candidate.plan_pass(problem, direction, graph)
            assert chosen.schedule == candidate.name and str(chosen)
            assert candidate.cost(problem, direction, graph, chosen, gpu.H200).seconds > 0


def test_gatv2_is_refused():
    for candidate in (smmf, pmf):
        (reason,) = candidate.reasons_against(replace(PROBLEM, score="gatv2"), "forward", star(3))
        assert "gatv2" in reason


def test_scores_are_shared_evenly():
    for edges in (1, 100, 100_000):
        chosen = pmf.plan_pass(PROBLEM, "forward", star(edges))
        c = chosen.constants
        assert 0 < chosen.warp_edges <= 128 and chosen.warp_edges % (c["UNROLL"] * c["EDGE_SLOTS"]) == 0


def test_few_warps_cost_more():
    """Shared memory that leaves one block on a multiprocessor makes the pass slower than the other schedule's."""
    graph = star(25000)
    smmf_cost, pmf_cost = (
        candidate.cost(PROBLEM, "targets", graph, candidate.plan_pass(PROBLEM, "targets", graph), gpu.H200)
        for candidate in (smmf, pmf)
    )
    assert smmf_cost.overlapped["gathers"] > pmf_cost.overlapped["gathers"]
    light = graph_of(hub(50))
    smmf_cost, pmf_cost = (
        candidate.cost(PROBLEM, "forward", light, candidate.plan_pass(PROBLEM, "forward", light), gpu.H200)
        for candidate in (smmf, pmf)
    )
    assert smmf_cost.seconds < pmf_cost.seconds


# Ablations ------------------------------------------------------------------------------------------------------------


def test_optimisations_are_added_one_by_one():
    switches = {
        tuple(
            candidate.plan_pass(PROBLEM, "forward", star(9)).constants[name]
            for name in ("BALANCED", "EDGE_SOFTMAX", "VECTOR_GATHER")
        )
        for candidate in (smmf, *ABLATIONS.values())
    }
    assert switches == {(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1)}
