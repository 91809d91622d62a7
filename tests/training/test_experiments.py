"""Every experiment composes and trains for an epoch on a CPU, with its data set and model made small."""

import json

import pytest
from omegaconf import OmegaConf
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

import pyg_dfgnn.nn
from pyg_dfgnn.datasets.files import SEARCH
from pyg_dfgnn.paths import configs_dir
from pyg_dfgnn.training.run import train
from tests.configs.train import train_config

EXPERIMENTS = sorted(path.stem for path in (configs_dir() / "experiment").glob("*.yaml"))
SMALL_GRAPHS = {"num_train": 4, "num_val": 2, "num_test": 2, "max_size": 7}
# By the function that makes the data set; real files where they are small.
TASKS = {
    "pattern": {**SMALL_GRAPHS, "num_patterns": 2},
    "cluster": SMALL_GRAPHS,
    "image_superpixels": {"source": "pixels", "num_graphs": 30},
    "facebook": {"name": "reed98"},
    "log_normal_graph": {"scale": 2e-3, "mean_degree": 10},
    "log_normal_pieces_graph": {"scale": 2e-5, "max_degree": 1e6, "piece": 10_000},
    "fb15k237": {"num_train": 100, "num_val": 20, "num_test": 20},
}
RELATIONAL = ("RGCN", "RGAT", "HGT", "DistMult")
MODEL = {"hidden_channels": 4, "heads": 2, "layers": 2}


def tiny(experiment, folder):
    """The config of an experiment with everything small."""
    cfg = train_config(f"experiment={experiment}", f"paths.run={folder}", "device=cpu", "trainer.epochs=1")
    task = cfg.data.task
    task.update(TASKS.get(task._target_.split(".")[-1], {}))
    OmegaConf.update(cfg, "paths.cache", str(folder / "cache"))
    OmegaConf.update(cfg, "paths.data", list(SEARCH))
    if "download" in task:
        task.download = False
    cfg.model.update({name: value for name, value in MODEL.items() if name in cfg.model})
    if cfg.trainer.loader is not None:
        cfg.trainer.loader.batch_size = 100 if cfg.model._target_.endswith("DistMult") else 2
    if cfg.model._target_.split(".")[-1] in RELATIONAL and not hasattr(pyg_dfgnn.nn, "RGCNConv"):
        cfg.backend.convs = "torch_geometric.nn"
    cfg.trainer.progress = False
    return cfg


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_trains(experiment, tmp_path):
    cfg = tiny(experiment, tmp_path)
    if cfg.trainer.sampler is not None and not (WITH_PYG_LIB or WITH_TORCH_SPARSE):
        cfg.trainer.sampler = None
    try:
        metric = train(cfg)
    except (FileNotFoundError, ImportError) as error:
        pytest.skip(str(error).splitlines()[0])
    summary = json.loads((tmp_path / "metrics.json").read_text())
    assert summary["epochs"] == 1 and summary["test_accuracy"] == metric and 0 <= metric <= 1
    assert (tmp_path / "curves.png").is_file() and (tmp_path / "checkpoints" / "best.pt").is_file()
