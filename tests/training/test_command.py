"""train.py as a user runs it: from anywhere, once and as a sweep."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyg_dfgnn.threads import let_threads_sleep
from pyg_dfgnn.training import sweep as sweep_module
from tests.training.conftest import TINY

SCRIPT = Path(__file__).parents[2] / "train.py"


COMMANDS = {
    "train.py": [str(SCRIPT)],
    "training": ["-m", "pyg_dfgnn.training"],
    "bench": ["-m", "pyg_dfgnn.bench"],
}
# OpenMP reads how threads wait while torch is loaded; this prints it when torch is looked for, and ends the command.
WATCH = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
"""


def start(name, overrides, folder):
    """Run a command in an environment that says nothing about OpenMP."""
    environment = {variable: value for variable, value in os.environ.items() if not variable.startswith("OMP_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(SCRIPT.parent)])
    arguments = [sys.executable, *COMMANDS[name], *overrides]
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_sweep_from_another_folder(tmp_path, capsys):
    done = start(
        "train.py", [*TINY, "trainer.epochs=1", "trainer.progress=true", "backend=auto", "seed=0,1", "-m"], tmp_path
    )
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "multirun").iterdir()
    seeds = [json.loads((sweep / job / "metrics.json").read_text())["seed"] for job in "01"]
    assert seeds == [0, 1]
    for job in "01":
        assert (sweep / job / "curves.png").is_file() and (sweep / job / ".hydra" / "config.yaml").is_file()
        lines = (sweep / job / "train.log").read_text()
        assert "PyG's own code runs where the tensors are on a CPU" in lines and "epoch 1/1  train_loss" in lines
    for line in (
        "test mean accuracy per class",
        "PyG's own code runs where the tensors are on a CPU",
        "epoch 1/1  train_loss",
    ):
        assert done.stdout.count(line) == 2
    assert "curves.png" in done.stdout

    rows = sweep_module.collect(sweep)
    assert [row["seed"] for row in rows] == [0, 1] and "seed=1" in rows[1]["overrides"].split()
    sweep_module.main([str(sweep)])
    mean = 50 * (rows[0]["test_accuracy"] + rows[1]["test_accuracy"])
    assert f"test balanced_accuracy {mean:.2f} +- " in capsys.readouterr().out
    with open(sweep / "sweep.csv") as stream:
        assert [float(row["test_loss"]) for row in csv.DictReader(stream)] == [row["test_loss"] for row in rows]


@pytest.mark.parametrize("name", COMMANDS)
def test_threads_sleep_while_they_wait(tmp_path, name):
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    done = start(name, [], tmp_path)
    assert done.stdout == "PASSIVE\n", done.stderr


def test_the_user_decides_how_threads_wait(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    let_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_unknown_key_is_refused(tmp_path):
    done = start("train.py", ["model.width=3"], tmp_path)
    assert done.returncode != 0 and "Could not override 'model.width'" in done.stderr


def test_sweep_without_runs(tmp_path):
    with pytest.raises(FileNotFoundError, match="'folder' needs at least one run with metrics.json"):
        sweep_module.collect(tmp_path)
