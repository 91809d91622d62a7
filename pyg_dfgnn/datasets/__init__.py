"""Tasks on nodes, graphs and links: published data sets from files, and generated data sets at their size."""

from pyg_dfgnn.datasets.encoding import LaplacianEncoding
from pyg_dfgnn.datasets.like import (
    image_superpixels_like,
    log_normal_graph,
    log_normal_pieces_graph,
    photograph_superpixels_like,
)
from pyg_dfgnn.datasets.molecules import qm9, solubility
from pyg_dfgnn.datasets.networks import co_purchase, facebook, heterophilous, reddit
from pyg_dfgnn.datasets.planetoid import planetoid, pubmed_made_features
from pyg_dfgnn.datasets.relational import entities, fb15k237, imdb
from pyg_dfgnn.datasets.relational_like import entities_like, links_like
from pyg_dfgnn.datasets.sbm import cluster, pattern
from pyg_dfgnn.datasets.superpixels import image_superpixels, photograph_superpixels
from pyg_dfgnn.datasets.task import Task

__all__ = [
    "LaplacianEncoding",
    "Task",
    "cluster",
    "co_purchase",
    "entities",
    "entities_like",
    "facebook",
    "fb15k237",
    "heterophilous",
    "image_superpixels",
    "image_superpixels_like",
    "imdb",
    "links_like",
    "log_normal_graph",
    "log_normal_pieces_graph",
    "pattern",
    "photograph_superpixels",
    "photograph_superpixels_like",
    "planetoid",
    "pubmed_made_features",
    "qm9",
    "reddit",
    "solubility",
]
