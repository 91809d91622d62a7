"""Configs of `train.py`, composed as Hydra composes them."""

from hydra import compose, initialize_config_dir

from pyg_dfgnn.paths import configs_dir
from tests.configs.compose import composed


def train_config(*overrides):
    return composed(configs_dir(), "train", *overrides)


def hydra_config(*overrides, **options):
    """What Hydra itself composes."""
    with initialize_config_dir(str(configs_dir()), version_base="1.3"):
        return compose("train", list(overrides), **options)
