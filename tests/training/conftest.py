"""Tiny runs, composed as train.py composes them, and the folder of a sweep."""

import json

import pytest
from omegaconf import OmegaConf

from pyg_dfgnn.training import run as run_module
from pyg_dfgnn.training.run import train
from tests.configs.train import train_config

TINY = [
    "backend=pyg",
    "device=cpu",
    "data.task.num_train=6",
    "data.task.num_val=3",
    "data.task.num_test=3",
    "+data.task.num_communities=3",
    "data.task.max_size=8",
    "trainer.epochs=4",
    "trainer.loader.batch_size=2",
    "trainer.progress=false",
]


@pytest.fixture
def drawn():
    """Lets the runs of a test draw their curves."""


@pytest.fixture(autouse=True)
def empty_curves(request, monkeypatch):
    """Drawing takes a third of a tiny run: the file of its curves is empty, but in tests that look into it."""

    def plot_curves(path, *shown):
        path.touch()
        return path

    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(run_module, "plot_curves", plot_curves)


@pytest.fixture
def configure(tmp_path):
    """configure(folder, *overrides) -> config of a tiny PATTERN run with that run folder."""

    def make(folder="run", *overrides):
        return train_config(*TINY, f"paths.run={tmp_path / folder}", *overrides)

    return make


@pytest.fixture
def run(configure, tmp_path):
    """run(folder, *overrides) trains and returns (metric, run folder)."""

    def go(folder="run", *overrides):
        return train(configure(folder, *overrides)), tmp_path / folder

    return go


@pytest.fixture
def folder(tmp_path):
    """The folder of a sweep: two settings with two seeds each, as runs leave them."""
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
