"""What developers measure with: cost models beside times, host times, the list of commands."""

import math

import pytest
import torch
from hydra import compose, initialize_config_dir

from benchmarks import CONFIGS, measure, overhead, reorder
from benchmarks.cases.attention.case import SCORES, AttentionCase
from benchmarks.graphs import benchmark_graph, recipe_of
from benchmarks.orders import gains, gains_table
from benchmarks.results import Table
from benchmarks.run import FIELDS
from benchmarks.timing import Timer
from pyg_dfgnn.runtime import launcher
from pyg_dfgnn.settings import settings

CPU = torch.device("cpu")


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
