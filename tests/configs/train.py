"""Configs of `train.py`, composed as Hydra composes them."""

from hydra import compose, initialize_config_dir

from pyg_dfgnn.paths import configs_dir


def train_config(*overrides, **options):
    with initialize_config_dir(str(configs_dir()), version_base="1.3"):
        return compose("train", list(overrides), **options)
