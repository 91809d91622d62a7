"""Node classification tasks: generated SBM graphs and the Planetoid citation graphs."""

from pyg_dfgnn.datasets.encoding import LaplacianEncoding
from pyg_dfgnn.datasets.planetoid import planetoid, pubmed_made_features
from pyg_dfgnn.datasets.sbm import cluster, pattern
from pyg_dfgnn.datasets.task import Task

__all__ = ["LaplacianEncoding", "Task", "cluster", "pattern", "planetoid", "pubmed_made_features"]
