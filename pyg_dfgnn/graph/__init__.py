"""Graphs as cached CSR and CSC, from every form of edges that PyG takes."""

from pyg_dfgnn.graph.adjacency import Adjacency
from pyg_dfgnn.graph.chunks import Chunks
from pyg_dfgnn.graph.device_dataset import DeviceDataset
from pyg_dfgnn.graph.edge_set import EdgeSet
from pyg_dfgnn.graph.graph import Graph
from pyg_dfgnn.graph.refilled import RefilledGraph, StaticGroups
from pyg_dfgnn.graph.relations import compact_rows

__all__ = [
    "Adjacency",
    "Chunks",
    "DeviceDataset",
    "EdgeSet",
    "Graph",
    "RefilledGraph",
    "StaticGroups",
    "compact_rows",
]
