"""Marks of layers of any class, such as `accelerate` gives those without a drop-in."""

from pyg_dfgnn.nn.messages import Mark
from pyg_dfgnn.nn.registry import MARK


def compile_layer(layer):
    """Return a layer whose forward is captured."""
    layer.__dict__[MARK] = Mark(type(layer))
    return layer


def release_layer(layer):
    """Return a layer that runs as it was written."""
    layer.__dict__.pop(MARK, None)
    return layer
