"""Sweeps: settings apart, seeds together, published results beside them, curves."""

import csv
import json
import re
import shutil
import sys

import pytest
from omegaconf import OmegaConf

from pyg_dfgnn.paths import configs_dir
from pyg_dfgnn.training import sweep

RESULTS = configs_dir().parent / "results" / "accuracy"
PUBLISHED = RESULTS / "published.csv"


@pytest.fixture
def folder(tmp_path):
    """Two settings with two seeds each, as runs leave them."""
    for job, (convs, seed, accuracy) in enumerate(
        [
            ("torch_geometric.nn", 0, 0.83),
            ("torch_geometric.nn", 1, 0.81),
            ("pyg_dfgnn.nn", 0, 0.84),
            ("pyg_dfgnn.nn", 1, 0.84),
        ]
    ):
        run = tmp_path / "sweep" / str(job)
        (run / ".hydra").mkdir(parents=True)
        overrides = ["experiment=gat_cora", f"seed={seed}"]
        OmegaConf.save(OmegaConf.create(overrides), run / ".hydra" / "overrides.yaml")
        values = {"task": "Cora", "model": "GAT", "metric": "accuracy", "convs": convs, "device": "cpu", "seed": seed}
        values |= {"test_accuracy": accuracy, "epochs": 3, "train_time_s": 2.0, "synthetic": None}
        (run / "metrics.json").write_text(json.dumps(values))
        # The last run stopped early.
        rows = "".join(f"{epoch},{0.1 * epoch + accuracy / 10}\n" for epoch in range(1, 4 - (job == 3)))
        (run / "metrics.csv").write_text("epoch,val_accuracy\n" + rows)
    return tmp_path / "sweep"


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["sweep", *map(str, arguments)])
    sweep.main()


def test_table_and_curves(folder, tmp_path, monkeypatch, capsys):
    outs = {name: tmp_path / f"out.{name}" for name in ("csv", "curves", "markdown", "png")}
    options = [word for name, path in outs.items() for word in (f"--{name}", path)]
    command(monkeypatch, folder, *options, "--published", PUBLISHED)
    lines = outs["markdown"].read_text().splitlines()
    assert len(lines) == 4 and {line.count("|") for line in lines} == {15}
    assert "| gat_cora | pyg_dfgnn.nn | cpu | - | 2 | 84.00 +- 0.00 | 3 | 2 | 83.0 +- 0.7 |" in lines[2]
    assert "| gat_cora | torch_geometric.nn | cpu | - | 2 | 82.00 +- 1.41 |" in lines[3]
    assert outs["png"].read_bytes().startswith(b"\x89PNG")
    with outs["csv"].open() as stream:
        assert [row["seed"] for row in csv.DictReader(stream)] == ["0", "1", "0", "1"]
    curves = outs["curves"].read_text().splitlines()
    assert curves[:2] == ["run,epoch,val_accuracy", f"{folder / '0'},1,0.183"] and len(curves) == 1 + 3 + 3 + 3 + 2
    assert "GAT on Cora, pyg_dfgnn.nn: test accuracy 84.00 +- 0.00 % over 2 runs" in capsys.readouterr().out


def test_files_lie_in_the_first_folder(folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder / "0", tmp_path / "more" / "0")
    OmegaConf.save(["experiment=gat_cora", "optimizer.lr=1"], tmp_path / "more" / "0" / ".hydra" / "overrides.yaml")
    command(monkeypatch, folder, tmp_path / "more")
    assert len((folder / "sweep.csv").read_text().splitlines()) == 6
    assert len((folder / "sweep-curves.csv").read_text().splitlines()) == 15
    assert len((folder / "sweep.md").read_text().splitlines()) == 5
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert str(folder / "sweep.md") in capsys.readouterr().out


def test_without_published_results(folder, tmp_path, monkeypatch):
    command(monkeypatch, folder, "--csv", tmp_path / "out.csv", "--markdown", tmp_path / "out.md")
    assert "| 2 | - | - | - |" in (tmp_path / "out.md").read_text()


@pytest.mark.parametrize(
    ("overrides", "experiment", "changes", "published"),
    [
        (["experiment=gat_cora", "backend=pyg", "seed=3"], "gat_cora", "backend=pyg", "83.0 +- 0.7"),
        (["data=cora", "model=gat", "optimizer.lr=1", "seed=3"], "-", "data=cora model=gat optimizer.lr=1", "-"),
        (["experiment=gatv2_cora", "model=gat"], "gatv2_cora", "model=gat", "-"),
    ],
    ids=["experiment", "none", "another"],
)
def test_published_results_belong_to_an_experiment(folder, overrides, experiment, changes, published):
    (first, *_) = sweep.collect(folder)
    groups = sweep.by_seed([{**first, "overrides": " ".join(overrides)}])
    line = sweep.markdown(groups, sweep.read_published(PUBLISHED)).splitlines()[2]
    assert f"| {experiment} | torch_geometric.nn | cpu | {changes} | 1 | 83.00 | 3 | 2 | {published} |" in line


def test_panels_in_rows(folder):
    rows = sweep.collect(folder)
    groups = sweep.by_seed([{**row, "model": f"model {n}"} for n in range(6) for row in rows])
    drawn = sweep.figure(groups, sweep.read_curves(rows))
    assert len(drawn.axes) == 6 and len({axes.get_position().y0 for axes in drawn.axes}) == 2
    legend = [text.get_text() for text in drawn.axes[0].get_legend().get_texts()]
    assert legend == ["pyg_dfgnn.nn", "torch_geometric.nn"]


def test_the_same_seed_twice_is_no_mean(folder):
    rows = sweep.collect(folder, folder)
    with pytest.raises(
        ValueError, match=r"'folders' need runs that differ by their seeds \(got \[0, 1, 0, 1\] of Cora"
    ):
        sweep.by_seed(rows)


def test_curves_end_with_the_shortest_run(folder):
    rows = sweep.collect(folder)
    (axes,) = sweep.figure(sweep.by_seed(rows), sweep.read_curves(rows)).axes
    assert [len(line.get_xdata()) for line in axes.lines] == [2, 3]


def test_long_curves_share_epochs(folder):
    for job, epochs in enumerate((100, 101, 401, 1000)):
        lines = "".join(f"{epoch},0.12345678\n" for epoch in range(1, epochs + 1))
        (folder / str(job) / "metrics.csv").write_text("epoch,val_accuracy\n" + lines)
    rows = sweep.collect(folder)
    curves = sweep.read_curves(rows)
    assert [len(curve) for curve in curves.values()] == [100, 51, 51, 63]
    assert curves[str(folder / "3")] == dict.fromkeys(range(1, 1001, 16), 0.1235)
    (axes,) = sweep.figure(sweep.by_seed(rows), curves).axes
    assert [list(line.get_xdata()) for line in axes.lines] == [list(range(1, 402, 16)), list(range(1, 101, 2))]


@pytest.fixture
def results(folder, tmp_path, monkeypatch):
    """Results that the runs were added to."""
    path = tmp_path / "results"
    path.mkdir()
    command(monkeypatch, folder, "--add", path)
    return path


def test_results_need_no_run_folders(folder, results, monkeypatch):
    names = ["curves.csv", "curves.png", "runs.csv", "table.md"]
    before = {name: (results / name).read_bytes() for name in names}
    shutil.rmtree(folder)
    (results / "table.md").unlink()
    (results / "curves.png").unlink()
    command(monkeypatch, "--add", results)
    assert {path.name: path.read_bytes() for path in sorted(results.iterdir())} == before


def test_runs_replace_those_of_their_setting_and_seed(folder, results, tmp_path, monkeypatch):
    again = tmp_path / "again"
    shutil.copytree(folder / "1", again / "0")
    metrics = json.loads((again / "0" / "metrics.json").read_text())
    (again / "0" / "metrics.json").write_text(json.dumps({**metrics, "test_accuracy": 0.79}))
    (again / "0" / "metrics.csv").write_text("epoch,val_accuracy\n1,0.5\n")
    command(monkeypatch, again, "--add", results)
    rows, curves = sweep.add(results, [], {})
    names = [str(folder / "0"), str(folder / "2"), str(folder / "3"), str(again / "0")]
    assert [row["run"] for row in rows] == names == list(curves)
    assert (rows[-1]["seed"], rows[-1]["test_accuracy"], curves[names[-1]]) == (1, 0.79, {1: 0.5})
    assert "| torch_geometric.nn | cpu | - | 2 | 81.00 +- 2.83 |" in (results / "table.md").read_text()


def test_a_name_belongs_to_one_run(folder, results):
    other = [{**row, "seed": row["seed"] + 2} for row in sweep.collect(folder / "0")]
    with pytest.raises(ValueError, match=r"'folders' need other names than earlier runs of .* \(got \['.*0'\]\)"):
        sweep.add(results, other, {})


def test_rows_without_curves_have_no_line(folder, results, monkeypatch, capsys):
    lines = (results / "curves.csv").read_text().splitlines(keepends=True)
    (results / "curves.csv").write_text("".join(line for line in lines if not line.startswith(str(folder / "0"))))
    rows, curves = sweep.add(results, [], {})
    assert len(rows) == 4 and str(folder / "0") not in curves
    (axes,) = sweep.figure(sweep.by_seed(rows), curves).axes
    assert [line.get_ydata()[0] for line in axes.lines] == pytest.approx([0.184, 0.181])
    of_one = {run: curve for run, curve in curves.items() if run == str(folder / "1")}
    (axes,) = sweep.figure(sweep.by_seed([*rows, {**rows[0], "model": "another"}]), of_one).axes
    assert len(axes.lines) == 1 and axes.get_title() == "GAT on Cora"

    (results / "curves.csv").unlink()
    (results / "curves.png").unlink()
    capsys.readouterr()
    command(monkeypatch, "--add", results)
    assert not (results / "curves.png").exists() and "curves.png" not in capsys.readouterr().out
    assert (results / "curves.csv").read_text() == "run,epoch,val_accuracy\n"


@pytest.mark.parametrize("name", ["runs.csv", "curves.csv"])
def test_earlier_results_of_another_form(results, name):
    (results / name).write_text("run,b\n")
    with pytest.raises(ValueError, match=rf"'{name}' needs the columns run, .* \(got \['run', 'b'\]\)"):
        sweep.add(results, [], {})


def test_nothing_to_collect(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        command(monkeypatch)
    assert "folders or --add are required" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="'add' needs a folder with runs.csv where no runs are given"):
        command(monkeypatch, "--add", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_committed_table_is_of_the_committed_rows(tmp_path, monkeypatch):
    results = tmp_path / "accuracy"
    shutil.copytree(RESULTS, results)
    command(monkeypatch, "--add", results, "--published", PUBLISHED)
    for name in ("runs.csv", "table.md"):
        assert (results / name).read_text() == (RESULTS / name).read_text(), name


def test_published_results_name_their_sources():
    published = sweep.read_published(PUBLISHED)
    assert published["gat_cora", "Cora", "GAT", "accuracy"]["mean"] == "83.0"
    experiments = {path.stem for path in (configs_dir() / "experiment").glob("*.yaml")}
    assert {key[0] for key in published} <= experiments
    assert all(float(row["std"]) > 0 and re.search(r"20[12]\d", row["source"]) for row in published.values())


@pytest.mark.parametrize("more", [False, True])
def test_published_results_of_another_form(tmp_path, more):
    if more:
        (tmp_path / "more.csv").write_text(",".join((*sweep.PUBLISHED_FIELDS, "b")) + "\n")
        with pytest.raises(ValueError, match="'published' needs the columns experiment, .*'b'"):
            sweep.read_published(tmp_path / "more.csv")
        return
    (tmp_path / "other.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"'published' needs the columns experiment, .* \(got \['a', 'b'\]\)"):
        sweep.read_published(tmp_path / "other.csv")
