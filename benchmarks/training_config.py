"""Configs of train.py, composed inside of a command that may itself have been started by Hydra."""

from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from pyg_dfgnn.paths import configs_dir


def training_config(overrides: Sequence[str]) -> DictConfig:
    """Return the config of `train.py` with these overrides, as on its command line."""
    instance = GlobalHydra.instance()
    outer, instance.hydra = instance.hydra, None
    try:
        with initialize_config_dir(str(configs_dir()), version_base="1.3"):
            return compose("train", list(overrides))
    finally:
        GlobalHydra.instance().hydra = outer
