"""Drop-in for PyG's GCNConv on the fused aggregation."""

from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.normalized import NormalizedConv
from pyg_dfgnn.nn.gate import methods_of


class GCNConv(NormalizedConv, conv.GCNConv):
    """PyG's `GCNConv` with one fused kernel per direction: same arguments, parameters, results and gradients.

    `x'_i = W sum_j e_ij / sqrt(d_i d_j) x_j`

    Source: Kipf and Welling, "Semi-Supervised Classification with Graph Convolutional Networks", 2017.
    """

    propagate_type = {"x": Tensor, "edge_weight": OptTensor}
    _upstream_methods = methods_of(conv.GCNConv)
    _is_projected = True
    _channels = "out_channels"
    _keeps_edges = True

    def forward(self, x: Tensor, edge_index: Adj | Graph, edge_weight: OptTensor = None) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.GCNConv.forward`."""
        call = self._call(x, edge_index, edge_weight)
        if call.reasons:
            out: Tensor = self._fall_back(call, x, edge_weight)
            return out
        out = self._aggregate(self._normalized(call, x), self.lin(x))
        return out if self.bias is None else out + self.bias
