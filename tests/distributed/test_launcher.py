"""The launcher of a cluster composes, with one process per GPU."""

import pytest
from hydra.utils import get_class

from tests.configs.train import hydra_config


def test_one_process_per_gpu():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs pip install 'pyg_dfgnn[cluster]'")
    overrides = ["hydra/launcher=slurm", "hydra.launcher.gpus_per_node=4", "hydra.launcher.partition=gpu"]
    launcher = hydra_config(*overrides, "hydra.job.name=train", return_hydra_config=True).hydra.launcher
    assert launcher.tasks_per_node == launcher.gpus_per_node == 4 and launcher.partition == "gpu"
    assert get_class(launcher._target_).__name__ == "SlurmLauncher"
