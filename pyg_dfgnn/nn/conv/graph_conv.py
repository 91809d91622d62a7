"""Drop-in for PyG's GraphConv on the fused aggregation."""

from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptPairTensor, OptTensor, Size

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.aggregation import AggregationConv
from pyg_dfgnn.nn.edges import Call
from pyg_dfgnn.nn.gate import methods_of
from pyg_dfgnn.ops.visits import run_left


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
    ) -> Call:
        return self._ask(x, edge_index, edge_weight, size=size)

    def forward(
        self,
        x: Tensor | OptPairTensor,
        edge_index: Adj | Graph,
        edge_weight: OptTensor = None,
        size: Size = None,
    ) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.GraphConv.forward`."""
        if self._is_left(x, edge_index, edge_weight):
            left: Tensor = run_left(super().forward, x, edge_index, edge_weight, size=size)
            return left
        call = self._call(x, edge_index, edge_weight, size)
        if call.reasons:
            out: Tensor = self._fall_back(call, x, edge_weight, size=size)
            return out
        x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
        out = self.lin_rel(self._aggregate(self._sent(call), x_src))
        return out if x_dst is None else out + self.lin_root(x_dst)
