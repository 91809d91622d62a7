"""Drop-in for PyG's SAGEConv on the fused aggregation."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptPairTensor, Size

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.aggregation import AggregationConv
from pyg_dfgnn.nn.conv_call import ConvCall
from pyg_dfgnn.nn.gate import methods_of


class SAGEConv(AggregationConv, conv.SAGEConv):
    """PyG's `SAGEConv` with one fused kernel per direction: same arguments, parameters, results and gradients.

    `x'_i = W_1 x_i + W_2 aggr_j x_j`, several aggregations of one gather.

    Source: Hamilton et al., "Inductive Representation Learning on Large Graphs", 2017.
    """

    propagate_type = {"x": OptPairTensor}
    _upstream_methods = methods_of(conv.SAGEConv)

    def _call(self, x: Tensor | OptPairTensor, edge_index: Adj | Graph, size: Size = None) -> ConvCall:
        return self._check_support(x, edge_index, size=size, weighted=None)

    def forward(self, x: Tensor | OptPairTensor, edge_index: Adj | Graph, size: Size = None) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.SAGEConv.forward`."""
        out, is_output = self._reduced(x, edge_index, size)
        if is_output:
            return out  # type: ignore[no-any-return]
        x_dst = x if isinstance(x, Tensor) else x[1]
        out = self.lin_l(out)
        if self.root_weight and x_dst is not None:
            out = out + self.lin_r(x_dst)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def _storage_dtype(self, x: Tensor) -> torch.dtype:
        return super()._storage_dtype(x) if self.project else x.dtype
