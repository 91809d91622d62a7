"""What developers measure with: cost models beside times, host times, the list of commands."""

import math

import pytest
import torch
from hydra import compose, initialize_config_dir

from benchmarks import CONFIGS, costs, measure, overhead, reorder
from benchmarks.cases.attention.case import SCORES, AttentionCase
from benchmarks.graphs import benchmark_graph, recipe_of
from benchmarks.orders import gains, gains_table
from benchmarks.results import Table
from benchmarks.run import FIELDS
from benchmarks.timing import Timer
from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.dispatch.attention import row_split
from pyg_dfgnn.dispatch.attention.family import FAMILY
from pyg_dfgnn.runtime import launcher
from pyg_dfgnn.settings import settings
from pyg_dfgnn.statements.op import DIRECTIONS

CPU = torch.device("cpu")
TIMED = [("e", "dot", "1x128", "float32"), ("b", "add", "8x16", "bfloat16"), ("b", "gatv2", "1x64", "float32")]


@pytest.fixture
def constants(monkeypatch):
    """The numbers of the cost models, which come back after the test."""
    monkeypatch.setitem(gpu.known, CPU, gpu.H200)
    monkeypatch.setattr(row_split, "ROW", dict(row_split.ROW))
    for name in ("STEP", "STEP_S", "LOAD"):
        monkeypatch.setattr(row_split, name, getattr(row_split, name))


def timed_rows(times):
    """Rows of each pass of the timed cases, in milliseconds from (case, schedule, pass)."""
    for case in TIMED:
        for schedule in ("auto", *FAMILY.candidates):
            for name in DIRECTIONS:
                row = dict(zip(("graph", "op", "size", "dtype"), case)) | {"schedule": schedule, "direction": name}
                row |= {"implementation": "fused", "state": "warm", "status": "ok"}
                yield {**dict.fromkeys(FIELDS, ""), **row, "median_ms": times(case, schedule, name)}


@pytest.fixture
def path(tmp_path, constants):
    """Times of three cases: `row_split` takes what is estimated, other schedules ten times that."""
    table = Table(tmp_path / "choice.csv", FIELDS)
    table.append(timed_rows(lambda *_: 1.0))
    samples = costs.read(table.path, CPU, small=True)
    estimates = {
        (sample.case, sample.direction): sample.estimate for sample in samples if sample.schedule == "row_split"
    }

    def times(case, schedule, name):
        return 1e3 * estimates[case, name] * (1.0 if schedule == "row_split" else 10.0)

    table.keep(list(timed_rows(times)))
    return table.path


def test_passes_that_candidates_can_run_are_read(path):
    samples = costs.read(path, CPU, small=True)
    assert {sample.schedule for sample in samples} <= set(FAMILY.candidates)
    assert {s.direction for s in samples} == set(DIRECTIONS)
    assert {s.schedule for s in samples if s.case[1] == "gatv2"} == {"row_split", "smem"}
    assert all(s.error == pytest.approx(0.0, abs=1e-6) for s in samples if s.schedule == "row_split")


def test_the_fit_finds_constants_again(path):
    samples = [sample for sample in costs.read(path, CPU, small=True) if sample.schedule == "row_split"]
    names = ("row_split.STEP_S", "row_split.ROW.forward", "gpu.launch_s")
    constants = [costs.Constant(name, CPU) for name in names]
    assert [constant.value for constant in constants] == [row_split.STEP_S, row_split.ROW["forward"], gpu.H200.launch_s]
    true = row_split.STEP_S
    for constant, factor in zip(constants, (3.0, 0.3, 2.0)):
        constant.set(constant.value * factor)
    before = costs.spread(samples)
    after = costs.fit(samples, constants, steps=300)
    assert after == pytest.approx(costs.spread(samples)) and after < 0.1 < before
    assert row_split.STEP_S == pytest.approx(true, rel=0.3)
    assert gpu.H200.launch_s != gpu.known[CPU].launch_s


@pytest.mark.parametrize("name", ["row_split.NONE", "row_split.ROW.none", "gpu.none", "gpu.name", "row_split.WORDS.x"])
def test_what_is_no_constant(name):
    with pytest.raises((ValueError, AttributeError)):
        costs.Constant(name, CPU)


def test_losses_of_choices(path, capsys):
    lost = costs.losses(costs.read(path, CPU, small=True))
    assert len(lost) == 2 * len(TIMED) and [loss for loss, *_ in lost] == sorted(
        (loss for loss, *_ in lost), reverse=True
    )
    # Where auto takes row_split it loses nothing, elsewhere a factor of ten or more.
    for loss, case, taken, fastest in lost:
        assert (loss == 0.0) == (set(taken) == {"row_split"}), case
        assert set(fastest) == {"row_split"}
    assert costs.main([str(path), "--device", "cpu", "--small", "--fit", "row_split.STEP", "--steps", "5"]) == 0
    assert f"{len(lost)} choices" in capsys.readouterr().out


def test_schedules_that_hand_over_run_with_themselves():
    ms = {"row_split": (2.0, 3.0), "pmf": (4.0, 1.0), "smmf": (1.0, 1.5)}
    times = {
        (name, direction): time for name, pair in ms.items() for direction, time in zip(("targets", "sources"), pair)
    }
    expected = {("row_split", "row_split"): 5, ("pmf", "pmf"): 5, ("smmf", "smmf"): 2.5}
    assert costs.totals(("targets", "sources"), times) == expected
    assert costs.totals(("targets", "sources"), times, 0.1)["row_split", "row_split"] == pytest.approx(5.1)


def test_overhead_resumes(tmp_path, capsys):
    words = "--small --device cpu --repetitions 3 --scores dot --graphs b --out".split()
    for _ in range(2):
        assert overhead.main([*words, str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    assert "| b | GT | 8 | 16 | conv fwd+bwd | 3 |" in capsys.readouterr().out
    assert path.name.endswith("-small-overhead.csv") and len(Table.read(path)) == 2 * 8


@pytest.mark.parametrize("score", SCORES)
def test_overhead_counts_and_repeats_launches(score):
    settings(schedule="row_split")
    graph = benchmark_graph("b", "cpu", small=True)
    launched = []
    with overhead.fused_anywhere(CPU), launcher.override(lambda spec, entry, *rest: launched.append(entry)):
        rows = overhead.measure(AttentionCase(score, 1, 8), graph, Timer(CPU), repetitions=2)
    kernels = {row["what"]: row["kernels"] for row in rows}
    assert kernels["launch"] == kernels["torch product"] == kernels["fwd"] == kernels["fwd, grad"] == 1
    assert kernels["fwd+bwd"] == 3 and kernels["conv fwd+bwd"] >= 3
    assert launched.count("attention_backward_sources") >= 3


def test_orders_are_set_against_their_gain(tmp_path, capsys):
    words = "--small --device cpu --graphs c+degree c+rcm --folder".split()
    for _ in range(2):
        assert reorder.main([*words, str(tmp_path)]) == 0
    assert "python -m benchmarks experiment=reorder" in capsys.readouterr().out
    (path,) = tmp_path.glob("*-small/reorder-cost.csv")
    costs_of = Table.read(path)
    assert [row["graph"] for row in costs_of] == ["c+degree", "c+rcm"] and all(float(r["cost_s"]) > 0 for r in costs_of)
    row = {**dict.fromkeys(FIELDS, ""), "op": "dot", "layer": "GT", "size": "1x128", "dtype": "float32", "status": "ok"}
    row |= {"implementation": "fused", "schedule": "auto", "direction": "fwd", "state": "warm"}
    times = [{**row, "graph": name, "median_ms": ms} for name, ms in {"c": 2.0, "c+degree": 1.5, "c+rcm": 2.5}.items()]
    Table(path.with_name("reorder.csv"), FIELDS).append(times)
    costs_of = [{**cost, "cost_s": "10"} for cost in costs_of]
    faster, slower = gains(costs_of, times)
    assert (faster["graph"], faster["times_faster"], faster["break_even_calls"]) == ("c+degree", "1.33", 20_000)
    assert (slower["graph"], slower["times_faster"], slower["break_even_calls"]) == ("c+rcm", "0.80", math.inf)
    steps = [{**each, "direction": "fwd+bwd"} for each in times]
    half = [{**each, "dtype": "bfloat16", "median_ms": float(each["median_ms"]) ** 2} for each in steps]
    table = gains_table(costs_of, [*steps, *half])
    assert "| 1.33 (20,000), 1.78 |" in table and "| 0.80, 0.64 |" in table
    assert reorder.main([*words, str(tmp_path)]) == 0
    assert "| 2 | 1.5 | 1.33 |" in capsys.readouterr().out


def test_the_experiment_names_reordered_graphs():
    names = reorder.experiment_graphs()
    assert len({name.partition("+")[0] for name in names}) == 4 and all(recipe_of(name).order for name in names)


def test_commands_of_training_steps_compose():
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        for words in measure.commands().values():
            if "benchmarks.table2" in words:
                cfg = compose("table2", words[2:])
                assert cfg.model.get("dropout", 0.0) == 0.0 and cfg.model.hidden_channels == 128


def test_everything_is_listed_and_goes_on_where_it_stopped(monkeypatch, capsys):
    assert measure.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "-m benchmarks experiment=fig9\n" in listed and "overhead: -m benchmarks.overhead\n" in listed
    codes = iter([2, 0, 1])

    class Finished:
        def __init__(self, words):
            self.returncode = next(codes)

    monkeypatch.setattr(measure.subprocess, "run", Finished)
    assert measure.main(["fig9", "check"]) == 1
    assert "FAILED: check (exit code 1)" in capsys.readouterr().out
