"""Drop-ins for layers of `torch_geometric.nn`: same names, arguments, parameters, results."""

from pyg_dfgnn.nn.accelerate import accelerate, describe_plan, report
from pyg_dfgnn.nn.conv import AGNNConv, GATConv, GATv2Conv, TransformerConv
from pyg_dfgnn.nn.dense import Linear
from pyg_dfgnn.nn.drop_ins import DROP_INS

__all__ = [
    "DROP_INS",
    "AGNNConv",
    "GATConv",
    "GATv2Conv",
    "Linear",
    "TransformerConv",
    "accelerate",
    "describe_plan",
    "report",
]
