"""Graphs as cached CSR and CSC, from every form of edges that PyG takes."""

from pyg_dfgnn.graph.adjacency import Adjacency, Chunks, ColumnBlocks
from pyg_dfgnn.graph.batch import BatchFacts, SortEdges
from pyg_dfgnn.graph.device_dataset import DeviceDataset
from pyg_dfgnn.graph.graph import EdgeSet, Graph
from pyg_dfgnn.graph.static import Frame

__all__ = [
    "Adjacency",
    "BatchFacts",
    "Chunks",
    "ColumnBlocks",
    "EdgeSet",
    "Frame",
    "Graph",
    "DeviceDataset",
    "SortEdges",
]
