"""Three layers of each kind, as they are compared on several GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import pyg_dfgnn
import pyg_dfgnn.nn as convs
from benchmarks.loops.cases import mlp
from pyg_dfgnn import models

TYPES, RELATIONS, WIDTH, CLASSES = ("a", "b"), 3, 64, 8


class Stack(nn.Module):
    """Three layers of one kind, which `make` returns for numbers of inputs and outputs."""

    def __init__(self, make: Callable[[int, int], nn.Module], hidden: int = 128, width: int = WIDTH) -> None:
        super().__init__()
        self.convs = nn.ModuleList([make(width, hidden), make(hidden, hidden), make(hidden, CLASSES)])

    def forward(self, x: Tensor, edges: Any, *more: Tensor) -> Tensor:
        for place, conv in enumerate(self.convs):
            # Smooth: where results are equal but for rounding, gradients at a kink would not be.
            x = conv(x if place == 0 else x.tanh(), edges, *more)
        return x


class HeteroStack(nn.Module):
    """Three `HGTConv`; logits are of the first node type."""

    def __init__(self, metadata: Any) -> None:
        super().__init__()
        self.convs = nn.ModuleList([convs.HGTConv(WIDTH, WIDTH, metadata, heads=4) for _ in range(3)])
        self.lin = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: dict[str, Tensor], edges: Any) -> Tensor:
        for conv in self.convs:
            x = conv(x, edges)
        return self.lin(x[TYPES[0]])


def _heads(conv: Any) -> Callable[[int, int], nn.Module]:
    return lambda i, o: conv(i, o // 8 if o > 8 else o, heads=8, concat=o > 8)


class Own(pyg.MessagePassing):
    """A layer of a user's own: a gate of both ends."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(aggr="add")
        self.lin, self.gate = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), gate=self.gate(x))

    def message(self, x_j: Tensor, gate_i: Tensor, gate_j: Tensor) -> Tensor:
        return torch.sigmoid(gate_i + gate_j) * x_j


PNA = (["mean", "max", "std"], ["identity", "amplification"])
LAYERS: dict[str, Callable[[Tensor], nn.Module]] = {
    # Histogram of in-degrees -> three layers.
    "GCN": lambda _: Stack(convs.GCNConv),
    "SAGE": lambda _: Stack(convs.SAGEConv),
    "SAGE max": lambda _: Stack(partial(convs.SAGEConv, aggr="max")),
    "GIN": lambda _: Stack(lambda i, o: convs.GINConv(mlp(i, o))),
    "GAT": lambda _: Stack(_heads(convs.GATConv)),
    "Transformer": lambda _: Stack(_heads(convs.TransformerConv)),
    "AGNN": lambda _: models.AGNN(WIDTH, CLASSES, convs, hidden_channels=128, layers=3, dropout=0.0),
    "PNA": lambda histogram: Stack(lambda i, o: convs.PNAConv(i, o, *PNA, histogram), 64),
    "RGCN": lambda _: Stack(lambda i, o: convs.RGCNConv(i, o, RELATIONS), 64),
    # Of layers without a drop-in, whose own code runs on a part.
    "GEN": lambda _: pyg_dfgnn.accelerate(Stack(lambda i, o: pyg.GENConv(i, o, norm=None), 64)),
    "a user's own": lambda _: pyg_dfgnn.accelerate(Stack(Own)),
}
LARGE = ("GCN", "SAGE", "GAT", "Transformer", "RGCN")
"""Layers that are timed on large graphs."""
CAPTURED = ("GCN", "SAGE", "GAT", "Transformer", "AGNN")
"""Layers whose steps are captured too."""
