"""The rules that choose attention kernels: what is refused and why, what is chosen, how a plan reads."""

import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch

from pyg_dfgnn.dispatch import attention as dispatch
from pyg_dfgnn.dispatch.attention import AttentionProblem, plan, unsupported_reasons
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.settings import settings
from tests.zoo import hub, random

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PROBLEM = AttentionProblem("dot", 8, 16, torch.float32, torch.device("cuda", 0), False, False, True)


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


# Plans ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", dispatch.SCORES)
def test_plans_of_the_zoo(case, score):
    """Each graph has a plan, an empty one too."""
    found = plan(replace(PROBLEM, score=score), graph_of(case))
    for choice, walk in zip((found.forward, found.targets, found.sources), dispatch.WALKS, strict=True):
        assert choice.walk == walk and choice.chosen.schedule == "rows" and choice.reason == "the general schedule"


def test_no_backward_pass_without_gradients():
    found = plan(replace(PROBLEM, needs_grad=False), graph_of(hub(300)))
    assert found.targets is None and found.sources is None
    assert "backward" not in str(found)


def test_a_plan_reads_as_text():
    text = str(plan(replace(PROBLEM, heads=2, channels=4), graph_of(random(50, 50, 100))))
    assert text.splitlines()[0] == "schedule rows"
    assert "rows (the general schedule)" in text
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:]] == [
        "forward",
        "backward over targets",
        "backward over sources",
    ]
    assert "1 lanes per head, 2 x 1 heads, 4 elements per load" in text and "16 rows per warp" in text


def test_the_schedule_that_was_asked_for():
    with settings(schedule="rows"):
        assert plan(PROBLEM, graph_of(hub(300))).forward.reason == "asked for"
