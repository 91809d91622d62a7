"""Models of nodes or, by the mean over their nodes, of graphs, for classes or values, or that score links.

A model takes its convolutions from a namespace, `convs=torch_geometric.nn` or `convs=pyg_dfgnn.nn`; both give equal
parameters with equal names and initialisation.
"""

from pyg_dfgnn.models.agnn import AGNN
from pyg_dfgnn.models.continuous_filter import ContinuousFilterNet
from pyg_dfgnn.models.conv_stack import GCN, GIN, GINE, PNA, SAGE, ResGatedGCN
from pyg_dfgnn.models.gat import GAT, GATv2
from pyg_dfgnn.models.graph_transformer import GraphTransformer
from pyg_dfgnn.models.relational import HGT, RGAT, RGCN, DistMult
from pyg_dfgnn.models.transformer_stack import TransformerStack

__all__ = [
    "AGNN",
    "GAT",
    "GCN",
    "GIN",
    "GINE",
    "HGT",
    "PNA",
    "RGAT",
    "RGCN",
    "SAGE",
    "ContinuousFilterNet",
    "DistMult",
    "GATv2",
    "GraphTransformer",
    "ResGatedGCN",
    "TransformerStack",
]
