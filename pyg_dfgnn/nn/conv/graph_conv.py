"""Drop-in for PyG's GraphConv on the fused aggregation."""

from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptPairTensor, OptTensor, Size

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.aggregation import AggregationConv
from pyg_dfgnn.nn.conv_call import ConvCall
from pyg_dfgnn.nn.gate import methods_of


class GraphConv(AggregationConv, conv.GraphConv):
    """PyG's `GraphConv` with one fused kernel per direction: same arguments, parameters, results and gradients.

    `x'_i = W_1 x_i + W_2 aggr_j e_ij x_j`

    Source: Morris et al., "Weisfeiler and Leman Go Neural", 2019.
    """

    propagate_type = {"x": OptPairTensor, "edge_weight": OptTensor}
    _upstream_methods = methods_of(conv.GraphConv)

    def _call(
        self,
        x: Tensor | OptPairTensor,
        edge_index: Adj | Graph,
        edge_weight: OptTensor = None,
        size: Size = None,
    ) -> ConvCall:
        return self._check_support(x, edge_index, edge_weight, size=size)

    def forward(
        self,
        x: Tensor | OptPairTensor,
        edge_index: Adj | Graph,
        edge_weight: OptTensor = None,
        size: Size = None,
    ) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.GraphConv.forward`."""
        out, is_output = self._reduced(x, edge_index, size, edge_weight=edge_weight)
        if is_output:
            return out  # type: ignore[no-any-return]
        x_dst = x if isinstance(x, Tensor) else x[1]
        out = self.lin_rel(out)
        return out if x_dst is None else out + self.lin_root(x_dst)
