"""Timing: configs compose, the gate comes first, what cannot run is listed, runs resume, figures follow from files."""

import csv
import re
import shlex
import shutil

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from pyg_dfgnn.bench import isolated, overhead, plots, run, tables
from pyg_dfgnn.bench.baselines import IMPLEMENTATIONS, CompiledPyG, Dgl, Flex, Fused, Implementation, PyG, Unfused
from pyg_dfgnn.bench.cases.attention import SCORES, AttentionCase, forward_backward
from pyg_dfgnn.bench.experiment import Experiment, expected_s
from pyg_dfgnn.bench.graphs import TABLE_1, BenchGraph, benchmark_graph
from pyg_dfgnn.bench.oracle import compare, float64_reference
from pyg_dfgnn.bench.prepare import rounded_problem
from pyg_dfgnn.bench.results import default_folder
from pyg_dfgnn.bench.targets import TARGETS, best_peer, peers, verdict
from pyg_dfgnn.bench.timing import Pace, Timer, Timing
from pyg_dfgnn.bench.traffic import compulsory_bytes, gathered_bytes
from pyg_dfgnn.paths import configs_dir
from pyg_dfgnn.settings import settings
from tests.kernels.emulated import emulated_device

CPU = torch.device("cpu")
CONFIGS = configs_dir() / "bench"
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
FIGURES = ["fig9", "fig10a", "fig10b", "fig11", "fig12", "fig13", "fig14", "fig15"]
QUICK = ["pace.sampling_ms=0", "pace.min_repetitions=3", "pace.max_repetitions=3", "device=cpu", "small=true"]


def composed(*overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return OmegaConf.to_container(compose("bench", list(overrides)), resolve=True, throw_on_missing=True)


def bench(tmp_path, *overrides):
    return run.run(composed(*QUICK, "sizes=[2x8]", f"folder={tmp_path}", *overrides))


def read(tmp_path):
    (path,) = tmp_path.glob("*/*.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_compose(name):
    experiment = Experiment.of(composed(f"experiment={name}"))
    assert experiment.name == name
    jobs = [job for graph in experiment.graphs for job in experiment.jobs(graph)]
    assert jobs and all(job.directions for job in jobs)
    assert 0 < sum(expected_s(list(experiment.jobs(graph)), experiment) for graph in experiment.graphs)


def test_the_figures_of_the_paper_are_all_there():
    assert set(FIGURES) <= set(EXPERIMENTS) and {"peers", "heads", "choice", "compile"} <= set(EXPERIMENTS)
    graphs = {name: Experiment.of(composed(f"experiment={name}")).graphs for name in FIGURES}
    assert graphs["fig9"] + graphs["fig10a"] + graphs["fig10b"] == TABLE_1
    assert graphs["fig15"] == graphs["fig9"]
    assert [graph.partition("@")[2] for graph in graphs["fig14"]] == "64 128 256 512 1024 2048".split()
    assert composed("experiment=fig15")["file"] == "fig9"


@pytest.mark.parametrize("file", ["README.md", "results/README.md"])
def test_commands_that_are_written_down_compose(file):
    text = (CONFIGS.parents[1] / file).read_text()
    commands = re.findall(r"python -m pyg_dfgnn\.bench ([^`#\n]*)", text)
    assert commands
    for command in commands:
        overrides = [word.split(",")[0] if "[" not in word else word for word in shlex.split(command) if word != "-m"]
        Experiment.of(composed(*(word for word in overrides if "<" not in word)))


def test_the_results_page_lists_every_experiment():
    text = (CONFIGS.parents[1] / "results" / "README.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", text, flags=re.MULTILINE)
    assert dict(listed) == {name: composed(f"experiment={name}")["file"] for name in EXPERIMENTS if name != "isolated"}


def test_fused_runs_under_each_schedule_and_baselines_once():
    experiment = Experiment.of(composed("experiment=fig9", "schedules=[auto,row_split]", "dtypes=[float32,bfloat16]"))
    jobs = [(job.implementation, job.schedule, job.dtype) for job in experiment.jobs("pattern_like")]
    assert jobs[:4] == [
        ("fused", "auto", "float32"),
        ("fused", "row_split", "float32"),
        ("unfused", "", "float32"),
        ("pyg", "", "float32"),
    ]
    assert jobs[4:6] == [("fused", "auto", "bfloat16"), ("fused", "row_split", "bfloat16")]
    assert len(jobs) == 3 * 6


@pytest.mark.parametrize(
    "override", ["graphs=[z]", "scores=[dott]", "directions=[up]", "schedules=[best]", "states=[cold]", "dtypes=[int8]"]
)
def test_unknown_names_are_refused(override):
    with pytest.raises(ValueError, match=override.split("=")[0]):
        Experiment.of(composed(override))


@pytest.mark.parametrize("size", ["1x", "8", "x16", "0x8", "1x128x2"])
def test_sizes_of_another_form_are_refused(size):
    with pytest.raises(ValueError, match=rf"'sizes' needs a list of heads x channels.*\(got '?{size}'?\)"):
        Experiment.of(composed(f"sizes=[{size}]"))


def test_results_of_a_gpu_alone_go_to_results():
    gpu = torch.device("cuda")
    assert default_folder("check", gpu).as_posix() == "results/check"
    assert {default_folder("check", *other).as_posix() for other in ((CPU,), (gpu, True))} == {"outputs/check"}
    assert Experiment.of(composed("device=cuda")).folder.as_posix() == "results/bench"
    assert Experiment.of(composed("device=cuda", "small=true")).folder.as_posix() == "outputs/bench"
    assert Experiment.of(composed("device=cpu")).folder.as_posix() == "outputs/bench"


def test_the_whole_set_is_expected_to_take_minutes():
    total = 0.0
    for name in FIGURES:
        experiment = Experiment.of(composed(f"experiment={name}"))
        if experiment.file == name:
            total += sum(expected_s(list(experiment.jobs(graph)), experiment) for graph in experiment.graphs)
    assert 30 < total < 900


@pytest.mark.parametrize("name", [*FIGURES, "heads", "choice"])
def test_a_tiny_version_of_each_experiment_runs_on_a_cpu(name, tmp_path, capsys):
    experiment = Experiment.of(composed(f"experiment={name}"))
    few = [f"graphs=[{','.join(experiment.graphs[:2])}]", f"scores=[{experiment.scores[0]}]", "sizes=[1x8,2x4]"]
    code = run.run(composed(f"experiment={name}", *QUICK, f"folder={tmp_path}", *few))
    rows = read(tmp_path)
    assert code == 0, [row["status"] for row in rows]
    assert {row["graph"] for row in rows} == set(experiment.graphs[:2])
    assert {row["direction"] for row in rows if row["score"] != "graph"} == set(experiment.directions)
    assert list(rows[0]) == run.FIELDS
    printed = capsys.readouterr().out
    assert f"{name}: " in printed and "about" in printed
    if name != "choice":
        (png,) = tmp_path.glob("*/*.png")
        assert png.stem == name and png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "implementation", [Fused(), PyG(), Unfused(), CompiledPyG("eager"), Dgl()], ids=lambda i: i.name
)
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
    assert Flex().reasons(case, graph, False, 141e9) == ["its mask needs 54 GB"]


@pytest.mark.parametrize("name", ["a", "c", "mnist_like"])
def test_flex_attention_agrees_with_float64(name):
    graph, case = benchmark_graph(name, "cpu", small=True), AttentionCase("dot", 2, 16)
    inputs, grad_out = rounded_problem(case, graph, [torch.float32])
    expected = {"out": float64_reference(case, graph, inputs, grad_out)["out"]}
    with torch.no_grad():
        actual = {"out": Flex(compiled=False).prepare(case, graph, inputs)()}
    assert compare(case, graph, actual, expected, grad_out).worst[1] < 3e-6


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


def test_a_wrong_implementation_gets_no_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(IMPLEMENTATIONS, "pyg", _Wrong)
    assert bench(tmp_path, "graphs=[b]", "scores=[add]", "implementations=[pyg]", "dtypes=[float32]") == 0
    rows = [row for row in read(tmp_path) if row["score"] == "add"]
    assert {row["status"] for row in rows} == {"WRONG"} and all(row["median_ms"] == "" for row in rows)
    assert "WRONG" in capsys.readouterr().out


def test_a_wrong_fused_op_fails_the_command(tmp_path, monkeypatch):
    class WrongFused(Fused):
        def prepare(self, case, graph, inputs):
            forward = super().prepare(case, graph, inputs)
            return lambda: forward() * 1.0001

    monkeypatch.setitem(IMPLEMENTATIONS, "fused", WrongFused)
    assert bench(tmp_path, "graphs=[b]", "scores=[dot]", "implementations=[fused]", "dtypes=[float32]") == 1


def test_16_bits_without_kernels_are_not_judged(tmp_path):
    assert bench(tmp_path, "graphs=[e]", "scores=[dot]", "implementations=[fused]", "dtypes=[bfloat16]") == 0
    rows = [row for row in read(tmp_path) if row["score"] == "dot"]
    assert {row["direction"] for row in rows} == {"fwd", "fwd+bwd", "bwd"}
    assert all(row["status"].startswith("not run: the reference rounds every step to 16 bits") for row in rows)


def test_a_failure_is_a_row_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "pyg", _OutOfMemory)
    assert bench(tmp_path, "graphs=[b]", "scores=[dot]", "implementations=[pyg,unfused]") == 0
    status = {(row["implementation"], row["direction"]): row["status"] for row in read(tmp_path)}
    assert status["pyg", "fwd"].startswith("failed: OutOfMemoryError") and status["unfused", "fwd+bwd"] == "ok"


def test_what_cannot_run_needs_no_reference(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_reference", None)
    assert bench(tmp_path, "graphs=[b]", "scores=[gatv2]", "implementations=[flex,unfused]", "dtypes=[float32]") == 0
    rows = [row for row in read(tmp_path) if row["score"] == "gatv2"]
    assert {(row["implementation"], row["direction"]) for row in rows} == {
        (name, direction) for name in ("flex", "unfused") for direction in ("fwd", "fwd+bwd")
    }
    assert all(row["status"].startswith("not run: ") for row in rows)


def test_a_run_times_all_layers_and_resumes(tmp_path, capsys):
    extra = ["graphs=[b,e]", "implementations=[fused,pyg,unfused]"]
    assert bench(tmp_path, *extra, "limit_s=0") == 2
    bench(tmp_path, *extra, "scores=[dot]", "directions=[fwd]")
    first = read(tmp_path)
    bench(tmp_path, *extra)
    rows = read(tmp_path)
    assert rows[: len(first)] == first and {row["score"] for row in rows} == {*SCORES, "graph"}
    # What was timed forward alone is completed, not repeated.
    of_first = [r for r in rows[len(first) :] if (r["graph"], r["score"], r["implementation"]) == ("b", "dot", "fused")]
    assert {row["direction"] for row in of_first} == {"fwd+bwd", "bwd"}
    bench(tmp_path, *extra)
    assert read(tmp_path) == rows
    timed = [row for row in rows if row["status"] == "ok"]
    assert all(float(row["median_ms"]) > 0 and float(row["iqr_ms"]) >= 0 for row in timed)
    fused = {(row["direction"], row["state"]) for row in timed if row["implementation"] == "fused"}
    assert {("fwd", "warm"), ("fwd", "flushed"), ("fwd+bwd", "warm"), ("fwd+bwd", "flushed"), ("bwd", "warm")} <= fused
    assert {row["direction"] for row in rows if row["score"] == "graph"} == {"csr", "csc"}
    assert bench(tmp_path, "summary=true") == 0
    assert "| GT | H=2 d=8 | fwd | PyG | float32 |" in capsys.readouterr().out


def test_rows_of_other_sources_are_measured_again(tmp_path, monkeypatch):
    extra = ["graphs=[b]", "scores=[dot]", "directions=[fwd]", "dtypes=[float32]", "implementations=[fused,pyg]"]
    bench(tmp_path, *extra)
    first = read(tmp_path)
    (environment,) = [run.environment]
    monkeypatch.setattr(run, "environment", lambda device: {**environment(device), "digest": "changed"})
    bench(tmp_path, *extra)
    assert {row["implementation"] for row in read(tmp_path)[len(first) :]} == {"fused"}


def test_schedules_that_run_are_recorded_for_each_walk(tmp_path):
    extra = ["graphs=[b]", "scores=[dot]", "dtypes=[float32]", "implementations=[fused]", "schedules=[row_split]"]
    with emulated_device():
        assert bench(tmp_path, *extra, "directions=[fwd,fwd+bwd,forward,targets,sources]", "states=[warm]") == 0
    rows = [row for row in read(tmp_path) if row["score"] == "dot"]
    assert {row["direction"] for row in rows if row["status"] == "ok"} == {
        "fwd", "fwd+bwd", "forward", "targets", "sources",
    }  # fmt: skip
    for row in rows:
        assert [row[f"{walk}_schedule"] for walk in run.WALKS] == ["row_split"] * 3
        assert float(row["gathered_mb"]) > 0


def test_a_schedule_that_cannot_run_is_listed(tmp_path, monkeypatch):
    class Refusing(Fused):
        def prepare(self, case, graph, inputs):
            raise run.UnsupportedError(["rows are too long", "no batch"])

    monkeypatch.setitem(IMPLEMENTATIONS, "fused", Refusing)
    bench(tmp_path, "graphs=[b]", "scores=[dot]", "directions=[fwd]", "dtypes=[float32]", "implementations=[fused]")
    (row,) = [row for row in read(tmp_path) if row["score"] == "dot"]
    assert row["status"] == "not run: rows are too long; no batch"


ISOLATED = [
    "graphs=[b]", "scores=[dot]", "directions=[fwd]", "dtypes=[float32]", "implementations=[pyg]", "states=[warm]",
    "isolated.implementations=[pyg]", "isolated.min_edges=0",
]  # fmt: skip


def test_a_process_of_its_own_hands_its_rows_back(tmp_path):
    assert bench(tmp_path, *ISOLATED, "isolated.limit_s=120") == 0
    rows = [row for row in read(tmp_path) if row["score"] == "dot"]
    assert [(row["status"], row["direction"], row["experiment"]) for row in rows] == [("ok", "fwd", "peers")]


def test_a_process_that_does_not_come_back_is_ended(tmp_path):
    assert bench(tmp_path, *ISOLATED, "isolated.limit_s=0.2") == 0
    (row,) = [row for row in read(tmp_path) if row["score"] == "dot"]
    assert row["status"] == "no result within 0.2 s" and row["median_ms"] == ""


def test_a_process_that_fails_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(isolated, "command", lambda *_: ["sh", "-c", "echo out of luck; exit 3"])
    assert bench(tmp_path, *ISOLATED, "isolated.limit_s=60") == 0
    (row,) = [row for row in read(tmp_path) if row["score"] == "dot"]
    assert row["status"] == "failed: process ended with 3: out of luck"


def test_isolated_jobs_can_be_left_to_another_experiment(tmp_path):
    assert bench(tmp_path, *ISOLATED, "isolated.limit_s=0") == 0
    assert not list(tmp_path.glob("*/*.csv"))


def timed_row(**columns):
    names = {name: "" for name in run.FIELDS}
    base = dict(graph="a", score="dot", layer="GT", heads="1", channels="128", dtype="float32", gpu="some GPU")
    base.update(implementation="fused", schedule="auto", direction="fwd", state="warm", status="ok", iqr_ms="0.01")
    base.update(utilisation="0.5", gather_roof="0.4", forward_schedule="row_split", targets_schedule="row_split")
    return {**names, **base, "sources_schedule": "row_split", **columns}


def test_tables_take_the_last_row_and_judge_targets():
    rows = [timed_row(median_ms="0.9"), timed_row(median_ms="0.29")]
    table = tables.targets_table(rows)
    expected = "| 0.29 ms | 0.4 | 0.28 | 0.15 | reached | missed by 1.04x | missed by 1.93x |"
    assert f"| dot fwd float32 H=1 d=128 | a {expected}" in table
    assert "0.29" in tables.times_table(rows) and "0.9" not in tables.times_table(rows)


def test_peak_memory_target():
    table = tables.targets_table([timed_row(graph="c", direction="fwd+bwd", median_ms="50", peak_mb="1500")])
    assert "| 1500 MB | 1200.0 |  |  | missed by 1.25x |" in table


def test_targets_tighten():
    for by_graph in TARGETS.values():
        for target in by_graph.values():
            assert target.aim < target.must and (target.release or 0) <= target.must
    assert verdict(1.0, None) == "" and verdict(1.0, 1.0) == "reached"


def test_peers_stand_beside_our_rows():
    key = ("add", 1, 128, "float32", "fwd")
    # The fastest on (c) was wrong.
    assert best_peer(key, "c").name == "DF-GNN hyper_recompute" and best_peer(key, "c").time_ms == 15.55
    assert best_peer(("dot", 1, 128, "bfloat16", "fwd"), "a").name == "Fused3S permuteV"
    assert any(peer.time_ms == 13.53 and not peer.is_right for peer in peers())
    assert {peer.graph for peer in peers()} == set("abcde") and all(peer.time_ms > 0 for peer in peers())
    table = tables.peers_table([timed_row(score="add", layer="GAT", graph="c", median_ms="7.775")])
    assert "| GAT | H=1 d=128 | fwd | float32 | c | 7.775 | 15.55 | DF-GNN hyper_recompute | 2.00x |" in table


def test_speedups_and_their_geometric_means():
    rows = []
    for graph, ours, unfused in (("mnist_like", 1, 4), ("pattern_like", 1, 9), ("cora", 2, 2)):
        rows.append(timed_row(graph=graph, median_ms=str(ours)))
        rows.append(timed_row(graph=graph, implementation="unfused", schedule="", median_ms=str(unfused)))
    assert tables.speedups(rows)["GT", "H=1 d=128", "fwd", "pattern_like", "ours"] == 9
    slow_host = [{**row, "host_us": "8000"} if row["implementation"] == "fused" else row for row in rows]
    assert tables.speedups(slow_host, with_host=True)["GT", "H=1 d=128", "fwd", "mnist_like", "ours"] == 0.5
    table = tables.means_table(rows)
    assert "| GT | fwd | ours | 6.00x (2 of 6, reached) | 1.00x (1 of 6, missed by 3.00x) | 3.30x (3 of 12) |" in table
    assert "1.00x (cora)" in table and "| 9.00x |" in tables.speedup_table(rows)


def test_heads_and_ablation():
    rows = [timed_row(median_ms="1.0"), timed_row(heads="8", channels="16", median_ms="1.2")]
    rows += [timed_row(implementation="pyg", heads="8", channels="16", median_ms="9")]
    assert "| 1.200 | missed |" in tables.heads_table(rows) and "9.000" not in tables.heads_table(rows)
    steps = [timed_row(schedule=name, median_ms=ms) for name, ms in (("plain", "2"), ("better", "1.6"))]
    assert "| a | 2 ms, 1.000x | 1.6 ms, 1.250x |" in tables.ablation_table(steps)


def test_eager_and_replayed_forward_of_a_small_graph():
    rows = [
        timed_row(graph="b", median_ms="0.02", host_us="30"),
        timed_row(graph="b", state="replay", median_ms="0.004"),
    ]
    table = tables.targets_table(rows)
    assert "eager | b | 0.03 ms | 0.025 | 0.025 |  | missed by 1.20x | missed by 1.20x |  |" in table
    assert "replay | b | 0.004 ms | 0.005 | 0.005 |  | reached | reached |  |" in table


def test_baselines_that_are_faster_are_listed():
    rows = [timed_row(median_ms="2"), timed_row(median_ms="1", implementation="flex", schedule="")]
    assert "| a | GT | H=1 d=128 | fwd | FlexAttention | 2.00x |" in tables.slower_table(rows)
    assert tables.slower_table(rows[:1]) == "Nowhere."


def test_the_faster_fusion_is_compared_with_the_paper():
    times = {("mnist_like", "smmf"): 1, ("mnist_like", "pmf"): 2, ("reddit_like", "smmf"): 3, ("reddit_like", "pmf"): 4}
    rows = [timed_row(graph=graph, schedule=name, median_ms=str(ms)) for (graph, name), ms in times.items()]
    table = tables.rivals_table(rows)
    assert (
        "| mnist_like | 1 | 2 | smmf | smmf: same |" in table and "| reddit_like | 3 | 4 | smmf | pmf: other |" in table
    )


def choice_rows():
    times = {
        "row_split": (1.0, 2.0, 3.0),
        "pmf": (0.9, 4.0, 1.0),
        "smmf": (2.0, 1.0, 1.5),
    }
    auto = dict(forward_schedule="row_split", targets_schedule="row_split", sources_schedule="row_split")
    return [
        timed_row(schedule=schedule, direction=walk, median_ms=str(ms), **(auto if schedule == "auto" else {}))
        for schedule, each in {"auto": (9, 9, 9), **times}.items()
        for walk, ms in zip(run.WALKS, each)
    ]


def test_choices_are_judged_by_the_times_of_their_passes():
    found = tables.choices(choice_rows())
    forward, backward = (found["a", "GT", "H=1 d=128", "float32", way] for way in ("forward", "backward"))
    assert forward.best == ("pmf",) and forward.loss == pytest.approx(1 / 0.9 - 1)
    # smmf and pmf hand over from one pass to the next: 1.0 + 1.0 of both together is no pair.
    assert backward.totals == {("row_split", "row_split"): 5, ("pmf", "pmf"): 5, ("smmf", "smmf"): 2.5}
    assert (
        backward.taken == ("row_split", "row_split") and backward.loss == pytest.approx(1.0) and backward.own_ms == 18
    )
    table = tables.choice_table(choice_rows())
    assert table.startswith("2 choices, 2 lose more than 5 %, 0 not measured")
    assert "| backward | row_split | smmf | 100.0 % | 18 | row_split 5, pmf 5, smmf 2.5 |" in table


def test_passes_that_another_forward_pass_changes_are_judged_by_their_own_time():
    rows = [{**row, "score": "add", "layer": "GAT"} for row in choice_rows()]
    assert tables.choices(rows)["a", "GAT", "H=1 d=128", "float32", "backward"].taken_ms == 5
    for row in rows:
        if row["schedule"] == "auto":
            row["forward_schedule"] = "pmf"
    backward = tables.choices(rows)["a", "GAT", "H=1 d=128", "float32", "backward"]
    assert backward.taken_ms == backward.own_ms == 18 and backward.loss == pytest.approx(18 / 2.5 - 1)


def test_a_pass_that_needs_a_slower_forward_counts_it():
    """`row_split` over targets reads what a forward by `row_split` leaves, here 0.1 ms slower than that by `pmf`."""
    rows = [{**row, "score": "add", "layer": "GAT", "forward_schedule": "pmf"} for row in choice_rows()]
    totals = tables.choices(rows)["a", "GAT", "H=1 d=128", "float32", "backward"].totals
    assert totals == {("row_split", "row_split"): pytest.approx(5.1), ("pmf", "pmf"): 5, ("smmf", "smmf"): 2.5}


def test_figures_and_page_follow_from_files_alone(tmp_path):
    graphs = [*TABLE_1[:2], "pattern_like@64", "pattern_like@128"]
    base = [timed_row(graph=g, median_ms="2", implementation=i, schedule=s) for g in graphs
            for i, s in (("fused", "auto"), ("fused", "paper"), ("unfused", ""), ("pyg", ""))]  # fmt: skip
    for name in plots.FIGURES:
        rows = choice_rows() if name == "choice" else [r for r in base if ("@" in r["graph"]) == (name == "fig14")]
        if name == "peers":
            rows = [*rows, *({**row, "heads": "8", "channels": "16"} for row in rows)]
        if name not in plots.ALIASES:
            run.Table(tmp_path / f"{name}.csv", run.FIELDS).append(rows)
    shutil.copy(tmp_path / "fig12.csv", tmp_path / "mine.csv")
    assert plots.main([str(tmp_path)]) == 0
    pngs = {path.stem: path.read_bytes()[:4] for path in tmp_path.glob("*.png")}
    assert set(pngs.values()) == {b"\x89PNG"}
    assert set(pngs) == {f"{n}{suffix}" for n, all_ in plots.FIGURES.items() for suffix in all_} | {"mine"}
    page = (tmp_path / "README.md").read_text()
    assert all(f"![{stem}]({stem}.png)" in page for stem in pngs)
    assert "The 2 data sets together" in page and "| GT | fwd | ours | 1.00x (2 of 6" in page


def test_nothing_timed_draws_nothing(tmp_path):
    assert plots.draw("fig9", [timed_row(status="failed: luck", state="")], tmp_path) == []


def test_traffic_of_a_graph_transformer():
    graph, case = benchmark_graph("e", "cpu"), AttentionCase("dot", 1, 128)
    nodes, edges = graph.num_dst, graph.num_edges
    forward = 4 * nodes * 128 * 4 + 4 * edges + 4 * nodes
    assert compulsory_bytes(case, graph, "fwd") == compulsory_bytes(case, graph, "forward") == forward
    assert compulsory_bytes(case, graph, "fwd+bwd") == 3 * forward
    assert gathered_bytes(case, graph, "fwd") == 2 * edges * (512 + 4)
    assert gathered_bytes(case, graph, "fwd+bwd", 2) == 6 * edges * (256 + 4)
    walks = sum(gathered_bytes(case, graph, walk) for walk in run.WALKS)
    assert walks == gathered_bytes(case, graph, "fwd+bwd")
    for score in SCORES:
        wide = AttentionCase(score, 8, 16)
        passes = compulsory_bytes(wide, graph, "targets") + compulsory_bytes(wide, graph, "sources")
        assert compulsory_bytes(wide, graph, "bwd") <= 1.01 * passes


def test_timing_statistics():
    timing = Timing.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (timing.median_ms, timing.n) == (3.0, 5) and timing.iqr_ms > 0
    assert Timing.of([2.0]) == Timing(2.0, 0.0, 1)


def test_long_calls_are_repeated_less():
    pace = Pace(min_repetitions=20, max_repetitions=100, sampling_ms=250, long_call_ms=500, long_call_repetitions=5)
    assert [pace.repetitions(ms) for ms in (0.0, 1.0, 5.0, 100.0, 501.0)] == [100, 100, 50, 20, 5]


def test_passes_are_marked_apart():
    from pyg_dfgnn.runtime import launcher
    from pyg_dfgnn.runtime.compiler import Spec

    def call():
        for path in ("norm", "pmf_forward", "pmf_forward", "backward_nodes", "block_mma_backward_sources"):
            launcher.launch(launcher.Kernel(Spec(f"attention/{path}.cu", ()), path), (1, 1, 1), (1, 1, 1), (), CPU)

    launched = []
    with launcher.override(lambda spec, entry, *rest: launched.append(entry)):
        timings = Timer(CPU, Pace(4, 4)).walks(call)
    assert set(timings) == set(run.WALKS) and all(timing.n == 4 for timing in timings.values())
    assert launched.count("pmf_forward") == 2 * launched.count("norm")


def test_the_cache_is_flushed_before_each_repetition(monkeypatch):
    timer, order = Timer(CPU, Pace(3, 3)), []
    monkeypatch.setattr(timer, "flush_cache", lambda: order.append("flush"))
    timer.time(lambda: order.append("call"), flushed=True)
    assert order[-6:] == ["flush", "call"] * 3


def test_every_implementation_predicts_its_memory():
    graph, case = benchmark_graph("a", "cpu", small=True), AttentionCase("dot", 1, 8)
    for kind in IMPLEMENTATIONS.values():
        implementation: Implementation = kind()
        assert implementation.predicted_bytes(case, graph.num_edges, True) >= implementation.predicted_bytes(
            case, graph.num_edges, False
        )


def test_overhead_command(tmp_path, capsys):
    arguments = [
        "--small",
        "--device",
        "cpu",
        "--repetitions",
        "3",
        "--scores",
        "dot",
        "--out",
        str(tmp_path),
        "--graphs",
        "b",
    ]
    assert overhead.main(arguments) == 0
    (path,) = tmp_path.iterdir()
    printed = capsys.readouterr().out
    assert "| b | GT | 8 | 16 | conv fwd+bwd | 5 |" in printed and str(path) in printed
    assert path.name.endswith("-small-overhead.csv")


@pytest.mark.parametrize("score", overhead.SCORES)
def test_overhead_counts_and_repeats_launches(score):
    from pyg_dfgnn.bench.prepare import Prepared
    from pyg_dfgnn.runtime import launcher

    settings(schedule="row_split")
    graph = Prepared.of(benchmark_graph("b", "cpu", small=True))
    launched = []
    with overhead.fused_anywhere(CPU), launcher.override(lambda spec, entry, *rest: launched.append(entry)):
        rows = overhead.measure(AttentionCase(score, 1, 8), graph, Timer(CPU), repetitions=2)
    # On a graph as small as this the forward pass finds the norms of the cosine score.
    expected = {"launch": 1, "torch product": 1, "fwd": 1, "fwd+bwd": 3}
    # GATConv also makes the terms of its nodes, and those with several projections of few nodes make them by a kernel.
    more = int(score != "cosine")
    expected |= {"conv fwd": expected["fwd"] + more, "conv fwd+bwd": expected["fwd+bwd"] + 2 * more}
    expected |= {f"{what}, grad": expected[what] for what in ("fwd", "conv fwd")}
    assert {row["what"]: row["kernels"] for row in rows} == expected
    assert launched.count("attention_backward_sources") >= 3
