"""Loops: every case trains like PyG's, what is wrong or fails gets no time, rows are kept."""

from functools import partial

import pytest
import torch
from torch import nn

import pyg_dfgnn
from benchmarks.loops import run
from benchmarks.loops.cases import LOOPS
from benchmarks.loops.data import PRODUCTS, sample
from benchmarks.loops.run import BASELINE, Batches
from benchmarks.results import Table
from pyg_dfgnn.capture import capture_step
from pyg_dfgnn.settings import local_settings
from tests.benchmarks.quick import composed
from tests.capture.test_step import HostRecorder
from tests.emu import needs_compiler
from tests.kernels.emulated import emulated_device


def bench(tmp_path, *overrides, device="cpu"):
    """Measure on miniature graphs; return the exit code and the rows."""
    quick = ("experiment=loops", f"device={device}", "small=true", "seconds=0", "block=1", f"folder={tmp_path}")
    with local_settings(fallback="silent"):
        code = run.run(composed(*quick, *overrides))
    return code, Table(tmp_path / "loops.csv", run.FIELDS).rows()


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    monkeypatch.setattr(run, "MIN_BLOCKS", 1)


@pytest.mark.parametrize("loop", LOOPS)
def test_every_case_of_a_loop_trains_like_pygs(loop, tmp_path):
    sizes = ["sizes=[sol-b8-h16]"] if loop == "molecules" else []
    code, rows = bench(tmp_path, f"loops=[{loop}]", *sizes)
    assert code == 0 and {row["implementation"] for row in rows} == {"pyg", "ours"}
    assert [row["status"] for row in rows] == ["ok"] * len(rows)
    assert all(float(row["ms"]) > 0 for row in rows)
    assert all(max(float(row["loss_error"]), float(row["gradient_error"])) < 1e-3 for row in rows)
    assert len({(row["model"], row["size"]) for row in rows}) == len(rows) / 2


def test_rows_that_are_there_are_left_out_and_others_are_added(tmp_path):
    _, first = bench(tmp_path, "loops=[small]", "models=[gin]", "implementations=[pyg]")
    _, second = bench(tmp_path, "loops=[small]", "models=[gin]", "implementations=[pyg,ours]")
    assert second[:1] == first and [row["implementation"] for row in second] == ["pyg", "ours"]
    code, third = bench(tmp_path, "loops=[small]", "models=[gin,gcn]", "limit_s=0")
    assert code == run.STOPPED_EARLY and third == second


def test_an_implementation_that_differs_from_pyg_is_wrong(tmp_path, monkeypatch, capsys):
    def spoil(model):
        nn.init.constant_(next(model.parameters()), 0.5)

    monkeypatch.setattr(pyg_dfgnn, "accelerate", spoil)
    _, (pyg, ours) = bench(tmp_path, "loops=[small]", "models=[gin]")
    assert pyg["status"] == "ok" and ours["status"].startswith("WRONG: error of the first") and ours["ms"] == ""
    assert "no time: small" in capsys.readouterr().out


def test_an_exception_is_a_row_and_the_run_goes_on(tmp_path, monkeypatch):
    def fail(model):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(pyg_dfgnn, "accelerate", fail)
    code, rows = bench(tmp_path, "loops=[small]", "models=[gin,gcn]")
    assert code == 0 and len(rows) == 4
    assert {row["status"] for row in rows if row["implementation"] == "ours"} == {"failed: RuntimeError: two lines"}
    assert {row["status"] for row in rows if row["implementation"] == "pyg"} == {"ok"}


def test_what_is_not_captured_says_why(tmp_path):
    _, rows = bench(tmp_path, "loops=[sampled,host]", "models=[sage]", "implementations=[ours_captured]")
    assert [row["status"][:8] for row in rows] == ["not run:"] * 3
    assert "new edges" in rows[0]["status"] and "without an optimizer" in rows[1]["status"]


@needs_compiler
def test_a_captured_step_takes_new_batches_on_the_kernels(tmp_path, monkeypatch):
    def capture(model, loss, optimizer, data, **options):
        return capture_step(model, loss, optimizer, data, recorder=HostRecorder(optimizer), **options)

    monkeypatch.setattr(pyg_dfgnn, "capture_step", capture)
    monkeypatch.setattr(torch.optim, "Adam", partial(torch.optim.SGD, fused=True))  # Adam needs a GPU to be captured
    with emulated_device() as launched:
        chosen = ("loops=[molecules]", "models=[gin]", "sizes=[sol-b8-h16]", "block=3")
        _, rows = bench(tmp_path, *chosen, "implementations=[ours,ours_captured]")
    assert [row["status"] for row in rows] == ["ok", "ok"] and "graph_count" in launched


@pytest.mark.parametrize(("option", "value"), [("loops", "cora"), ("implementations", "theirs")])
def test_unknown_names_are_refused(option, value, tmp_path):
    with pytest.raises(ValueError, match=f"'{option}'.*{value}"):
        bench(tmp_path, f"{option}=[{value}]")


def test_each_step_has_new_tensors_but_where_the_loop_keeps_them():
    for name, news in (("molecules", ["x", "edge_index"]), ("temporal", ["x"]), ("small", [])):
        case = next(LOOPS[name](True))
        batches = Batches(case, torch.device("cpu"))
        count = len(batches.batches)
        first, again = batches.take(0, 1)[0], batches.take(count, 1)[0]
        for key in ("x", "edge_index"):
            assert torch.equal(first[key], again[key])
            assert (first[key].data_ptr() != again[key].data_ptr()) == (key in news)


def test_samples_are_bipartite_blocks_within_the_fan_out():
    sizes, before, layers = sample(PRODUCTS, {"n": 500}, 8, (5, 3), 0, blocks=True, log_degree=3.0)
    assert before[0]["n"] == 8 and before[1]["n"] <= 8 * 6 and sizes["n"] >= before[1]["n"]
    for layer, rows, fan in zip(layers, before, (5, 3)):
        source, target = layer[PRODUCTS[0]]
        assert target.max() < rows["n"] and target.bincount().max() <= fan and source.max() < sizes["n"]


def test_the_summary_names_what_is_slower():
    row = dict.fromkeys(run.FIELDS, "") | {"loop": "small", "model": "gin", "size": "cora", "status": "ok", "ms": "1"}
    rows = [
        row | {"implementation": "ours", "ratio": "0.1", "baseline": "pyg"},
        row | {"implementation": "ours", "ratio": "4", "baseline": "pyg"},
        row | {"model": "gcn", "implementation": "ours", "ratio": "0.97", "baseline": "pyg"},
        row | {"implementation": "ours_compile", "ratio": "", "status": "failed: no compiler"},
    ]
    text = run.summary(rows)
    assert "| small | ours | pyg | 2 | 1.97 | 0.97 | 1 |" in text
    assert text.count("\nslower: ") == 1 and "no compiler" in text


@pytest.mark.cuda
def test_every_implementation_runs_on_a_gpu(tmp_path):
    chosen = ("loops=[molecules,small]", "models=[gin]", f"implementations=[{','.join(BASELINE)}]", "block=4")
    _, rows = bench(tmp_path, *chosen, device="cuda")
    assert {row["status"] for row in rows} == {"ok"} and {row["implementation"] for row in rows} == set(BASELINE)
    assert all(float(row["peak_mb"]) > 0 for row in rows if row["implementation"] != "ours_captured")
