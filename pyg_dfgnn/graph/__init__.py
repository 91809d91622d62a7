"""Graphs as cached CSR and CSC, from every form of edges that PyG takes."""

from pyg_dfgnn.graph.adjacency import Adjacency, Chunks, ColumnBlocks
from pyg_dfgnn.graph.batch import SortEdges
from pyg_dfgnn.graph.graph import EdgeSet, Graph

__all__ = ["Adjacency", "Chunks", "ColumnBlocks", "EdgeSet", "Graph", "SortEdges"]
