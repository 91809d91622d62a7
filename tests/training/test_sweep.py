"""Sweeps: settings apart, seeds together, curves."""

import csv
import shutil

import pytest
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from pyg_dfgnn.training import sweep


def test_files_lie_in_the_first_folder(folder, tmp_path, capsys):
    shutil.copytree(folder / "0", tmp_path / "more" / "0")
    OmegaConf.save(["experiment=gat_cora", "optimizer.lr=1"], tmp_path / "more" / "0" / ".hydra" / "overrides.yaml")
    sweep.main([str(folder), str(tmp_path / "more")])
    lines = (folder / "sweep.md").read_text().splitlines()
    assert len(lines) == 5 and {line.count("|") for line in lines} == {13}
    assert "| gat_cora | pyg_dfgnn.nn | cpu | - | 2 | 84.00 +- 0.00 | 3 | 2 | - |" in lines[2]
    assert "| gat_cora | torch_geometric.nn | cpu | - | 2 | 82.00 +- 1.41 |" in lines[3]
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    with (folder / "sweep.csv").open() as stream:
        assert [row["seed"] for row in csv.DictReader(stream)] == ["0", "1", "0", "1", "0"]
    printed = capsys.readouterr().out
    assert "GAT on Cora, pyg_dfgnn.nn: test accuracy 84.00 +- 0.00 % over 2 runs" in printed
    assert str(folder / "sweep.md") in printed


def test_files_beside_runs_are_skipped(folder, capsys):
    (folder / "multirun.yaml").touch()
    sweep.main([str(folder / "2"), str(folder / "multirun.yaml"), str(folder / "3")])
    assert "84.00 +- 0.00 % over 2 runs" in capsys.readouterr().out


def test_a_figure_that_fails_costs_no_results(folder, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    sweep.main([str(folder)])
    printed = capsys.readouterr().out
    assert "test accuracy 84.00 +- 0.00 % over 2 runs" in printed and "sweep.png could not be drawn: OSError" in printed
    assert (folder / "sweep.csv").is_file() and (folder / "sweep.md").is_file()


def test_sweeps_need_a_folder(capsys):
    with pytest.raises(SystemExit):
        sweep.main([])
    assert "folders" in capsys.readouterr().err


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
