"""Table 2 on a GPU: every backend agrees with PyG, events mark the phases, in captured graphs too."""

import pytest

from benchmarks.table2_steps import PHASES
from tests.benchmarks.test_table2 import options, table  # noqa: F401

pytestmark = pytest.mark.cuda
EXTRA = ["device=cuda", "backends=[pyg,unfused,auto,auto_graph]", "pace.steps=12", "pace.warm_up=9", "pace.rounds=2"]


@pytest.mark.parametrize("model", ["transformer_stack", "gat_stack", "agnn_stack"])
@pytest.mark.parametrize("dataset", ["pattern", "reddit_like_small"])
def test_backends_agree_and_are_timed(table, dataset, model):  # noqa: F811
    code, rows = table(f"model={model}", f"datasets=[{dataset}]", "model.hidden_channels=32", *EXTRA)
    assert {row["backend"]: row["status"] for row in rows} == dict.fromkeys(
        ("pyg", "unfused", "auto", "auto_graph"), "ok"
    )
    assert code == 0
    for row in rows:
        times = {phase: float(row[f"{phase}_ms"]) for phase in (*PHASES, "sum", "step")}
        assert all(0 <= time_ms < 1e3 for time_ms in times.values()) and times["forward"] > 0 and times["backward"] > 0
        in_turns = dataset != "pattern" and row["backend"] != "pyg"
        assert float(row["peak_mb"]) > 0 and row["n"] in (("8",) if in_turns else ("3", "4"))
        assert bool(row["reference_sum_ms"]) is in_turns
    assert {row["once"] for row in rows} == {str(dataset != "pattern")}


def test_a_process_of_its_own(table):  # noqa: F811
    code, rows = table("limit_s=300", *EXTRA)
    assert code == 0 and [row["status"] for row in rows] == ["ok"] * 4
