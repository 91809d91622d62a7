"""Timing: the gate comes first, what cannot run is listed, runs resume, targets are judged."""

import csv

import pytest
import torch

from pyg_dfgnn.bench import overhead, plots, run, tables
from pyg_dfgnn.bench.baselines import IMPLEMENTATIONS, CompiledPyG, Fused, Implementation, PyG, Unfused
from pyg_dfgnn.bench.cases.attention import SCORES, AttentionCase, forward_backward
from pyg_dfgnn.bench.graphs import BenchGraph, benchmark_graph
from pyg_dfgnn.bench.oracle import compare, float64_reference
from pyg_dfgnn.bench.prepare import rounded_problem
from pyg_dfgnn.bench.targets import TARGETS, verdict
from pyg_dfgnn.bench.timing import Timer, Timing

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short_timings(monkeypatch):
    monkeypatch.setattr("pyg_dfgnn.bench.timing.MIN_REPETITIONS", 3)
    monkeypatch.setattr("pyg_dfgnn.bench.timing.MAX_REPETITIONS", 3)


@pytest.mark.parametrize("implementation", [Fused(), PyG(), Unfused(), CompiledPyG("eager")], ids=lambda i: i.name)
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("score", SCORES)
def test_implementations_agree_with_float64(implementation, heads, score):
    graph, case = benchmark_graph("c", "cpu", small=True), AttentionCase(score, heads, 16)
    reasons = implementation.reasons(case, graph, True, float("inf"))
    if reasons:
        pytest.skip("; ".join(reasons))
    inputs, grad_out = rounded_problem(case, graph, [torch.float32])
    expected = float64_reference(case, graph, inputs, grad_out)
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    actual = forward_backward(implementation.prepare(case, graph, leaves)(), leaves, grad_out)
    name, error = compare(case, graph, actual, expected, grad_out).worst
    assert error < 3e-6, f"{name}: {error:.2e}"


class _ManyEdges(BenchGraph):
    num_edges = 115_842_382


def test_memory_guard_lists_what_cannot_fit():
    graph = _ManyEdges("c", torch.zeros(2, 1, dtype=torch.long), 232_965, 232_965)
    case = AttentionCase("dot", 1, 128)
    assert PyG().reasons(case, graph, False, 141e9) == ["needs 240 GB"]
    assert PyG().reasons(case, graph, False, 300e9) == []
    assert Unfused().reasons(case, graph, True, 141e9) == []
    assert Fused().reasons(case, graph, True, 8e9) == []
    assert "160 s" in CompiledPyG().reasons(case, graph, True, 141e9)[0]


def test_reasons_are_sentences():
    graph = benchmark_graph("b", "cpu", small=True)
    assert PyG().reasons(AttentionCase("cosine", 8, 16), graph, False, 1e9) == ["AGNNConv has one head"]
    assert "SDDMM" in Unfused().reasons(AttentionCase("gatv2", 1, 16), graph, False, 1e9)[0]


class _Wrong(PyG):
    name = "pyg"

    def prepare(self, case, graph, inputs):
        forward = super().prepare(case, graph, inputs)
        return lambda: forward() * 1.01


class _OutOfMemory(PyG):
    name = "pyg"

    def prepare(self, case, graph, inputs):
        raise torch.OutOfMemoryError("tried 500 GB")


def options(tmp_path, *extra):
    return ["--small", "--device", "cpu", "--sizes", "2x8", "--out", str(tmp_path), *extra]


def read(tmp_path):
    (path,) = tmp_path.glob("*.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_wrong_implementation_gets_no_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(IMPLEMENTATIONS, "pyg", _Wrong)
    extra = ["--graphs", "b", "--scores", "add", "--implementations", "pyg"]
    assert run.main(options(tmp_path, *extra)) == 0
    rows = [row for row in read(tmp_path) if row["score"] == "add"]
    assert {row["status"] for row in rows} == {"WRONG"} and all(row["median_ms"] == "" for row in rows)
    assert "WRONG" in capsys.readouterr().out


def test_a_wrong_fused_op_fails_the_command(tmp_path, monkeypatch):
    class WrongFused(Fused):
        def prepare(self, case, graph, inputs):
            forward = super().prepare(case, graph, inputs)
            return lambda: forward() * 1.0001

    monkeypatch.setitem(IMPLEMENTATIONS, "fused", WrongFused)
    monkeypatch.setattr(WrongFused, "dtypes", (torch.float32,))
    extra = ["--graphs", "b", "--scores", "dot", "--implementations", "fused"]
    assert run.main(options(tmp_path, *extra)) == 1


def test_a_failure_is_a_row_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "pyg", _OutOfMemory)
    extra = ["--graphs", "b", "--scores", "dot", "--implementations", "pyg", "unfused"]
    assert run.main(options(tmp_path, *extra)) == 0
    status = {(row["implementation"], row["direction"]): row["status"] for row in read(tmp_path)}
    assert status["pyg", "fwd"].startswith("failed: OutOfMemoryError") and status["unfused", "fwd+bwd"] == "ok"


def test_command_times_all_layers_and_resumes(tmp_path, capsys):
    extra = ["--graphs", "b", "e", "--implementations", "fused", "pyg", "unfused"]
    assert run.main(options(tmp_path, *extra, "--limit-seconds", "0")) == 2
    run.main(options(tmp_path, *extra, "--scores", "dot"))
    first = read(tmp_path)
    run.main(options(tmp_path, *extra))
    rows = read(tmp_path)
    assert rows[: len(first)] == first and {row["score"] for row in rows} == {*SCORES, "graph"}
    run.main(options(tmp_path, *extra))
    assert read(tmp_path) == rows
    timed = [row for row in rows if row["status"] == "ok"]
    assert all(float(row["median_ms"]) > 0 and float(row["iqr_ms"]) >= 0 for row in timed)
    fused = {
        (row["direction"], row["state"]) for row in timed if row["implementation"] == "fused" and row["heads"] == "2"
    }
    assert {("fwd", "warm"), ("fwd", "flushed"), ("fwd+bwd", "warm"), ("fwd+bwd", "flushed"), ("bwd", "warm")} <= fused
    assert {row["direction"] for row in rows if row["score"] == "graph"} == {"csr", "csc"}
    assert run.main(["--summary", *options(tmp_path)]) in (0, 1)
    assert "| GT | H=2 d=8 | fwd | pyg | float32 |" in capsys.readouterr().out


def test_tables_take_the_last_row_and_judge_targets():
    names = {"heads": "1", "channels": "128", "dtype": "float32", "implementation": "fused", "state": "warm"}
    base = {"graph": "a", "score": "dot", "layer": "GT", "direction": "fwd", "status": "ok", "peak_mb": "", **names}
    rows = [{**base, "median_ms": "0.9"}, {**base, "median_ms": "0.42"}]
    table = tables.targets_table(rows)
    assert "| dot fwd float32 H=1 d=128 | a | 0.42 ms | 0.45 | 0.4 | 0.15 | reached | missed by 1.05x |" in table
    assert "0.42" in tables.times_table(rows) and "0.9" not in tables.times_table(rows)


def test_peak_memory_target():
    names = {"heads": "1", "channels": "128", "dtype": "float32", "implementation": "fused", "state": "warm"}
    row = {"graph": "c", "score": "dot", "layer": "GT", "direction": "fwd+bwd", "status": "ok", **names}
    table = tables.targets_table([{**row, "median_ms": "50", "peak_mb": "1500"}])
    assert "| 1500 MB | 1200.0 |  |  | missed by 1.25x |" in table


def test_targets_tighten_from_first_to_must_to_aim():
    for by_graph in TARGETS.values():
        for target in by_graph.values():
            assert target.aim < target.must < (target.first or float("inf"))
    assert verdict(1.0, None) == "" and verdict(1.0, 1.0) == "reached"


def test_timing_statistics():
    timing = Timing.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (timing.median_ms, timing.n) == (3.0, 5) and timing.iqr_ms > 0
    assert Timing.of([2.0]) == Timing(2.0, 0.0, 1)


def test_long_calls_are_repeated_less(monkeypatch):
    timer = Timer(CPU)
    monkeypatch.setattr(timer, "_samples", lambda call, repetitions, before, head_start=False: [900.0] * repetitions)
    assert timer.time(lambda: None).n == 5


def test_the_cache_is_flushed_before_each_repetition(monkeypatch):
    timer, order = Timer(CPU), []
    monkeypatch.setattr(timer, "flush_cache", lambda: order.append("flush"))
    timer.time(lambda: order.append("call"), flushed=True)
    assert order[-6:] == ["flush", "call"] * 3


def test_every_implementation_predicts_its_memory():
    graph, case = benchmark_graph("a", "cpu", small=True), AttentionCase("dot", 1, 8)
    for kind in IMPLEMENTATIONS.values():
        implementation: Implementation = kind()
        assert implementation.predicted_bytes(case, graph, True) >= implementation.predicted_bytes(case, graph, False)


def test_overhead_command(tmp_path, capsys):
    arguments = ["--small", "--device", "cpu", "--repetitions", "3", "--scores", "dot", "--out", str(tmp_path)]
    assert overhead.main(arguments) == 0
    assert "| GT | 8 | 16 | fwd+bwd |" in capsys.readouterr().out


def test_overhead_counts_and_repeats_launches(monkeypatch):
    from pyg_dfgnn.bench.prepare import Prepared
    from pyg_dfgnn.dispatch import attention as dispatch
    from pyg_dfgnn.runtime import launcher

    monkeypatch.setattr(dispatch, "fused_device_types", {"cpu"})
    graph = Prepared.of(benchmark_graph("b", "cpu", small=True))
    launched = []
    with launcher.override(lambda spec, entry, *rest: launched.append(entry)):
        rows = overhead.measure(AttentionCase("dot", 1, 8), graph, Timer(CPU), repetitions=2)
    assert [(row["what"], row["kernels"]) for row in rows] == [("launch", 1), ("fwd", 1), ("fwd+bwd", 3)]
    assert launched.count("attention_backward_sources") >= 3


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    extra = ["--graphs", "b", "--scores", "dot", "--implementations", "fused", "pyg"]
    run.main(options(tmp_path, *extra))
    (path,) = tmp_path.glob("*.csv")
    assert plots.main([str(path)]) == 0
    assert (
        all(png.read_bytes().startswith(b"\x89PNG") for png in tmp_path.glob("*.png"))
        and len(list(tmp_path.glob("*.png"))) == 2
    )
