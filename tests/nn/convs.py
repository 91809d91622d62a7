"""Convs of ours and of PyG with the arguments that they need, a small graph, and what the gate has against a call."""

import copy

import torch
import torch_geometric.nn as pyg
from torch.nn import Linear, ReLU, Sequential

import pyg_dfgnn
import pyg_dfgnn.nn as ours

NORMALIZED = ["GCNConv", "GCN2Conv", "SGConv", "SSGConv", "TAGConv", "APPNP", "ChebConv", "LGConv", "ARMAConv"]
PAIRS = ["GraphConv", "SAGEConv", "GINConv", "GINEConv", "ResGatedGraphConv"]
AGGREGATION = [*NORMALIZED, *PAIRS, "ClusterGCNConv"]
"""The convs without attention: on a normalised adjacency, those that take a pair of node sets, and one with loops."""
LOOPED = ["GATConv", "GATv2Conv", "AGNNConv", "GCNConv", "GCN2Conv", "SGConv", "SSGConv", "APPNP", "ClusterGCNConv"]
"""The convs that replace self-loops."""
NAMES = ["GATConv", "GATv2Conv", "TransformerConv", "AGNNConv", "GCNConv", "SAGEConv"]
"""The convs of attention and two without it."""
EDGES = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7], [1, 0, 2, 1, 3, 2, 4, 3, 5, 4, 6, 5, 7, 6]])
NUM_NODES, FEATURES = 8, 3


def arguments(name, in_channels=FEATURES, out_channels=4):
    """What the constructor of a conv needs."""
    if name in ("AGNNConv", "LGConv"):
        return ()
    if name in ("GINConv", "GINEConv"):
        return (Sequential(Linear(in_channels, 8), ReLU(), Linear(8, out_channels)),)
    own = {"GCN2Conv": (in_channels, 0.3), "APPNP": (3, 0.2)}
    own |= {"ChebConv": (in_channels, out_channels, 4), "SSGConv": (in_channels, out_channels, 0.3)}
    return own.get(name, (in_channels, out_channels))


def make(name, library=ours, in_channels=FEATURES, out_channels=4, **kwargs):
    """A conv of ours or of another library."""
    return getattr(library, name)(*arguments(name, in_channels, out_channels), **kwargs)


def both(name, *args, dtype=torch.float64, std=0.5, **kwargs):
    """The conv of ours and of PyG with the same random parameters."""
    args = args or arguments(name)
    convs = [getattr(library, name)(*copy.deepcopy(args), **kwargs).to(dtype) for library in (ours, pyg)]
    for parameter in convs[0].parameters():
        parameter.data.normal_(std=std)
    convs[1].load_state_dict(convs[0].state_dict())
    return convs


def trained(conv, x, *rest, call=None):
    """Output and gradients; a softmax does not see the key's bias."""
    conv.zero_grad()
    x = x.clone().requires_grad_()
    out = (call or conv)(x, *rest)
    out.sin().sum().backward()
    grads = {name: p.grad for name, p in conv.named_parameters() if p.grad is not None and name != "lin_key.bias"}
    return {"out": out.detach(), "x": x.grad, **grads}


def rest_of(name, x, num_edges, width=None):
    """The arguments that a call needs before and after the edges."""
    before = (torch.randn_like(x),) if name == "GCN2Conv" else ()
    after = (x.new_empty(num_edges, width or x.size(-1)).normal_(),) if name == "GINEConv" else ()
    return before, after


def reasons_of(conv, *args, **kwargs):
    """Why PyG's own code would take a call."""
    return list(pyg_dfgnn.describe_plan(conv, *args, **kwargs).reasons)
