"""Transforms of PyG's `Data` that the fused kernels gain from: nodes in a better order."""

from pyg_dfgnn.transforms.reorder import Reorder, break_even_epochs, restore_order

__all__ = ["Reorder", "break_even_epochs", "restore_order"]
