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

PUBLISHED = configs_dir().parent / "results" / "accuracy" / "published.csv"


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
    outs = {name: tmp_path / f"out.{name}" for name in ("csv", "markdown", "png")}
    options = [word for name, path in outs.items() for word in (f"--{name}", path)]
    command(monkeypatch, folder, *options, "--published", PUBLISHED)
    lines = outs["markdown"].read_text().splitlines()
    assert len(lines) == 4 and {line.count("|") for line in lines} == {15}
    assert "| gat_cora | pyg_dfgnn.nn | cpu | - | 2 | 84.00 +- 0.00 | 3 | 2 | 83.0 +- 0.7 |" in lines[2]
    assert "| gat_cora | torch_geometric.nn | cpu | - | 2 | 82.00 +- 1.41 |" in lines[3]
    assert outs["png"].read_bytes().startswith(b"\x89PNG")
    with outs["csv"].open() as stream:
        assert [row["seed"] for row in csv.DictReader(stream)] == ["0", "1", "0", "1"]
    assert "GAT on Cora, pyg_dfgnn.nn: test accuracy 84.00 +- 0.00 % over 2 runs" in capsys.readouterr().out


def test_files_lie_in_the_first_folder(folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder / "0", tmp_path / "more" / "0")
    OmegaConf.save(["experiment=gat_cora", "optimizer.lr=1"], tmp_path / "more" / "0" / ".hydra" / "overrides.yaml")
    command(monkeypatch, folder, tmp_path / "more")
    assert len((folder / "sweep.csv").read_text().splitlines()) == 6
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
    drawn = sweep.figure(groups)
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
    (axes,) = sweep.figure(sweep.by_seed(sweep.collect(folder))).axes
    assert [len(line.get_xdata()) for line in axes.lines] == [2, 3]


def test_published_results_name_their_sources():
    published = sweep.read_published(PUBLISHED)
    assert published["gat_cora", "Cora", "GAT", "accuracy"]["mean"] == "83.0"
    experiments = {path.stem for path in (configs_dir() / "experiment").glob("*.yaml")}
    assert {key[0] for key in published} <= experiments
    assert all(float(row["std"]) > 0 and re.search(r"20[12]\d", row["source"]) for row in published.values())


def test_published_results_of_another_form(tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"'published' needs the columns experiment, .* \(got \['a', 'b'\]\)"):
        sweep.read_published(tmp_path / "other.csv")
