"""Configs of train.py for commands that Hydra may have started, and the gradients that a step left in a model."""

from collections.abc import Sequence

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from torch import Tensor, nn

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


def flat_gradient(model: nn.Module) -> Tensor:
    """Return the gradients of all parameters, one after the other; zeros where a parameter has none."""
    gradients = (torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in model.parameters())
    return torch.cat([gradient.flatten() for gradient in gradients])
