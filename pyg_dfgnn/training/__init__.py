"""Training of models for the classification of nodes or graphs: :func:`pyg_dfgnn.training.run.train`."""

from pyg_dfgnn.errors import need_extra

need_extra("hydra", "training runs", "train")
