"""Runs small enough for a test, composed as train.py composes them."""

import pytest
from hydra import compose, initialize_config_dir

from pyg_dfgnn.paths import configs_dir
from pyg_dfgnn.training.run import train

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
def configure(tmp_path):
    """configure(folder, *overrides) -> config of a tiny PATTERN run with that run folder."""

    def make(folder="run", *overrides):
        with initialize_config_dir(str(configs_dir()), version_base="1.3"):
            return compose("train", [*TINY, f"paths.run={tmp_path / folder}", *overrides])

    return make


@pytest.fixture
def run(configure, tmp_path):
    """run(folder, *overrides) trains and returns (metric, run folder)."""

    def go(folder="run", *overrides):
        return train(configure(folder, *overrides)), tmp_path / folder

    return go
