"""Drop-ins for PyG's attention convs and its linear layer: same names, arguments, parameters, results."""

from pyg_dfgnn.nn.accelerate import accelerate, describe_plan
from pyg_dfgnn.nn.conv.agnn_conv import AGNNConv
from pyg_dfgnn.nn.conv.gat_conv import GATConv
from pyg_dfgnn.nn.conv.gatv2_conv import GATv2Conv
from pyg_dfgnn.nn.conv.transformer_conv import TransformerConv
from pyg_dfgnn.nn.dense.linear import Linear

__all__ = ["AGNNConv", "GATConv", "GATv2Conv", "Linear", "TransformerConv", "accelerate", "describe_plan"]
