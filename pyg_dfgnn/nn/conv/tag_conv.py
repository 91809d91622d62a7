"""Drop-in for PyG's TAGConv on the fused aggregation."""

from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.normalized import NormalizedConv
from pyg_dfgnn.nn.gate import methods_of


class TAGConv(NormalizedConv, conv.TAGConv):
    """PyG's `TAGConv` with fused kernels: same arguments, parameters, results and gradients.

    `x' = sum_k P^k x W_k` with the normalised adjacency `P`

    Source: Du et al., "Topology Adaptive Graph Convolutional Networks", 2017.
    """

    propagate_type = {"x": Tensor, "edge_weight": OptTensor}
    _upstream_methods = methods_of(conv.TAGConv)

    def forward(self, x: Tensor, edge_index: Adj | Graph, edge_weight: OptTensor = None) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.TAGConv.forward`."""
        call = self._call(x, edge_index, edge_weight)
        if call.reasons:
            out: Tensor = self._fall_back(call, x, edge_weight)
            return out
        sent = self._normalized(call, x)
        first, *others = self.lins
        out = first(x)
        for lin in others:
            x = self._aggregate(sent, x)
            out = out + lin(x)
        return out if self.bias is None else out + self.bias
