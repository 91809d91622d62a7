"""`schedule="autotune"`: what is timed, when, and what comes of it; the timer is a fake, launches are emulated."""

import pytest
import torch

from pyg_dfgnn.dispatch import core as dispatch
from pyg_dfgnn.dispatch import store
from pyg_dfgnn.dispatch.attention.family import FAMILY
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ops import tuning
from pyg_dfgnn.ops.core import PreparedOp
from pyg_dfgnn.reference.tolerances import assert_all_close
from pyg_dfgnn.runtime import launcher
from pyg_dfgnn.settings import current, local_settings
from tests.covering import over
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device
from tests.ops.problems import DENSE, SCORES, SPARSE, op_and_shape, pairs, problem_of

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def emulated(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    store.forget()
    with emulated_device() as launched:
        yield launched
    store.forget()


@pytest.fixture
def timer(monkeypatch):
    """A timer that says what it is told, and counts how often it was asked."""

    class Timer:
        count = 0
        seconds = staticmethod(lambda: 1e-3)

        def __call__(self, call, device):
            call()
            self.count += 1
            return self.seconds()

    timer = Timer()
    monkeypatch.setattr(tuning, "can_time", lambda device: True)
    monkeypatch.setattr(tuning, "seconds_of", timer)
    return timer


@over(score=SCORES, full=(False, True))
def test_values_and_gradients_stay(score, full, timer):
    problem = problem_of(score, DENSE, full=full)
    expected = problem.run(seed=3)
    with local_settings(schedule="autotune"):
        actual = problem.run(seed=3)
    assert timer.count >= 3
    assert_all_close(pairs(actual, expected))


def test_timed_once(timer):
    with local_settings(schedule="autotune"):
        first = problem_of("dot", DENSE)
        first.run()
        count = timer.count
        first.run()
        assert timer.count == count > 0
        # Another graph of the same kind, and another process.
        problem_of("dot", DENSE).run()
        store.forget()
        problem_of("dot", DENSE).run()
        assert timer.count == count
        problem_of("dot", SPARSE).run()
        assert timer.count > count


def test_the_random_numbers_of_the_user_stay(timer):
    problem = problem_of("gatv2", DENSE, full=True)
    state = torch.get_rng_state()
    graph = Graph.of(problem.edge_index, DENSE.num_src, DENSE.num_dst)
    with local_settings(schedule="autotune"):
        asked = AttentionProblem("dot", 2, 4, torch.float32, torch.device("cpu"), False, True)
        op, shape = op_and_shape(asked, graph)
        tuning.tune(op, asked, graph, shape, dispatch.FORWARD, current())
    assert timer.count and torch.equal(torch.get_rng_state(), state)


def test_nothing_is_kept_where_no_timing_is_possible(emulated):
    """As while launches are recorded or captured: the estimate decides, and the next call asks again."""
    assert launcher.is_overridden() and not tuning.can_time(torch.device("cpu"))
    problem = problem_of("add", DENSE)
    with local_settings(schedule="autotune"):
        problem.run()
        graph = Graph.of(problem.edge_index, DENSE.num_src, DENSE.num_dst)
        assert not [kept for kept in graph.derived("plans", dict).values() if isinstance(kept, PreparedOp)]
        asked = AttentionProblem("add", 2, 4, torch.float32, torch.device("cpu"), False, False)
        assert "not timed yet" in str(dispatch.explain(FAMILY, asked, graph, True))


@pytest.mark.fault("out of memory while candidates are timed")
def test_out_of_memory_leaves_a_candidate_out(timer, caplog):
    def fail():
        raise torch.OutOfMemoryError("too much")

    timer.seconds = fail
    problem = problem_of("dot", DENSE)
    with local_settings(schedule="autotune"):
        problem.run()
    assert "schedule 'row_split' is left out of a choice by autotune: too much" in caplog.text


@pytest.mark.fault("out of memory while candidates are timed")
def test_no_memory_for_the_inputs_of_a_timing(timer, monkeypatch, tmp_path, caplog):
    """Estimates decide then, for this process."""
    inputs = []

    def example(*arguments):
        inputs.append(arguments)
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(tuning, "example", example)
    problem = problem_of("dot", DENSE)
    with local_settings(schedule="autotune"):
        problem.run()
        problem.run()
    assert len(inputs) == 2 and not timer.count and not list(tmp_path.iterdir())
    assert "nothing is timed for a choice by autotune: too much" in caplog.text


@over(score=SCORES, directions=(dispatch.FORWARD, dispatch.BACKWARD))
def test_every_candidate_is_measured(score, directions, timer):
    """With edge features and dropout too, and in 16 bits."""
    problem = problem_of(score, DENSE)
    graph = Graph.of(problem.edge_index, DENSE.num_src, DENSE.num_dst)
    for dtype, full in ((torch.float32, False), (torch.bfloat16, True)):
        edge = full and score != "cosine"
        asked = AttentionProblem(score, 2, 8, dtype, torch.device("cpu"), edge, full)
        found = dispatch.options(FAMILY, asked, graph, directions, current())
        op, shape = op_and_shape(asked, graph)
        seconds = tuning.measure(op, asked, graph, shape, directions, found, frozenset())
        for direction, offers in zip(directions, found, strict=True):
            assert seconds[direction].keys() == {name for name, option in offers.items() if not option.reasons}
            assert set(seconds[direction].values()) == {1e-3}
