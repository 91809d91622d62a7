"""Training of models for the classification of nodes or graphs."""

from pyg_dfgnn.training.run import train

__all__ = ["train"]
