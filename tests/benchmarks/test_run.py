"""Timing: configs compose, the gate comes first, what cannot run is listed, runs resume, figures follow from files."""

import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import CONFIGS, isolated, plots, run, table2, tables
from benchmarks.case import Fused, rounded_problem
from benchmarks.cases.attention import (
    ATTENTION,
    LAYERS,
    AttentionCase,
    CompiledPyGAttention,
    Flex,
    PyGAttention,
    Unfused,
)
from benchmarks.graphs import TABLE_1, benchmark_graph
from benchmarks.loops.run import cases_of
from benchmarks.results import default_folder
from benchmarks.timing import Pace, Timer, Timing
from pyg_dfgnn.errors import UnsupportedError
from pyg_dfgnn.reference.zoo import EdgeList
from tests.benchmarks import isolated_work
from tests.benchmarks.quick import QUICK, composed, read, results
from tests.configs import compose
from tests.covering import extended
from tests.kernels.emulated import emulated_device
from tests.processes import CONTEXT

CPU = torch.device("cpu")
FILES = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
EXPERIMENTS = [name for name in FILES if name != "loops"]
NO_COMPILE = "implementations=[fused,unfused,pyg]"
FIGURES = ["fig9", "fig10a", "fig10b", "fig11", "fig12", "fig13", "fig14"]


def bench(tmp_path, *overrides):
    return run.run(composed(*QUICK, "sizes=[2x8]", f"folder={tmp_path}", *overrides))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_compose(name):
    experiment = run.Experiment.of(composed(f"experiment={name}"))
    assert experiment.name == name
    jobs = [job for graph in experiment.graphs for job in experiment.jobs(graph)]
    assert jobs


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("smal=true", "ConfigCompositionException: Could not override 'smal'; did you mean small? (HYDRA_FULL"),
        ("experiment=fig99", "did you mean experiment=fig9 or"),
        ("ops=[dt]", "ValueError: 'ops' needs one of 'dot', "),
    ],
)
def test_a_wrong_option_is_one_message(word, said):
    done = subprocess.run([sys.executable, "-m", "benchmarks", word], capture_output=True, text=True)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_the_figures_of_the_paper_are_all_there():
    assert set(FIGURES) <= set(EXPERIMENTS) and {"peers", "compile"} <= set(EXPERIMENTS)
    graphs = {name: run.Experiment.of(composed(f"experiment={name}")).graphs for name in FIGURES}
    assert graphs["fig9"] + graphs["fig10a"] + graphs["fig10b"] == TABLE_1
    assert [graph.partition("@")[2] for graph in graphs["fig14"]] == "64 128 256 512 1024 2048".split()


@pytest.mark.parametrize("file", ["docs/measurements.md", "docs/paper.md", "results/README.md"])
def test_commands_that_are_written_down_compose(file):
    text = (CONFIGS.parents[1] / file).read_text()
    commands = re.findall(r"python -m benchmarks(\.table2|)(?![.\w])([^`#\n]*)", text)
    assert commands
    for module, command in commands:
        overrides = [word.split(",")[0] if "[" not in word else word for word in shlex.split(command) if word != "-m"]
        if module:
            cfg = compose.composed(table2.CONFIGS, "table2", *overrides)
            assert cfg.model.get("dropout", 0.0) == 0.0 and cfg.model.hidden_channels == 128
            continue
        config = composed(*(word for word in overrides if "<" not in word))
        assert cases_of(config) if "loops" in config else run.Experiment.of(config)


def test_the_results_page_lists_every_experiment():
    text = (CONFIGS.parents[1] / "results" / "README.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", text, flags=re.MULTILINE)
    assert dict(listed) == {name: composed(f"experiment={name}")["file"] for name in FILES}


def test_fused_runs_under_each_schedule_and_baselines_once():
    experiment = run.Experiment.of(
        composed(
            "experiment=fig9", "schedules=[auto,row_split]", "dtypes=[float32,bfloat16]", "directions=[fwd]", NO_COMPILE
        )
    )
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
    "override",
    ["graphs=[z]", "ops=[dott]", "directions=[up]", "schedules=[best]", "states=[cold]", "dtypes=[int8]"]
    + [f"sizes=[{size}]" for size in ("1x", "8", "x16", "0x8", "1x128x2")],
)
def test_unknown_names_and_sizes_of_another_form_are_refused(override):
    name, _, value = override.partition("=")
    with pytest.raises(ValueError, match=rf"'{name}' needs .*\(got '?{value[1:-1]}'?\)"):
        run.Experiment.of(composed(override))


def test_results_of_a_gpu_alone_go_to_results():
    gpu = torch.device("cuda")
    assert default_folder("table2", gpu).as_posix() == "results/table2"
    assert {default_folder("table2", *other).as_posix() for other in ((CPU,), (gpu, True))} == {"outputs/table2"}
    assert run.Experiment.of(composed("device=cuda")).folder.as_posix() == "results/bench"
    assert run.Experiment.of(composed("device=cuda", "small=true")).folder.as_posix() == "outputs/bench"
    assert run.Experiment.of(composed("device=cpu")).folder.as_posix() == "outputs/bench"


@pytest.mark.parametrize("name", extended(["fig9", "fig12"], sorted({*FIGURES} - {"fig9", "fig12"})))
def test_a_tiny_version_of_each_experiment_runs_on_a_cpu(name, tmp_path, capsys):
    experiment = run.Experiment.of(composed(f"experiment={name}"))
    few = [f"graphs=[{','.join(experiment.graphs[:2])}]", f"ops=[{experiment.ops[0]}]", "sizes=[1x8,2x4]"]
    # Compilation takes seconds.
    few += [NO_COMPILE] if "compile" in experiment.implementations else []
    code = run.run(composed(f"experiment={name}", *QUICK, f"folder={tmp_path}", *few))
    rows = read(tmp_path)
    assert code == 0, [row["status"] for row in rows]
    assert {row["graph"] for row in rows} == set(experiment.graphs[:2])
    assert {row["direction"] for row in rows if row["op"] != "graph"} == set(experiment.directions)
    assert list(rows[0]) == run.FIELDS
    printed = capsys.readouterr().out
    assert f"{name}: " in printed
    # The reference was timed, which says nothing about the kernels.
    assert (
        "is the reference in plain torch" in printed and "faster" not in printed and not list(tmp_path.glob("*/*.png"))
    )


@pytest.mark.parametrize(
    "implementation", [Fused(), PyGAttention(), Unfused(), CompiledPyGAttention("eager")], ids=lambda i: i.name
)
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("score", LAYERS)
def test_implementations_agree_with_float64(implementation, heads, score):
    graph, case = benchmark_graph("c", "cpu", small=True), AttentionCase(score, f"{heads}x16")
    reasons = implementation.reasons(case, graph)
    if reasons:
        pytest.skip("; ".join(reasons))
    name, error = results(implementation, case, graph)[2].worst
    assert error < 3e-6, f"{name}: {error:.2e}"


class _ManyEdges(EdgeList):
    num_edges = 115_842_382


def test_a_mask_that_cannot_fit_is_a_reason():
    graph = _ManyEdges("c", torch.zeros(2, 1, dtype=torch.long), 232_965, 232_965)
    case = AttentionCase("dot", "1x128")
    assert Flex().reasons(case, graph) == ["its mask needs 54 GB"]


@pytest.mark.parametrize("name", ["a", "c", "mnist_like"])
def test_flex_attention_agrees_with_float64(name):
    graph, case = benchmark_graph(name, "cpu", small=True), AttentionCase("dot", "2x16")
    inputs, grad_out = rounded_problem(case, graph, "float32")
    expected = {"out": case.reference(graph, inputs, grad_out)["out"]}
    with torch.no_grad():
        actual = {"out": Flex(compiled=False).prepare(case, graph, inputs)()}
    assert case.errors(graph, actual, expected, grad_out).worst[1] < 3e-6


def test_reasons_are_sentences():
    graph = benchmark_graph("b", "cpu", small=True)
    assert PyGAttention().reasons(AttentionCase("cosine", "8x16"), graph) == ["AGNNConv has one head"]
    assert "SDDMM" in Unfused().reasons(AttentionCase("gatv2", "1x16"), graph)[0]


@pytest.mark.parametrize("kind", [PyGAttention, Fused])
def test_a_wrong_implementation_gets_no_time(kind, tmp_path, monkeypatch, capsys):
    """A wrong one of ours fails the command."""

    class Wrong(kind):
        def prepare(self, case, graph, inputs):
            forward = super().prepare(case, graph, inputs)
            return lambda: forward() * (1.01 if kind is PyGAttention else 1.0001)

    monkeypatch.setitem(ATTENTION.implementations, kind.name, Wrong)
    options = ["graphs=[b]", "ops=[add]", f"implementations=[{kind.name}]", "dtypes=[float32]"]
    assert bench(tmp_path, *options) == (kind is Fused)
    rows = [row for row in read(tmp_path) if row["op"] == "add"]
    assert {row["status"] for row in rows} == {"WRONG"} and all(row["median_ms"] == "" for row in rows)
    assert "WRONG" in capsys.readouterr().out


def test_16_bits_without_kernels_are_not_judged(tmp_path):
    assert bench(tmp_path, "graphs=[e]", "ops=[dot]", "implementations=[fused]", "dtypes=[bfloat16]") == 0
    rows = [row for row in read(tmp_path) if row["op"] == "dot"]
    assert {row["direction"] for row in rows} == {"fwd", "fwd+bwd", "bwd"}
    assert all(row["status"].startswith("not run: the reference rounds every step to 16 bits") for row in rows)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("index out of range"), "failed: RuntimeError: index out of range"),
        (UnsupportedError(["rows are too long", "no batch"]), "not run: rows are too long; no batch"),
        (torch.OutOfMemoryError("tried to allocate 240 GB"), "not run: out of memory"),
    ],
    ids=["failed", "not run", "out of memory"],
)
def test_a_failure_is_a_row_and_the_run_goes_on(error, status, tmp_path, monkeypatch):
    class Failing(PyGAttention):
        def prepare(self, case, graph, inputs):
            raise error

    monkeypatch.setitem(ATTENTION.implementations, "pyg", Failing)
    assert bench(tmp_path, "graphs=[b]", "ops=[dot]", "implementations=[pyg,unfused]") == 0
    listed = {(row["implementation"], row["direction"]): row["status"] for row in read(tmp_path)}
    assert listed["pyg", "fwd"] == status and listed["unfused", "fwd+bwd"] == "ok"


def test_what_cannot_run_needs_no_reference(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "rounded_problem", None)
    assert bench(tmp_path, "graphs=[b]", "ops=[gatv2]", "implementations=[flex,unfused]", "dtypes=[float32]") == 0
    rows = [row for row in read(tmp_path) if row["op"] == "gatv2"]
    assert {(row["implementation"], row["direction"]) for row in rows} == {
        (name, direction) for name in ("flex", "unfused") for direction in ("fwd", "fwd+bwd")
    }
    assert all(row["status"].startswith("not run: ") for row in rows)


def test_a_run_times_all_layers_and_resumes(tmp_path, capsys):
    extra = ["graphs=[b,e]", "implementations=[fused,pyg,unfused]"]
    assert bench(tmp_path, *extra, "limit_s=0") == 2
    bench(tmp_path, *extra, "ops=[dot]", "directions=[fwd]")
    first = read(tmp_path)
    bench(tmp_path, *extra)
    rows = read(tmp_path)
    key = [tuple(row[name] for name in tables.NAMES) for row in rows]
    assert (
        rows[: len(first)] == first and len(set(key)) == len(rows) and {row["op"] for row in rows} == {*LAYERS, "graph"}
    )
    # What was timed forward alone is completed, not repeated.
    of_first = [r for r in rows[len(first) :] if (r["graph"], r["op"], r["implementation"]) == ("b", "dot", "fused")]
    assert {row["direction"] for row in of_first} == {"fwd+bwd", "bwd"}
    bench(tmp_path, *extra)
    assert read(tmp_path) == rows
    timed = [row for row in rows if row["status"] == "ok"]
    assert all(float(row["median_ms"]) > 0 and float(row["iqr_ms"]) >= 0 for row in timed)
    fused = {(row["direction"], row["state"]) for row in timed if row["implementation"] == "fused"}
    assert {("fwd", "warm"), ("fwd", "flushed"), ("fwd+bwd", "warm"), ("fwd+bwd", "flushed"), ("bwd", "warm")} <= fused
    assert {row["direction"] for row in rows if row["op"] == "graph"} == {"csr", "csc"}
    assert bench(tmp_path, "summary=true") == 0
    assert "| GT | 2x8 | fwd | PyG |" in capsys.readouterr().out


@pytest.mark.parametrize(("op", "size", "ours"), [("dot", "2x8", "fused"), ("rgcn", "1x4", "hector")])
def test_rows_of_other_sources_are_measured_again(tmp_path, monkeypatch, op, size, ours):
    names = ["graphs=[b]", f"ops=[{op}]", f"sizes=[{size}]", f"implementations=[{ours},pyg]"]
    extra = [*names, "directions=[fwd]", "dtypes=[float32]"]
    bench(tmp_path, *extra)
    first = read(tmp_path)
    (environment,) = [run.environment]
    monkeypatch.setattr(run, "environment", lambda device: {**environment(device), "digest": "changed"})
    bench(tmp_path, *extra)
    rows = read(tmp_path)
    # New rows take the place of earlier ones; those of baselines stay.
    assert len(rows) == len(first)
    assert {row["digest"] for row in rows if row["implementation"] == ours and row["op"] == op} == {"changed"}
    assert [row for row in rows if row["implementation"] == "pyg"] == [r for r in first if r["implementation"] == "pyg"]


def test_schedules_that_run_are_recorded_for_each_direction(tmp_path):
    extra = ["graphs=[b]", "ops=[dot]", "dtypes=[float32]", "implementations=[fused]", "schedules=[row_split]"]
    with emulated_device():
        assert bench(tmp_path, *extra, "directions=[fwd,fwd+bwd,bwd]", "states=[warm]") == 0
    rows = [row for row in read(tmp_path) if row["op"] == "dot"]
    assert {row["direction"] for row in rows if row["status"] == "ok"} == {"fwd", "fwd+bwd", "bwd"}
    for row in rows:
        assert row["ran"] == "forward=row_split targets=row_split sources=row_split"
        assert float(row["compulsory_mb"]) > 0


ISOLATED = [
    "graphs=[b]", "ops=[dot]", "directions=[fwd]", "dtypes=[float32]", "implementations=[pyg]", "states=[warm]",
    "isolated.implementations=[pyg]", "isolated.min_edges=0",
]  # fmt: skip


@pytest.mark.parametrize(
    ("limit_s", "work", "status"),
    [
        (120, run.rows_of_job, "ok"),
        (0.001, run.rows_of_job, "no result within 0.001 s"),
        (60, isolated_work.exits, "failed: process ended with 3"),
    ],
    ids=["in time", "too late", "ended"],
)
def test_a_process_of_its_own_hands_its_rows_back(limit_s, work, status, tmp_path, monkeypatch):
    if status != "ok":
        # One process is a fresh one.
        monkeypatch.setattr(isolated, "multiprocessing", SimpleNamespace(get_context=lambda _: CONTEXT))
    monkeypatch.setattr(run, "rows_of_job", work)
    assert bench(tmp_path, *ISOLATED, f"isolated.limit_s={limit_s}") == 0
    (row,) = [row for row in read(tmp_path) if row["op"] == "dot"]
    assert (row["status"], row["direction"], row["experiment"]) == (status, "fwd", "peers")
    assert bool(row["median_ms"]) == (status == "ok")


def test_signs_of_life_are_no_results():
    assert list(isolated.results(isolated_work.counts, (3,), 60.0)) == [1, 2]


def test_isolated_jobs_can_be_left_to_another_experiment(tmp_path):
    assert bench(tmp_path, *ISOLATED, "isolated.limit_s=0") == 0
    assert not list(tmp_path.glob("*/*.csv"))


def timed_row(**columns):
    names = {name: "" for name in run.FIELDS}
    base = dict(graph="a", op="dot", layer="GT", size="1x128", dtype="float32", gpu="some GPU", direction="fwd")
    base.update(implementation="fused", schedule="auto", state="warm", status="ok", iqr_ms="0.01", median_ms="1")
    return {**names, **base, "utilisation": "0.5", "ran": "forward=row_split", **columns}


def test_tables_take_the_last_row():
    table = tables.times_table([timed_row(median_ms="0.9"), timed_row(median_ms="0.29")], "warm", "pyg")
    assert "| GT | 1x128 | fwd | ours | 0.29 |" in table and "0.9 " not in table


def test_peers_stand_beside_our_rows():
    # The fastest on (c) was wrong.
    rows = [timed_row(op="add", layer="GAT", graph="c", median_ms="7.775"), timed_row(dtype="bfloat16")]
    table = tables.peers_table(rows)
    assert "| GAT | 1x128 | fwd | c | float32 | 7.775 | 15.55 | DF-GNN hyper_recompute | 2.00x |" in table
    assert "| GT | 1x128 | fwd | a | bfloat16 | 1 |" in table and "| Fused3S permuteV (float16) |" in table
    assert tables.peers_table([timed_row(graph="cora")]) == ""


def test_speedups_and_their_geometric_means():
    rows = []
    for graph, ours, unfused in (("mnist_like", 1, 4), ("pattern_like", 1, 9), ("cora", 2, 2)):
        rows.append(timed_row(graph=graph, median_ms=str(ours)))
        rows.append(timed_row(graph=graph, implementation="unfused", schedule="", median_ms=str(unfused)))
    assert tables.times_faster(rows, "unfused")["GT", "1x128", "fwd", "pattern_like"] == {"ours": 9}
    table = tables.means_table(rows, "unfused")
    assert "| GT | 1x128 | fwd | ours | 6.00x (2 of 6) | 1.00x (1 of 6) | 3.30x (3 of 12) | 1.00x (cora) |" in table
    assert "| GT | 1x128 | fwd | ours | 1 (4.00x) | 1 (9.00x) | 2 (1.00x) |" in tables.times_table(
        rows, "warm", "unfused"
    )
    assert "#### Warm, median ms (times faster than cuSPARSE, unfused)" in tables.summary(rows, "unfused")
    alone = tables.summary(rows, "")
    assert "faster" not in alone and "| GT | 1x128 | fwd | ours | 1 | 1 | 2 |" in alone


def test_a_schedule_can_be_what_others_are_compared_with():
    steps = [timed_row(schedule=name, median_ms=ms) for name, ms in (("smmf", "2"), ("pmf", "1.6"))]
    assert tables.times_faster(steps, "smmf") == {("GT", "1x128", "fwd", "a"): {"ours pmf": 1.25}}


def test_the_figure_follows_from_a_file_alone(tmp_path, capsys):
    path = tmp_path / "fig9.csv"
    rows = [
        timed_row(graph=graph, implementation=name, schedule="") for graph in TABLE_1[:2] for name in ("pyg", "unfused")
    ]
    run.Table(path, run.FIELDS).append([*rows, timed_row(graph=TABLE_1[0]), timed_row(graph=TABLE_1[2])])
    panel = plots.panels_of(run.Table.read(path), "pyg")["fwd", "GT"]
    assert panel[TABLE_1[0]] == {"cuSPARSE, unfused": 1.0, "ours": 1.0} and not panel[TABLE_1[2]]
    assert plots.main([str(path), "--baseline", "pyg"]) == 0
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        plots.main([str(path), "--baseline", "flex"])
    assert "has no time beside one of --baseline=flex" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        plots.main([str(tmp_path / "none.csv")])
    assert f"'csv' needs a file that is there (got {tmp_path / 'none.csv'})" in capsys.readouterr().err


def test_sizes_of_one_graph_stand_side_by_side():
    rows = [timed_row(graph="pattern_like", size=size, implementation=name, schedule="")
            for size in ("1x16", "1x32") for name in ("pyg", "unfused")]  # fmt: skip
    assert list(plots.panels_of(rows, "pyg")["fwd", "GT"]) == ["1x16", "1x32"]


BASELINES = {"fig9": "unfused", "fig10b": "unfused", "fig11": "feature_parallel", "fig12": "smmf", "fig13": "unfused"}


@pytest.mark.parametrize("name", BASELINES)
def test_figures_are_read_without_the_code(name):
    """Titles and legends lie inside of the figure, and no name of the rows is in them."""
    rows = [*run.Table.read(CONFIGS.parents[1] / "results" / "bench" / "nvidia-h200" / f"{name}.csv")]
    figure = plots.figure_of(rows, BASELINES[name], name)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    texts = [figure._suptitle, *legend.get_texts(), *(axes.title for axes in figure.axes)]
    texts += [label for axes in figure.axes for label in (*axes.get_xticklabels(), axes.yaxis.label)]
    for text in texts:
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text.get_text()
        assert not re.search(r"fig\d|_like|fwd|bwd|\bours\b|@|\dx\d", text.get_text()), text.get_text()


def test_nothing_timed_draws_nothing(tmp_path):
    assert plots.draw([timed_row(status="failed: luck", state="")], "pyg", tmp_path / "fig9.png") is None


def test_traffic_of_a_graph_transformer():
    graph, case = benchmark_graph("e", "cpu"), AttentionCase("dot", "1x128")
    nodes, edges = graph.num_dst, graph.num_edges
    forward = 4 * nodes * 128 * 4 + 4 * edges + 4 * nodes
    assert case.compulsory_bytes(graph, "fwd", 4) == forward
    assert case.compulsory_bytes(graph, "fwd+bwd", 4) == 3 * forward


def test_timing_statistics():
    timing = Timing.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (timing.median_ms, timing.n) == (3.0, 5) and timing.iqr_ms > 0
    assert Timing.of([2.0]) == Timing(2.0, 0.0, 1)


def test_long_calls_are_repeated_less():
    pace = Pace(min_repetitions=20, max_repetitions=100, sampling_ms=250, long_call_ms=500, long_call_repetitions=5)
    assert [pace.repetitions(ms) for ms in (0.0, 1.0, 5.0, 100.0, 501.0)] == [100, 100, 50, 20, 5]


def test_the_cache_is_flushed_before_each_repetition(monkeypatch):
    timer, order = Timer(CPU, Pace(3, 3)), []
    monkeypatch.setattr(timer, "flush_cache", lambda: order.append("flush"))
    timer.time(lambda: order.append("call"), flushed=True)
    assert order[-6:] == ["flush", "call"] * 3
