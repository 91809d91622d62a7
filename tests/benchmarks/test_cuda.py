"""The bench on a GPU: events, replays, FlexAttention and compiled baselines on miniature graphs."""

import pytest

from benchmarks import run
from benchmarks.cases.attention import AttentionCase, Flex
from benchmarks.graphs import benchmark_graph
from tests.benchmarks.quick import composed, read, results

pytestmark = pytest.mark.cuda
QUICK = ["pace.sampling_ms=1", "pace.min_repetitions=3", "device=cuda", "small=true"]


def test_all_states_and_implementations(tmp_path):
    extra = ["graphs=[a]", "ops=[dot]", "sizes=[2x16]", "dtypes=[float32]"]
    assert run.run(composed(*QUICK, f"folder={tmp_path}", *extra)) == 0
    rows = [row for row in read(tmp_path) if row["op"] == "dot"]
    assert {row["status"] for row in rows} == {"ok"}, {row["status"] for row in rows}
    assert {row["implementation"] for row in rows} == {"fused", "pyg", "unfused", "compile", "flex"}
    assert {row["state"] for row in rows if row["implementation"] == "fused"} == {"warm", "flushed", "replay"}


@pytest.mark.parametrize("name", ["a", "c"])
def test_flex_attention_has_the_right_gradients(name):
    graph, case = benchmark_graph(name, "cuda", small=True), AttentionCase("dot", "2x16")
    worst, error = results(Flex(), case, graph)[2].worst
    assert error < 2e-3, f"{worst}: {error:.2e}"
