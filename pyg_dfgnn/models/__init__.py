"""Attention models for classification of nodes or, through the mean over its nodes, of graphs.

Each takes its convolutions from a namespace, `convs=torch_geometric.nn` or `convs=pyg_dfgnn.nn`; parameters, their
names and their initialisation are the same either way.
"""

from pyg_dfgnn.models.agnn import AGNN
from pyg_dfgnn.models.gat import GAT, GATv2
from pyg_dfgnn.models.graph_transformer import GraphTransformer
from pyg_dfgnn.models.transformer_stack import TransformerStack

__all__ = ["AGNN", "GAT", "GATv2", "GraphTransformer", "TransformerStack"]
