"""train.py as a user runs it: from anywhere, once and as a sweep."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pyg_dfgnn.training import sweep as sweep_module
from tests.training.conftest import TINY

SCRIPT = Path(__file__).parents[2] / "train.py"


def command(cwd, *overrides):
    arguments = [sys.executable, str(SCRIPT), *overrides, *TINY, "trainer.epochs=1"]
    return subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_sweep_from_another_folder(tmp_path, monkeypatch, capsys):
    done = command(tmp_path, "-m", "seed=0,1")
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "multirun").iterdir()
    seeds = [json.loads((sweep / job / "metrics.json").read_text())["seed"] for job in "01"]
    assert seeds == [0, 1]
    for job in "01":
        assert (sweep / job / "curves.png").is_file() and (sweep / job / ".hydra" / "config.yaml").is_file()
    assert done.stdout.count("test mean accuracy per class") == 2
    assert "curves.png" in done.stdout

    rows = sweep_module.collect(sweep)
    assert [row["seed"] for row in rows] == [0, 1] and "seed=1" in rows[1]["overrides"].split()
    monkeypatch.setattr(sys, "argv", ["sweep", str(sweep)])
    sweep_module.main()
    mean = 50 * (rows[0]["test_accuracy"] + rows[1]["test_accuracy"])
    assert f"test balanced_accuracy {mean:.2f} +- " in capsys.readouterr().out
    with open(sweep / "sweep.csv") as stream:
        assert [float(row["test_loss"]) for row in csv.DictReader(stream)] == [row["test_loss"] for row in rows]


def test_unknown_key_is_refused(tmp_path):
    done = command(tmp_path, "model.width=3")
    assert done.returncode != 0 and "Could not override 'model.width'" in done.stderr


def test_sweep_without_runs(tmp_path):
    with pytest.raises(FileNotFoundError, match="'folder' needs at least one run with metrics.json"):
        sweep_module.collect(tmp_path)
