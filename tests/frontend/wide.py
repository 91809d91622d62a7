"""PyG's layers whose edges become programs whole, each as wide as its input."""

from collections.abc import Callable

import torch
import torch_geometric.nn.conv as pyg
from torch import Tensor, nn

HEADS, EDGE = 8, 8
NUMBER, FEATURES = (), (EDGE,)
"""Sizes of what a layer takes of an edge."""

Make = Callable[[int], nn.Module]


def _attention(kind: type[nn.Module], **options: bool) -> tuple[Make, None]:
    return lambda width: kind(width, width // HEADS, HEADS, **options), None


WIDE: dict[str, tuple[Make, tuple[int, ...] | None]] = {
    "ARMAConv": (lambda w: pyg.ARMAConv(w, w, num_layers=2), NUMBER),
    "CGConv": (lambda w: pyg.CGConv(w, dim=EDGE), FEATURES),
    "ClusterGCNConv": (lambda w: pyg.ClusterGCNConv(w, w), None),
    "EGConv": (lambda w: pyg.EGConv(w, w, ["sum", "mean", "max"]), None),
    "FAConv": (lambda w: pyg.FAConv(w), None),
    "FeaStConv": (lambda w: pyg.FeaStConv(w, w, heads=4), None),
    "GATConv": _attention(pyg.GATConv, add_self_loops=False),
    "GATv2Conv": _attention(pyg.GATv2Conv, add_self_loops=False),
    "GCNConv": (lambda w: pyg.GCNConv(w, w, normalize=False), NUMBER),
    "GENConv": (lambda w: pyg.GENConv(w, w), None),
    "GINConv": (lambda w: pyg.GINConv(nn.Linear(w, w)), None),
    "GINEConv": (lambda w: pyg.GINEConv(nn.Linear(w, w), edge_dim=EDGE), FEATURES),
    "GMMConv": (lambda w: pyg.GMMConv(w, w, dim=EDGE, kernel_size=2), FEATURES),
    "GatedGraphConv": (lambda w: pyg.GatedGraphConv(w, 1), NUMBER),
    "GeneralConv": (lambda w: pyg.GeneralConv(w, w, EDGE, attention=True), FEATURES),
    "LEConv": (lambda w: pyg.LEConv(w, w), NUMBER),
    "MFConv": (lambda w: pyg.MFConv(w, w, max_degree=4), None),
    "MixHopConv": (lambda w: pyg.MixHopConv(w, w), NUMBER),
    "ResGatedGraphConv": (lambda w: pyg.ResGatedGraphConv(w, w), None),
    "SSGConv": (lambda w: pyg.SSGConv(w, w, alpha=0.1, K=2), NUMBER),
    "SimpleConv": (lambda w: pyg.SimpleConv("mean"), NUMBER),
    "TransformerConv": _attention(pyg.TransformerConv),
}
"""Name -> the layer by its width, and the size of what it takes of each edge; None: nothing."""


def arguments(name: str, x: Tensor, edge_index: Tensor) -> tuple[Tensor, ...]:
    """Return the arguments of a call of a layer; weights and features of edges are positive."""
    size = WIDE[name][1]
    generator = torch.Generator().manual_seed(0)
    edge = [] if size is None else [torch.rand(edge_index.size(1), *size, generator=generator).to(x.dtype) + 0.1]
    # FAConv takes the features of the first layer beside those of the last.
    return (*([x, x] if name == "FAConv" else [x]), edge_index, *edge)
