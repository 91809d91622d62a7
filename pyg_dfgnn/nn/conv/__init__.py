"""Drop-ins for `torch_geometric.nn.conv`."""

from torch_geometric.nn import conv as upstream

from pyg_dfgnn.nn.conv.agnn_conv import AGNNConv
from pyg_dfgnn.nn.conv.gat_conv import GATConv
from pyg_dfgnn.nn.conv.gatv2_conv import GATv2Conv
from pyg_dfgnn.nn.conv.transformer_conv import TransformerConv
from pyg_dfgnn.nn.drop_ins import DROP_INS

DROP_INS.update(
    {
        upstream.AGNNConv: AGNNConv,
        upstream.GATConv: GATConv,
        upstream.GATv2Conv: GATv2Conv,
        upstream.TransformerConv: TransformerConv,
    }
)
__all__ = ["AGNNConv", "GATConv", "GATv2Conv", "TransformerConv"]
