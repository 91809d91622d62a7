"""Metrics of epochs in TensorBoard and Weights & Biases."""

import csv
import sys
from contextlib import contextmanager
from types import ModuleType

import pytest


def rows_of(folder):
    with open(folder / "metrics.csv") as stream:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(stream)]


class Writer:
    """Stands in for TensorBoard's writer."""

    written, is_closed = {}, False

    def __init__(self, folder):
        Writer.written, Writer.is_closed, self.folder = {"folder": folder}, False, folder

    def __enter__(self):
        return self

    def __exit__(self, *_):
        Writer.is_closed = True

    def add_scalar(self, name, value, epoch):
        Writer.written[name, epoch] = value


class Project:
    """Stands in for wandb."""

    def __init__(self):
        self.started, self.logged, self.is_finished = [], [], False

    @contextmanager
    def init(self, **options):
        self.started.append(options)
        try:
            yield self
        finally:
            self.is_finished = True

    def log(self, metrics, step):
        self.logged.append({"epoch": step, **metrics})


@pytest.fixture
def packages(monkeypatch):
    """Both packages, as far as a run calls them; returns the stand-in for wandb."""
    project, writers = Project(), ModuleType("torch.utils.tensorboard")
    writers.SummaryWriter = Writer
    for name, module in {"tensorboard": ModuleType("t"), writers.__name__: writers, "wandb": project}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return project


def test_both_loggers_get_the_metrics_of_each_epoch(run, packages):
    _, folder = run("run", "trainer.tensorboard=true", "trainer.wandb=mine")
    rows = rows_of(folder)
    assert len(rows) == 4 and packages.logged == rows and packages.is_finished and Writer.is_closed
    (started,) = packages.started
    assert started["project"] == "mine" and started["dir"] == str(folder)
    assert started["config"]["trainer"]["epochs"] == 4
    expected = {(name, int(row["epoch"])): value for row in rows for name, value in row.items() if name != "epoch"}
    assert Writer.written == {"folder": str(folder / "tensorboard"), **expected}


def test_a_resumed_run_goes_on_with_its_epochs(run, packages, tmp_path):
    run("run", "scheduler=constant", "trainer.epochs=2", "trainer.wandb=mine")
    run("more", "scheduler=constant", "trainer.wandb=mine", f"resume={tmp_path / 'run'}")
    assert [row["epoch"] for row in packages.logged] == [1, 2, 3, 4]


def test_neither_is_called_by_default(run, packages):
    Writer.written = {}
    run()
    assert not packages.started and not Writer.written


@pytest.mark.parametrize(("option", "package"), [("tensorboard=true", "tensorboard"), ("wandb=mine", "wandb")])
def test_a_missing_package_is_named_before_the_run(run, monkeypatch, tmp_path, option, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"trainer.{package} need {package}: pip install \"\.\[loggers\]\""):
        run("run", f"trainer.{option}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("tensorboard=2", "'trainer.tensorboard' needs True or False"),
        ("wandb=3", "'trainer.wandb' needs the name of a"),
    ],
)
def test_wrong_options(run, option, said):
    with pytest.raises(TypeError, match=said):
        run("run", f"trainer.{option}")


def test_tensorboard_reads_what_was_written(run):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    _, folder = run("run", "trainer.tensorboard=true")
    read = events.EventAccumulator(str(folder / "tensorboard")).Reload()
    losses = {event.step: event.value for event in read.Scalars("val_loss")}
    assert losses == pytest.approx({int(row["epoch"]): row["val_loss"] for row in rows_of(folder)}, rel=1e-6)
