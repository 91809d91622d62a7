"""Drop-ins for layers of `torch_geometric.nn`: same names, arguments, parameters, results."""

from pyg_dfgnn.nn.accelerate import accelerate, describe_plan, report
from pyg_dfgnn.nn.conv import (
    APPNP,
    AGNNConv,
    ChebConv,
    GATConv,
    GATv2Conv,
    GCN2Conv,
    GCNConv,
    GINConv,
    GINEConv,
    GraphConv,
    LGConv,
    ResGatedGraphConv,
    SAGEConv,
    SGConv,
    TAGConv,
    TransformerConv,
)
from pyg_dfgnn.nn.dense import Linear
from pyg_dfgnn.nn.drop_ins import DROP_INS

__all__ = [
    "DROP_INS",
    "AGNNConv",
    "APPNP",
    "ChebConv",
    "GATConv",
    "GATv2Conv",
    "GCN2Conv",
    "GCNConv",
    "GINConv",
    "GINEConv",
    "GraphConv",
    "LGConv",
    "Linear",
    "ResGatedGraphConv",
    "SAGEConv",
    "SGConv",
    "TAGConv",
    "TransformerConv",
    "accelerate",
    "describe_plan",
    "report",
]
