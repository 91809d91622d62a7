"""The four convs on one small graph, and what the gate has against a call."""

import torch

import pyg_dfgnn
import pyg_dfgnn.nn as ours

NAMES = ["GATConv", "GATv2Conv", "TransformerConv", "AGNNConv"]
EDGES = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7], [1, 0, 2, 1, 3, 2, 4, 3, 5, 4, 6, 5, 7, 6]])
NUM_NODES, FEATURES = 8, 3


def make(name, library=ours, in_channels=FEATURES, out_channels=4, **kwargs):
    """A conv of ours or of another library."""
    conv_type = getattr(library, name)
    return conv_type(**kwargs) if name == "AGNNConv" else conv_type(in_channels, out_channels, **kwargs)


def reasons_of(conv, *args, **kwargs):
    """Why PyG's own code would take a call."""
    return list(pyg_dfgnn.describe_plan(conv, *args, **kwargs).reasons)
