"""The rules that choose attention kernels: what is refused and why, what is chosen, how a plan reads."""

import re
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from pyg_dfgnn.dispatch import core as dispatch
from pyg_dfgnn.dispatch import segment, store
from pyg_dfgnn.dispatch.attention import family, row_split
from pyg_dfgnn.dispatch.attention.family import FAMILY, unsupported_reasons
from pyg_dfgnn.dispatch.attention.problem import AttentionProblem
from pyg_dfgnn.dispatch.core import BACKWARD, FORWARD
from pyg_dfgnn.dispatch.gpu import Cost
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.reference.zoo import hub, random
from pyg_dfgnn.settings import RULES, SCHEDULES, Settings, current, local_settings
from pyg_dfgnn.statements.op import DIRECTIONS
from pyg_dfgnn.statements.scores import SCORES

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PROBLEM = AttentionProblem("dot", 8, 16, torch.float32, torch.device("cuda", 0), False, False)


def choose(problem, graph, directions, rule):
    """What runs by the attention family as it is now."""
    return dispatch.choose(family.FAMILY, problem, graph, directions, rule)


def plan(problem, graph, rule=None, trained=True):
    """What would run, and why."""
    return dispatch.explain(family.FAMILY, problem, graph, trained, rule)


def graph_of(case):
    return Graph.of(case.edge_index.clone(), case.num_src, case.num_dst)


# Reasons --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("score", "dtype"), list(product(SCORES, DTYPES)))
@pytest.mark.parametrize("size", [(1, 1), (3, 7), (64, 512), (65535, 1)], ids=str)
def test_what_runs(score, dtype, size):
    heads, channels = size
    problem = replace(PROBLEM, score=score, dtype=dtype, heads=heads, channels=channels)
    assert unsupported_reasons(problem) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"score": "l2"}, "score 'l2' has no fused kernel (one of dot, cosine, add, gatv2, supergat_mx, supergat_sd)"),
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dispatch, "_HAS_CUPY", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert unsupported_reasons(PROBLEM) == [
        'CuPy is not installed (pip install ".[cuda13]" or ".[cuda12]" in a clone of pyg_dfgnn)',
        "the kernels need compute capability 8.0 or newer",
    ]


def test_all_reasons_at_once():
    problem = replace(PROBLEM, device=torch.device("cpu"), dtype=torch.int32, channels=600, heads=0, edge=True)
    assert len(unsupported_reasons(replace(problem, score="cosine"))) == 5


# Plans ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", SCORES)
def test_plans_of_the_zoo(case, score):
    """Each graph has a plan, an empty one too."""
    found = plan(replace(PROBLEM, score=score), graph_of(case))
    for choice, direction in zip(found, DIRECTIONS, strict=True):
        assert choice.direction == direction and choice.plan.schedule in FAMILY.candidates


def test_no_backward_pass_without_gradients():
    found = plan(PROBLEM, graph_of(hub(300)), trained=False)
    assert [choice.direction for choice in found] == ["forward"]
    assert "backward" not in str(found)


def test_a_plan_reads_as_text():
    with local_settings(schedule="row_split"):
        lines = str(plan(replace(PROBLEM, heads=2, channels=4), graph_of(random(50, 50, 100)))).splitlines()
    assert lines[0] == "schedule row_split" and lines[1].strip() == "results: the same in every run"
    directions = [line.strip() for line in lines if line.startswith("  ") and not line.startswith("   ")][1:]
    assert [line.split(":")[0] for line in directions] == ["forward", "backward over targets", "backward over sources"]
    layout = r"row_split \(asked for\), 1 lane per head, \d+ x \d+ heads?, \d+ elements per load, .* \d+ rows per warp"
    assert all(re.search(layout, line) for line in directions)
    assert sum(line.strip().startswith("row_split: ") and " ms = max(" in line for line in lines) == 3


def test_the_schedule_that_was_asked_for():
    with local_settings(schedule="row_split"):
        assert plan(PROBLEM, graph_of(hub(300)))[0].reason == "asked for"


# Choices --------------------------------------------------------------------------------------------------------------

GRAPH = Graph.of(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3)


@dataclass(frozen=True)
class FakePass:
    schedule: str


class Fake:
    """A candidate that costs what it is told and has no pass for a direction without a cost."""

    refillable = True

    def __init__(self, name, forward=None, targets=None, sources=None, passes_share_buffers=False, deterministic=True):
        self.name, self.passes_share_buffers, self.deterministic = name, passes_share_buffers, deterministic
        self.seconds = dict(zip(DIRECTIONS, (forward, targets, sources), strict=True))

    def reasons_against(self, problem, direction, graph):
        return [f"{self.name} has no {direction}", "and never had"] if self.seconds[direction] is None else []

    def plan_pass(self, problem, direction, graph):
        return FakePass(self.name)

    def specs(self, problem, direction, plan):
        return []

    def cost(self, problem, direction, graph, chosen, gpu):
        return Cost({"work": self.seconds[direction]}, {"launch": 0.5})


@pytest.fixture
def candidates(monkeypatch):
    """Puts candidates in place of the real ones."""

    def put(*fakes):
        found = {fake.name: fake for fake in fakes}
        monkeypatch.setattr(family, "FAMILY", replace(FAMILY, candidates=found, others={}))
        dispatch._logged.clear()

    return put


def chosen(**changes):
    """Schedules of the three passes."""
    with local_settings(**changes):
        both = choose(PROBLEM, GRAPH, FORWARD, current()) + choose(PROBLEM, GRAPH, BACKWARD, current())
    return [choice.plan.schedule for choice in both]


def test_each_direction_takes_the_cheapest(candidates):
    candidates(Fake("row_split", 2, 1, 3), Fake("block_mma", 1, 2, 1), Fake("smmf", 3, 3, 2))
    assert chosen() == ["block_mma", "row_split", "block_mma"]
    candidates(Fake("row_split", 2, 1, 3), Fake("block_mma", 1))
    assert chosen() == ["block_mma", "row_split", "row_split"]


@pytest.mark.parametrize(
    ("targets", "sources", "expected"),
    [
        # Together 4.9 against 5; forward for itself.
        (0.9, 4, ["smmf", "smmf", "smmf"]),
        (1.1, 4, ["smmf", "row_split", "block_mma"]),
        # One of the two cannot run, so neither does.
        (0.1, None, ["smmf", "row_split", "block_mma"]),
        (None, 0.1, ["smmf", "row_split", "block_mma"]),
    ],
)
def test_passes_that_hand_over_run_together(candidates, targets, sources, expected):
    candidates(
        Fake("row_split", 2, 2, 4),
        Fake("block_mma", 2, 3, 3),
        Fake("smmf", 1, targets, sources, passes_share_buffers=True),
    )
    assert chosen() == expected


@pytest.mark.parametrize("passes_share_buffers", [False, True])
def test_asked_for_but_cannot_run(candidates, caplog, passes_share_buffers):
    candidates(Fake("row_split", 1, 1, 1), Fake("block_mma", 2, 2, None, passes_share_buffers=passes_share_buffers))
    expected = ["block_mma", "row_split" if passes_share_buffers else "block_mma", "row_split"]
    assert chosen(schedule="block_mma", fallback="silent") == expected and not caplog.messages
    for _ in range(3):
        assert chosen(schedule="block_mma") == expected
    assert caplog.messages[-1] == (
        "schedule 'block_mma' (backward over sources) cannot run here, 'row_split' takes its place: "
        "block_mma has no sources; and never had"
    )
    assert len(caplog.messages) == 2 if passes_share_buffers else 1
    with pytest.raises(
        UnsupportedError, match="schedule 'block_mma' .* cannot run here: block_mma has no sources; and never"
    ):
        chosen(schedule="block_mma", fallback="error")
    with local_settings(schedule="block_mma", fallback="error"):
        text = str(plan(PROBLEM, GRAPH))
    assert "backward over sources: row_split (block_mma cannot run)" in text
    assert "block_mma cannot run: block_mma has no sources; and never had" in text


def test_a_reason_is_logged_once_whatever_its_numbers(candidates, caplog, monkeypatch):
    tiles = Fake("block_mma")
    candidates(Fake("row_split", 1, 1, 1), tiles)
    shares = iter(("1.5 %", "12 %", "no"))
    monkeypatch.setattr(tiles, "reasons_against", lambda *_: [f"{next(shares)} set"])
    with local_settings(schedule="block_mma"):
        for _ in range(3):
            choose(PROBLEM, GRAPH, FORWARD, current())
    assert len(caplog.messages) == 2 and "1.5 % set" in caplog.messages[0] and "no set" in caplog.messages[1]


def test_a_plan_shows_all_candidates(candidates):
    candidates(Fake("row_split", 1e-3, 1e-3, 1e-3), Fake("block_mma", 2e-3, None, 2e-3))
    text = str(plan(PROBLEM, GRAPH, trained=False))
    assert text.splitlines() == [
        "schedule row_split",
        "  results: the same in every run",
        "  forward: row_split (the lowest estimate of 2 candidates), FakePass(schedule='row_split')",
        "    row_split: 501 ms = work 1 ms + launch 500 ms",
        "    block_mma: 502 ms = work 2 ms + launch 500 ms",
    ]
    found = plan(PROBLEM, GRAPH)
    assert found == plan(PROBLEM, GRAPH) and "options" not in repr(found)


@pytest.mark.parametrize("by_torch", [False, True])
def test_only_deterministic_schedules_on_request(candidates, by_torch):
    candidates(Fake("row_split", 2, 2, 2), Fake("block_mma", 1, 1, 1, deterministic=False))
    assert chosen(deterministic=False) == chosen() == ["block_mma"] * 3
    assert "may differ between runs" in str(plan(PROBLEM, GRAPH))
    torch.use_deterministic_algorithms(by_torch)
    try:
        assert chosen(deterministic=None if by_torch else True) == ["row_split"] * 3
        assert chosen(deterministic=False) == ["block_mma"] * 3
        with local_settings(deterministic=None if by_torch else True):
            text = str(plan(PROBLEM, GRAPH))
    finally:
        torch.use_deterministic_algorithms(False)
    assert "the same in every run" in text and "block_mma cannot run: its results may differ between runs" in text


def test_every_schedule_has_a_name_in_the_settings():
    assert set(SCHEDULES) == {*RULES, *FAMILY.by_name, *segment.FAMILY.by_name}
    for known in (FAMILY, segment.FAMILY):
        assert set(known.candidates) <= set(known.by_name)
        for name, candidate in known.by_name.items():
            # cuSPARSE's default algorithm alone may add in another order.
            assert type(candidate.passes_share_buffers) is bool and candidate.deterministic is (name != "cusparse"), (
                name
            )


@pytest.mark.parametrize("name", FAMILY.by_name)
def test_each_schedule_by_name(name):
    """It runs, or says why not; the plan names what runs."""
    graph = graph_of(random(64, 64, 512, seed=1))
    with local_settings(schedule=name):
        found = plan(replace(PROBLEM, channels=32), graph)
    for choice in found:
        option = next(option for option in choice.options if option.schedule == name)
        assert choice.plan.schedule == ("row_split" if option.reasons else name)
        assert f"{name}: " in str(choice) or f"{name} cannot run: " in str(choice)


def test_the_rule_of_the_paper():
    with local_settings(schedule="paper"):
        found = plan(PROBLEM, graph_of(hub(300)))
    assert found.schedule == "smmf" and "largest degree 30" in found[0].reason


def test_where_there_is_no_choice_nothing_is_estimated(monkeypatch):
    """Estimates may read facts of the graph that take a while."""

    def fail(*arguments):
        raise AssertionError

    monkeypatch.setattr(row_split, "cost", fail)
    gatv2 = replace(PROBLEM, score="gatv2")
    bipartite = Graph.of(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3, 4)
    for directions in (FORWARD, BACKWARD):
        assert choose(gatv2, bipartite, directions, Settings())[0].plan.schedule == "row_split"
        assert choose(PROBLEM, GRAPH, directions, Settings(schedule="row_split"))[0].plan.schedule == "row_split"


@pytest.mark.parametrize(("forward", "left"), [("row_split", True), ("block_mma", False)])
def test_backward_knows_what_forward_leaves(candidates, monkeypatch, forward, left):
    """With an add score the forward pass of `row_split` leaves `dout_dlogit`."""
    candidates(Fake("row_split", 1, 1, 1), Fake("block_mma", 2 if forward == "row_split" else 0.5, 2, 2))
    seen = []
    monkeypatch.setattr(
        Fake, "plan_pass", lambda self, problem, *_: seen.append(problem.dout_dlogit) or FakePass(self.name)
    )
    for score, edge in (("add", False), ("add", True), ("dot", False)):
        seen.clear()
        choose(replace(PROBLEM, score=score, edge=edge), GRAPH, BACKWARD, current())
        assert seen[-1] == (left and score == "add" and not edge)


def test_a_graph_that_is_no_batch_needs_no_segments():
    """Finding them reads all edges and waits for the device."""
    graph = graph_of(random(64, 64, 512, seed=1))
    for directions in (FORWARD, BACKWARD):
        choose(replace(PROBLEM, score="add"), graph, directions, Settings(schedule="row_split"))
    assert "diagonal_blocks" not in graph.derived_bytes()


# Autotune -------------------------------------------------------------------------------------------------------------


def measured(directions, **seconds):
    """Remember that candidates took so long."""
    with local_settings(schedule="autotune"):
        found = dispatch.options(family.FAMILY, PROBLEM, GRAPH, directions, current())
    store.remember(
        store.key_of(family.FAMILY, PROBLEM, GRAPH, directions, found),
        {direction: dict(seconds) for direction in directions},
    )


def test_what_was_timed_decides(candidates):
    candidates(Fake("row_split", 1, 1, 1), Fake("block_mma", 2, 2, 2), Fake("smmf", 3, 3, 3))
    with local_settings(schedule="autotune"):
        (choice,) = choose(PROBLEM, GRAPH, FORWARD, current())
    assert choice.plan.schedule == "row_split" and not choice.final and "not timed yet" in choice.reason
    measured(FORWARD, row_split=3e-3, block_mma=2e-3, smmf=1e-3)
    measured(BACKWARD, row_split=3e-3, block_mma=1e-3, smmf=2e-3)
    assert chosen(schedule="autotune") == ["smmf", "block_mma", "block_mma"] and chosen() == ["row_split"] * 3
    store.forget()
    with local_settings(schedule="autotune"):
        (choice,) = choose(PROBLEM, GRAPH, FORWARD, current())
        assert "block_mma: 2 ms measured, 2.5e+03 ms = work" in str(plan(PROBLEM, GRAPH))
    assert choice.plan.schedule == "smmf" and choice.final and "not timed" not in choice.reason


def test_what_ran_out_of_memory_is_not_taken(candidates):
    candidates(Fake("row_split", 2, 2, 2), Fake("block_mma", 1, 1, 1))
    measured(FORWARD, row_split=5e-3, block_mma=float("inf"))
    assert chosen(schedule="autotune")[0] == "row_split"
    store.forget()
    with local_settings(schedule="autotune"):
        assert not choose(PROBLEM, GRAPH, FORWARD, current())[0].final
