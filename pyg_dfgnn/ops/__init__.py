"""Functional operators with autograd, registered with torch.library."""

from pyg_dfgnn.ops.attention.functional import (
    add_attention,
    cosine_attention,
    dot_attention,
    edge_attention,
    gatv2_attention,
    supergat_attention,
)

__all__ = [
    "add_attention",
    "cosine_attention",
    "dot_attention",
    "edge_attention",
    "gatv2_attention",
    "supergat_attention",
]
