"""Drop-ins for `torch_geometric.nn.conv`."""

from torch_geometric.nn import conv as upstream

from pyg_dfgnn.nn.conv.agnn_conv import AGNNConv
from pyg_dfgnn.nn.conv.appnp import APPNP
from pyg_dfgnn.nn.conv.arma_conv import ARMAConv
from pyg_dfgnn.nn.conv.cheb_conv import ChebConv
from pyg_dfgnn.nn.conv.cluster_gcn_conv import ClusterGCNConv
from pyg_dfgnn.nn.conv.film_conv import FiLMConv
from pyg_dfgnn.nn.conv.gat_conv import GATConv
from pyg_dfgnn.nn.conv.gatv2_conv import GATv2Conv
from pyg_dfgnn.nn.conv.gcn2_conv import GCN2Conv
from pyg_dfgnn.nn.conv.gcn_conv import GCNConv
from pyg_dfgnn.nn.conv.gin_conv import GINConv, GINEConv
from pyg_dfgnn.nn.conv.graph_conv import GraphConv
from pyg_dfgnn.nn.conv.han_conv import HANConv
from pyg_dfgnn.nn.conv.heat_conv import HEATConv
from pyg_dfgnn.nn.conv.hetero_conv import HeteroConv
from pyg_dfgnn.nn.conv.hgt_conv import HGTConv
from pyg_dfgnn.nn.conv.lg_conv import LGConv
from pyg_dfgnn.nn.conv.pna_conv import PNAConv
from pyg_dfgnn.nn.conv.res_gated_graph_conv import ResGatedGraphConv
from pyg_dfgnn.nn.conv.rgat_conv import RGATConv
from pyg_dfgnn.nn.conv.rgcn_conv import FastRGCNConv, RGCNConv
from pyg_dfgnn.nn.conv.sage_conv import SAGEConv
from pyg_dfgnn.nn.conv.sg_conv import SGConv
from pyg_dfgnn.nn.conv.ssg_conv import SSGConv
from pyg_dfgnn.nn.conv.super_gat_conv import SuperGATConv
from pyg_dfgnn.nn.conv.tag_conv import TAGConv
from pyg_dfgnn.nn.conv.transformer_conv import TransformerConv
from pyg_dfgnn.nn.registry import CONTAINERS, DROP_INS

__all__ = [
    "AGNNConv",
    "APPNP",
    "ARMAConv",
    "ChebConv",
    "ClusterGCNConv",
    "FastRGCNConv",
    "FiLMConv",
    "GATConv",
    "GATv2Conv",
    "GCN2Conv",
    "GCNConv",
    "GINConv",
    "GINEConv",
    "GraphConv",
    "HANConv",
    "HEATConv",
    "HGTConv",
    "HeteroConv",
    "LGConv",
    "PNAConv",
    "RGATConv",
    "RGCNConv",
    "ResGatedGraphConv",
    "SAGEConv",
    "SGConv",
    "SSGConv",
    "SuperGATConv",
    "TAGConv",
    "TransformerConv",
]
CONTAINERS[upstream.HeteroConv] = HeteroConv
DROP_INS.update({getattr(upstream, name): globals()[name] for name in __all__ if name != "HeteroConv"})
