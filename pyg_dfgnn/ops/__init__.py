"""Functional operators with autograd. With this package all families of ops are known by their names."""

from pyg_dfgnn.ops import relational, segment
from pyg_dfgnn.ops.attention.functional import (
    add_attention,
    cosine_attention,
    dot_attention,
    edge_attention,
    gatv2_attention,
    supergat_attention,
)

__all__ = [
    "relational",
    "segment",
    "add_attention",
    "cosine_attention",
    "dot_attention",
    "edge_attention",
    "gatv2_attention",
    "supergat_attention",
]
