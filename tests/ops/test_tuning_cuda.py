"""`schedule="autotune"` on a GPU: real timings, streams, capture."""

import pytest
import torch

from pyg_dfgnn.dispatch import core as dispatch
from pyg_dfgnn.dispatch import store
from pyg_dfgnn.dispatch.attention.family import FAMILY
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.core import explain
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops import tuning
from pyg_dfgnn.ops.attention.functional import dot_attention
from pyg_dfgnn.reference.tolerances import assert_all_close
from pyg_dfgnn.reference.zoo import random
from pyg_dfgnn.settings import Settings, current, local_settings
from tests.ops.problems import op_and_shape, pairs, problem_of

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
CASE = random(400, 300, 9000, seed=5)


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    """Timings of this test alone; compiled kernels stay where they are."""
    monkeypatch.setattr(store, "kernel_cache_dir", lambda: tmp_path)
    store.forget()
    yield tmp_path
    store.forget()


def asked_of(score, heads=2, channels=4):
    return AttentionProblem(score, heads, channels, torch.float32, DEVICE, False, False)


def test_the_fastest_is_taken_and_right(score, own_folder):
    problem = problem_of(score, CASE, device=DEVICE)
    with local_settings(schedule="autotune"):
        actual = problem.run()
    assert len(list(own_folder.iterdir())) == 2
    assert_all_close(pairs(actual, problem.expected()))
    found = explain(FAMILY, asked_of(score), problem.graph, True, Settings(schedule="autotune"))
    for choice in found:
        able = {option.schedule: option.measured_s for option in choice.options if not option.reasons}
        assert choice.final and all(seconds is not None and 1e-7 <= seconds < 1e-2 for seconds in able.values())
        if choice.direction == "forward":
            assert choice.plan.schedule == min(able, key=able.get)


def test_times_grow_with_the_graph():
    seconds = []
    for num_edges in (10_000, 4_000_000):
        case = random(20_000, 20_000, num_edges, seed=6)
        graph = Graph.of(case.edge_index.to(DEVICE), case.num_src, case.num_dst)
        asked = asked_of("dot", 1, 128)
        found = dispatch.options(FAMILY, asked, graph, dispatch.FORWARD, current(), ("row_split",))
        op, shape = op_and_shape(asked, graph)
        measured = tuning.measure(op, asked, graph, shape, dispatch.FORWARD, found, frozenset())
        seconds.append(measured["forward"]["row_split"])
    assert 1e-6 < seconds[0] < 1e-3 and seconds[1] > 3 * seconds[0]


def test_no_timing_while_a_graph_is_captured(own_folder):
    problem = problem_of("dot", CASE, device=DEVICE)
    graph = problem.graph
    inputs = [problem.inputs[name] for name in ("query", "key", "value")]
    expected = dot_attention(graph, *inputs)
    # Facts of the graph and kernels are ready, as after any warm-up.
    with local_settings(schedule="auto"):
        dot_attention(graph, *inputs)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with local_settings(schedule="autotune"), torch.cuda.graph(captured):
        out = dot_attention(graph, *inputs)
    assert not list(own_folder.iterdir())
    captured.replay()
    assert_all_close({"out": (out, expected)}, torch.float32)
    # Outside of a capture the same call is timed.
    with local_settings(schedule="autotune"):
        dot_attention(graph, *inputs)
    assert len(list(own_folder.iterdir())) == 1


def test_on_a_side_stream():
    problem = problem_of("add", CASE, device=DEVICE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), local_settings(schedule="autotune"):
        actual = problem.run()
    torch.cuda.current_stream().wait_stream(stream)
    assert_all_close(pairs(actual, problem.expected()))
