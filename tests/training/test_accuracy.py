"""Results of accuracy: runs of several sweeps in one folder, published results beside them."""

import json
import re
import shutil

import pytest

from benchmarks import accuracy
from benchmarks.results import Table
from pyg_dfgnn.paths import configs_dir
from pyg_dfgnn.training import sweep

RESULTS = configs_dir().parent / "results" / "accuracy"
PUBLISHED = RESULTS / "published.csv"


def command(*words):
    accuracy.main([str(word) for word in words])


@pytest.fixture
def results(folder, tmp_path):
    """Results that the runs were added to."""
    path = tmp_path / "results"
    path.mkdir()
    command(path, folder)
    return path


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
    line = accuracy.beside_published(groups, PUBLISHED).splitlines()[2]
    assert f"| {experiment} | torch_geometric.nn | cpu | {changes} | 1 | 83.00 | 3 | 2 | {published} |" in line


def test_results_need_no_run_folders(folder, results):
    names = ["curves.csv", "curves.png", "runs.csv", "table.md"]
    before = {name: (results / name).read_bytes() for name in names}
    shutil.rmtree(folder)
    (results / "table.md").unlink()
    (results / "curves.png").unlink()
    command(results)
    assert {path.name: path.read_bytes() for path in sorted(results.iterdir())} == before


def test_runs_replace_those_of_their_setting_and_seed(folder, results, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(folder / "1", again / "0")
    metrics = json.loads((again / "0" / "metrics.json").read_text())
    (again / "0" / "metrics.json").write_text(json.dumps({**metrics, "test_accuracy": 0.79}))
    (again / "0" / "metrics.csv").write_text("epoch,val_accuracy\n1,0.5\n")
    command(results, again)
    rows, curves = accuracy.add(results, [], {})
    names = [str(folder / "0"), str(folder / "2"), str(folder / "3"), str(again / "0")]
    assert [row["run"] for row in rows] == names == list(curves)
    assert (rows[-1]["seed"], rows[-1]["test_accuracy"], curves[names[-1]]) == (1, 0.79, {1: 0.5})
    assert "| torch_geometric.nn | cpu | - | 2 | 81.00 +- 2.83 |" in (results / "table.md").read_text()


def test_a_name_belongs_to_one_run(folder, results):
    other = [{**row, "seed": row["seed"] + 2} for row in sweep.collect(folder / "0")]
    with pytest.raises(ValueError, match=r"'sweeps' need other names than earlier runs of .* \(got \['.*0'\]\)"):
        accuracy.add(results, other, {})


def test_rows_without_curves_have_no_line(folder, results):
    lines = (results / "curves.csv").read_text().splitlines(keepends=True)
    (results / "curves.csv").write_text("".join(line for line in lines if not line.startswith(str(folder / "0"))))
    rows, curves = accuracy.add(results, [], {})
    assert len(rows) == 4 and str(folder / "0") not in curves
    (axes,) = sweep.figure(sweep.by_seed(rows), curves).axes
    assert [line.get_ydata()[0] for line in axes.lines] == pytest.approx([0.184, 0.181])
    of_one = {run: curve for run, curve in curves.items() if run == str(folder / "1")}
    (axes,) = sweep.figure(sweep.by_seed([*rows, {**rows[0], "model": "another"}]), of_one).axes
    assert len(axes.lines) == 1 and axes.get_title() == "GAT on Cora"

    (results / "curves.csv").unlink()
    (results / "curves.png").unlink()
    command(results)
    assert not (results / "curves.png").exists()
    assert (results / "curves.csv").read_text() == "run,epoch,val_accuracy\n"


def test_a_curve_alone_is_not_drawn(results, folder):
    rows, curves = accuracy.add(results, [], {})
    groups = sweep.by_seed(rows)
    assert accuracy.compared(groups, curves) == groups and len(groups) == 2
    of_one = {run: curves[run] for run in (row["run"] for row in next(iter(groups.values())))}
    assert accuracy.compared(groups, of_one) == {}


def test_the_committed_table_is_of_the_committed_rows(tmp_path):
    results = tmp_path / "accuracy"
    shutil.copytree(RESULTS, results)
    command(results)
    for name in ("runs.csv", "table.md"):
        assert (results / name).read_text() == (RESULTS / name).read_text(), name


def test_published_results_name_their_sources():
    published = Table.read(PUBLISHED)
    experiments = {path.stem for path in (configs_dir() / "experiment").glob("*.yaml")}
    assert {row["experiment"] for row in published} <= experiments
    assert all(float(row["std"]) > 0 and re.search(r"20[12]\d", row["source"]) for row in published)


def test_nothing_to_collect(tmp_path):
    with pytest.raises(FileNotFoundError, match="'results' needs a folder with runs.csv where no sweeps are given"):
        command(tmp_path)
    assert not list(tmp_path.iterdir())
