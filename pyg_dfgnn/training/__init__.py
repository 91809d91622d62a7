"""Training of node classification models."""

from pyg_dfgnn.training.run import train

__all__ = ["train"]
