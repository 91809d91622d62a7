"""Drop-ins for PyG's attention convs and its linear layer: same names, arguments, parameters, results."""

from pyg_dfgnn.nn.accelerate import accelerate, describe_plan
from pyg_dfgnn.nn.agnn_conv import AGNNConv
from pyg_dfgnn.nn.gat_conv import GATConv
from pyg_dfgnn.nn.gatv2_conv import GATv2Conv
from pyg_dfgnn.nn.projection import Linear
from pyg_dfgnn.nn.transformer_conv import TransformerConv

__all__ = ["AGNNConv", "GATConv", "GATv2Conv", "Linear", "TransformerConv", "accelerate", "describe_plan"]
