"""Estimates beside times, their fit, and what auto loses."""

import csv
import math

import pytest
import torch

from pyg_dfgnn.bench import costs
from pyg_dfgnn.bench.costs import Constant, Sample
from pyg_dfgnn.bench.graphs import benchmark_graph
from pyg_dfgnn.bench.results import default_folder, file_stem
from pyg_dfgnn.bench.run import FIELDS
from pyg_dfgnn.dispatch import gpu
from pyg_dfgnn.dispatch.attention import row_split
from pyg_dfgnn.dispatch.core import BY_NAME, CANDIDATES, WALKS

CPU = torch.device("cpu")
CASES = [("e", "dot", "1", "128", "float32"), ("b", "add", "8", "16", "bfloat16"), ("b", "gatv2", "1", "64", "float32")]


@pytest.fixture(autouse=True)
def constants_come_back(monkeypatch):
    monkeypatch.setitem(gpu.known, CPU, gpu.H200)
    monkeypatch.setattr(row_split, "ROW", dict(row_split.ROW))
    for name in ("STEP", "STEP_S", "LOAD"):
        monkeypatch.setattr(row_split, name, getattr(row_split, name))


@pytest.fixture
def path(tmp_path):
    """Times of three cases: those of rows as estimated, those of other schedules ten times that of rows."""
    found = tmp_path / "choice.csv"

    def rows(factor):
        for graph, score, heads, channels, dtype in CASES:
            for schedule in ("auto", *CANDIDATES):
                for walk in WALKS:
                    yield {
                        **dict.fromkeys(FIELDS, ""),
                        **{"graph": graph, "score": score, "heads": heads, "channels": channels, "dtype": dtype},
                        **{"schedule": schedule, "direction": walk, "implementation": "fused", "state": "warm"},
                        **{"status": "ok", "median_ms": factor},
                    }

    def write(factor, wanted=None):
        with found.open("w", newline="") as file:
            table = csv.DictWriter(file, FIELDS)
            table.writeheader()
            table.writerows(wanted if wanted is not None else rows(factor))
        return found

    write(1.0)
    by_key = {(s.case, s.schedule, s.walk): s.estimate for s in costs.read(found, CPU, small=True)}
    exact = []
    for row in rows(1.0):
        case = tuple(row[name] for name in ("graph", "score", "heads", "channels", "dtype"))
        estimate = by_key.get((case, "row_split", row["direction"]), 1.0)
        row["median_ms"] = 1e3 * estimate * (1.0 if row["schedule"] == "row_split" else 10.0)
        exact.append(row)
    return write(None, exact)


def test_reads_the_passes_that_candidates_can_run(path):
    samples = costs.read(path, CPU, small=True)
    assert {sample.schedule for sample in samples} <= set(CANDIDATES) and {s.walk for s in samples} == set(WALKS)
    assert {s.schedule for s in samples if s.case[1] == "gatv2"} == {"row_split", "smem"}
    assert all(s.error == pytest.approx(0.0, abs=1e-6) for s in samples if s.schedule == "row_split")
    left = {
        s.problem.tangent for s in samples if s.walk == "targets" and s.schedule == "row_split" and s.case[1] == "add"
    }
    assert left == {True}


def test_the_fit_finds_constants_again(path):
    samples = [s for s in costs.read(path, CPU, small=True) if s.schedule == "row_split"]
    constants = [Constant(name, CPU) for name in ("row_split.STEP_S", "row_split.ROW.forward", "gpu.launch_s")]
    assert [c.value for c in constants] == [row_split.STEP_S, row_split.ROW["forward"], gpu.H200.launch_s]
    true = row_split.STEP_S
    for constant, factor in zip(constants, (3.0, 0.3, 2.0), strict=True):
        constant.set(constant.value * factor)
    before = costs.spread(samples)
    after = costs.fit(samples, constants, steps=300)
    assert after == pytest.approx(costs.spread(samples)) and after < 0.1 < before
    assert row_split.STEP_S == pytest.approx(true, rel=0.3)
    assert gpu.H200.launch_s != gpu.known[CPU].launch_s


@pytest.mark.parametrize("name", ["row_split.NONE", "row_split.ROW.none", "gpu.none", "gpu.name", "row_split.WORDS.x"])
def test_what_is_no_constant(name):
    with pytest.raises((ValueError, AttributeError)):
        Constant(name, CPU)


def test_losses_of_choices(path, monkeypatch):
    samples = costs.read(path, CPU, small=True)
    found = costs.losses(samples)
    assert len(found) == 2 * len(CASES) and [loss for loss, _, _ in found] == sorted(
        (f[0] for f in found), reverse=True
    )
    # Where auto takes rows it loses nothing, elsewhere a factor of ten or more.
    for loss, case, choice in found:
        assert (loss == 0.0) == (set(choice.taken) == {"row_split"}), case
        assert set(choice.best) == {"row_split"}
    assert f"{len(found)} choices" in costs.loss_table(samples)


def test_command(path, capsys):
    assert costs.main([str(path), "--device", "cpu", "--small", "--fit", "row_split.STEP", "--steps", "5"]) == 0
    shown = capsys.readouterr().out
    assert "| row_split | forward | 3 |" in shown and "row_split.STEP: " in shown
    assert shown.count("lose more than 5 %") == 2


def test_the_csv_is_that_of_the_device(path, capsys, monkeypatch):
    monkeypatch.chdir(path.parent)
    with pytest.raises(SystemExit):
        costs.main(["--device", "cpu", "--small"])
    folder = default_folder("bench", CPU, small=True) / file_stem(CPU, small=True)
    assert f"there is no {folder}/choice.csv" in capsys.readouterr().err
    folder.mkdir(parents=True)
    path.rename(folder / "choice.csv")
    assert costs.main(["--device", "cpu", "--small", "--graphs", "e"]) == 0
    assert "| row_split | forward | 1 |" in capsys.readouterr().out


def test_what_cannot_be_made_is_skipped(path, capsys, monkeypatch):
    def made(name, device, *, small):
        if name == "e":
            raise RuntimeError("full-size graphs need a GPU")
        return benchmark_graph(name, device, small=small)

    monkeypatch.setattr(costs, "benchmark_graph", made)
    assert {sample.case[0] for sample in costs.read(path, CPU, small=True)} == {"b"}
    assert capsys.readouterr().out == "skipped graph e: full-size graphs need a GPU\n"


def test_an_error_is_a_logarithm():
    sample = Sample((), None, None, "forward", "row_split", None, 2.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sample, "estimate", property(lambda self: 4.0))
        assert sample.error == pytest.approx(math.log(2)) and costs.spread([sample]) == pytest.approx(math.log(2))
    assert set(CANDIDATES) <= set(BY_NAME)
