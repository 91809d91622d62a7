"""Drop-in for PyG's LGConv on the fused aggregation."""

from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.normalized import NormalizedConv
from pyg_dfgnn.nn.gate import methods_of


class LGConv(NormalizedConv, conv.LGConv):
    """PyG's `LGConv` with one fused kernel per direction: same arguments, results and gradients.

    `x'_i = sum_j e_ij / sqrt(d_i d_j) x_j`

    Source: He et al., "LightGCN", 2020.
    """

    propagate_type = {"x": Tensor, "edge_weight": OptTensor}
    _upstream_methods = methods_of(conv.LGConv)

    def forward(self, x: Tensor, edge_index: Adj | Graph, edge_weight: OptTensor = None) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.LGConv.forward`."""
        call = self._call(x, edge_index, edge_weight)
        if call.reasons:
            out: Tensor = self._fall_back(call, x, edge_weight)
            return out
        return self._aggregate(self._normalized(call, x), x)
