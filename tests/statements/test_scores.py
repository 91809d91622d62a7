"""The records of scores: what they refuse, and how a score that nobody tuned is planned."""

from dataclasses import replace

import pytest
import torch

from pyg_dfgnn.dispatch.attention import block_mma, paper, row_split, smem
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.statements import score as statements
from pyg_dfgnn.statements.op import DIRECTIONS
from pyg_dfgnn.statements.scores import DOT, SCORES, Score, register


@pytest.fixture
def registered(monkeypatch):
    """Register a score for one test."""
    monkeypatch.setattr(statements, "_scores", known := dict(statements._scores))
    monkeypatch.setattr("pyg_dfgnn.dispatch.attention.problem.SCORES", known)
    monkeypatch.setattr("pyg_dfgnn.dispatch.attention.row_split.SCORES", known)
    return register


def test_a_name_is_taken_once():
    assert register(DOT) is register(replace(DOT)) is DOT
    with pytest.raises(ValueError, match="'score' needs a name that no other score has: .* .got 'dot'."):
        register(replace(DOT, source="struct Score {};"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edge": "matrix"}, "'edge' needs one of"),
        ({"parameter": ("C",)}, "'parameter' needs one of"),
        ({"node_scalars": "norm"}, "'node_scalars' needs one of"),
        ({"edge": "scalar"}, "'edge_in_value' needs edge='vector'"),
        ({"gradients": ("weights",)}, "'gradients' needs names of operands .got weights"),
        ({"smem": {"back": statements.SmemTuning()}}, "'smem' needs keys of forward, targets, sources .got back"),
    ],
)
def test_a_wrong_record_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(DOT, **change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("operands", [{"target": True}, {"node_scalars": "input"}], ids=["vectors", "scalars"])
def test_a_score_without_tuning_is_planned(registered, operands, direction, dtype):
    registered(Score("untuned", "", DOT.reference, **operands))
    problem = AttentionProblem("untuned", 8, 16, dtype, torch.device("cpu"), False, False)
    graph = Graph.of(torch.randint(0, 60, (2, 900)), 60)
    assert row_split.reasons_against(problem, direction, graph) == []
    assert row_split.plan_pass(problem, direction, graph).constants["HEADS"] == 8
    assert smem.plan_pass(problem, direction, graph).constants["SMEM"]
    for schedule in (block_mma, paper.smmf, paper.pmf):
        assert schedule.reasons_against(problem, direction, graph)


def test_the_registry_cannot_be_written_past_register():
    with pytest.raises(TypeError):
        SCORES["mine"] = DOT
