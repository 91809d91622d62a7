"""Transforms of PyG's `Data` that the fused kernels gain from: nodes in a better order, edges sorted once."""

from pyg_dfgnn.graph import SortEdges
from pyg_dfgnn.transforms.reorder import Reorder, break_even_epochs, restore_order

__all__ = ["Reorder", "SortEdges", "break_even_epochs", "restore_order"]
