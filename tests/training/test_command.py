"""train.py as a user runs it: from anywhere, once and as a sweep."""

import csv
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pyg_dfgnn.threads import let_threads_sleep
from pyg_dfgnn.training import sweep as sweep_module
from tests.processes import run_file, run_script
from tests.training.conftest import TINY

SCRIPT = Path(__file__).parents[2] / "train.py"


COMMANDS = {
    "train.py": [str(SCRIPT)],
    "training": ["-m", "pyg_dfgnn.training"],
    "benchmarks": ["-m", "benchmarks"],
    "sweep": ["-m", "pyg_dfgnn.training.sweep"],
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


def train(words, folder):
    """Run train.py in a process that has PyG imported."""
    return run_file(SCRIPT, words, folder, folder, dict(os.environ))


def test_sweep_from_another_folder(tmp_path, capsys):
    done = start(
        "train.py", [*TINY, "trainer.epochs=1", "trainer.progress=true", "backend=auto", "seed=0,1", "-m"], tmp_path
    )
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "multirun").iterdir()
    header, _, *runs = done.stdout.splitlines()[-4:]
    assert header == "| run | changes | test metric | epochs | s |"
    assert [line.split(" | ")[0] for line in runs] == ["| 0", "| 1"] and all("accuracy" in line for line in runs)
    assert "seed=0" in runs[0] and "seed=1" in runs[1]
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


def test_a_sweep_with_a_failed_run_prints_the_others(tmp_path):
    done = train([*TINY, "trainer.epochs=1", "seed=a,1", "-m"], tmp_path)
    header, _, run, others = done.stdout.splitlines()[-4:]
    assert header.startswith("| run | changes |") and run.startswith("| 1 |") and others == "without a result: 0"
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("TypeError: 'seed' needs an integer")


def test_a_console_script_finds_own_code_in_the_folder_it_runs_in(tmp_path):
    (tmp_path / "own_net.py").write_text("from pyg_dfgnn.models import GAT as Net\n")
    own = [*TINY, "trainer.epochs=1", "model=gat", "model._target_=own_net.Net", "hydra.run.dir=run"]
    script = tmp_path / "bin" / "pyg-dfgnn"
    script.parent.mkdir()
    script.write_text("from pyg_dfgnn.command import main\n\nmain()\n")
    done = run_file(script, ["train", *own], tmp_path, tmp_path, dict(os.environ))
    assert done.returncode == 0 and (tmp_path / "run" / "metrics.json").is_file(), done.stderr


@pytest.mark.parametrize("name", ["train.py", "training", "benchmarks"])
def test_threads_sleep_while_they_wait(tmp_path, name):
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    done = start(name, [], tmp_path)
    assert done.stdout == "PASSIVE\n", done.stderr


def test_the_user_decides_how_threads_wait(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    let_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


ERRORS = {
    "ConfigCompositionException: Could not override 'model.width'.": ["model.width=3"],
    "ValueError: 'model.hidden_channels' needs a multiple of heads=5 (got 32)": ["model.heads=5"],
    "InstantiationException: Error locating target 'mine.Net': No module named 'mine'; full_key: model (HYDRA_FULL": [
        "model._target_=mine.Net"
    ],
    "TypeError: 'data.task.max_size' needs an integer (got str 'none')": [*TINY, "data.task.max_size=none"],
}
# What each command says as it ends.
FAILED = """
import os, sys
from pyg_dfgnn.training.__main__ import command

os.chdir({folder!r})
for overrides in {errors!r}:
    sys.argv = ["train.py", *overrides]
    try:
        command()
    except SystemExit as error:
        print(error, file=sys.stderr)
"""


def test_an_error_of_a_user_is_one_line(tmp_path):
    done = start("train.py", ["data=nowhere"], tmp_path)
    line = "MissingConfigException: In 'train': Could not find 'data/nowhere' Available options"
    assert done.returncode == 1 and done.stderr.startswith(line) and len(done.stderr.splitlines()) == 1


def test_errors_of_a_user_are_one_line_each(tmp_path):
    _, said = run_script(FAILED.format(folder=str(tmp_path), errors=list(ERRORS.values())), tmp_path)
    for line, expected in zip(said.splitlines(), ERRORS, strict=True):
        assert line.startswith(expected) and line.endswith("(HYDRA_FULL_ERROR=1 shows the traceback)")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.heds=3"], "+model.heds=3; did you mean model.heads? (HYDRA"),
        (["epochs=3"], "Could not override 'epochs'; did you mean trainer.epochs? (HYDRA"),
        (["dta=cora"], "did you mean data or paths.data? (HYDRA"),
        (["data=corra"], "; did you mean data=cora? (HYDRA"),
        (["-m", "data=aifb,mutag", "trainer.epoch=3"], "; did you mean trainer.epochs? (HYDRA"),
        # An option of the model of this data set alone.
        (["data=aifb", "model.num_base=3"], "; did you mean model.num_bases or model.num_blocks? (HYDRA"),
        (["qqq=1"], "Could not override 'qqq' (HYDRA"),
        (["+tainer.epochs=1"], "'config' needs options among model, data, optimizer, scheduler, trainer, backend,"),
    ],
    ids=lambda value: None if isinstance(value, str) else value[-1],
)
def test_a_misspelt_option_is_told_its_name(tmp_path, words, said):
    done = train(words, tmp_path)
    assert done.returncode == 1 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("word", "said"),
    [("model=mine_nett", "did you mean model=mine_net?"), ("model.widht=3", "did you mean model.width?")],
)
def test_a_misspelt_option_of_own_configs_is_told_its_name(tmp_path, word, said):
    (tmp_path / "own configs" / "model").mkdir(parents=True)
    (tmp_path / "own configs" / "model" / "mine_net.yaml").write_text("_target_: mine.Net\nwidth: 16\n")
    done = train(["--config-dir", "own configs", "model=mine_net", word], tmp_path)
    assert done.returncode == 1 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_the_traceback_is_there_for_who_wants_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    done = train(["model.heads=5"], tmp_path)
    assert done.returncode == 1 and "Traceback (most recent call last)" in done.stderr


def test_the_backend_of_a_notebook_is_not_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "module://no_such_package.backend_inline")
    # Where fonts were never looked for.
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "fonts"))
    done = train([*TINY, "trainer.epochs=1", "hydra.run.dir=run"], tmp_path)
    assert done.returncode == 0 and "fontManager" not in done.stdout, done.stderr
    assert (tmp_path / "run" / "curves.png").is_file()
    done = start("sweep", ["run"], tmp_path)
    assert done.returncode == 0 and (tmp_path / "run" / "sweep.png").is_file(), done.stderr


# Prints the command that would resume the run in place of the run.
RESUME = """
import sys
from pathlib import Path
from pyg_dfgnn.training import __main__, run

run.train = lambda cfg: print(run.resume_command(Path("run")), cfg.trainer.epochs) or 0.0
__main__.command()
"""


def test_a_resumed_run_has_the_flags_of_hydra(tmp_path):
    (tmp_path / "more" / "experiment").mkdir(parents=True)
    (tmp_path / "more" / "experiment" / "mine.yaml").write_text("# @package _global_\ntrainer:\n  epochs: 3\n")
    (tmp_path / "more" / "mine.yaml").write_text("defaults: [train, _self_]\nseed: 7\n")
    COMMANDS["resume"] = [str(tmp_path / "resume.py")]
    (tmp_path / "resume.py").write_text(RESUME)
    words = ["--config-dir", "more", "-cn", "mine", "experiment=mine", "hydra.run.dir=run"]
    done = start("resume", words, tmp_path)
    assert done.returncode == 0, done.stderr
    *command, epochs = shlex.split(done.stdout)
    flags = [f"--config-dir={tmp_path / 'more'}", "--config-name=mine", "hydra.run.dir=run", "experiment=mine"]
    assert command == [sys.executable, str(tmp_path / "resume.py"), *flags, f"resume={tmp_path / 'run'}"]
    assert epochs == "3"
    again = start("resume", command[2:], tmp_path)
    assert again.stdout == done.stdout, again.stderr


def test_a_sweep_that_is_not_there_is_one_line(tmp_path):
    done = start("sweep", ["nothere"], tmp_path)
    line = "FileNotFoundError: 'folder' needs at least one run with metrics.json (got nothere) (HYDRA_FULL_ERROR=1"
    assert done.returncode == 1 and done.stderr.startswith(line) and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_without_hydra_each_command_names_the_extra_in_one_line(tmp_path, name):
    (tmp_path / "sitecustomize.py").write_text("import sys\n\nsys.modules['hydra'] = None\n")
    done = start(name, [], tmp_path)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert 'need hydra: pip install ".[train]"' in done.stderr


def test_jobs_of_slurm_name_the_extra(tmp_path):
    hide = "import sys\n\nsys.modules['hydra_plugins.hydra_submitit_launcher'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hide)
    done = start("training", ["-m", "hydra/launcher=slurm", "seed=0"], tmp_path)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert 'need the extra cluster: pip install ".[cluster]" (HYDRA' in done.stderr


def test_sweep_without_runs(tmp_path):
    with pytest.raises(FileNotFoundError, match="'folder' needs at least one run with metrics.json"):
        sweep_module.collect(tmp_path)
