"""train.py as a user runs it: from anywhere, once and as a sweep."""

import json
import subprocess
import sys
from pathlib import Path

from tests.training.conftest import TINY

SCRIPT = Path(__file__).parents[2] / "train.py"


def command(cwd, *overrides):
    arguments = [sys.executable, str(SCRIPT), *overrides, *TINY, "trainer.epochs=1"]
    return subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_sweep_from_another_folder(tmp_path):
    done = command(tmp_path, "-m", "seed=0,1")
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "multirun").iterdir()
    seeds = [json.loads((sweep / job / "metrics.json").read_text())["seed"] for job in "01"]
    assert seeds == [0, 1]
    for job in "01":
        assert (sweep / job / "curves.png").is_file() and (sweep / job / ".hydra" / "config.yaml").is_file()
    assert done.stdout.count("test mean accuracy per class") == 2
    assert "curves.png" in done.stdout


def test_unknown_key_is_refused(tmp_path):
    done = command(tmp_path, "model.width=3")
    assert done.returncode != 0 and "Could not override 'model.width'" in done.stderr
