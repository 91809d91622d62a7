"""Drop-in for PyG's GCN2Conv on the fused aggregation."""

import torch
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.normalized import NormalizedConv
from pyg_dfgnn.nn.conv_call import ConvCall
from pyg_dfgnn.nn.gate import methods_of


class GCN2Conv(NormalizedConv, conv.GCN2Conv):
    """PyG's `GCN2Conv` with one fused kernel per direction: same arguments, parameters, results and gradients.

    `x' = ((1 - alpha) P x + alpha x_0) ((1 - beta) I + beta W)` with the normalised adjacency `P`

    Source: Chen et al., "Simple and Deep Graph Convolutional Networks", 2020.
    """

    propagate_type = {"x": Tensor, "edge_weight": OptTensor}
    _upstream_methods = methods_of(conv.GCN2Conv)
    _keeps_edges = True
    _follows_pyg = False

    def _call(  # type: ignore[override]
        self, x: Tensor, x_0: Tensor, edge_index: Adj | Graph, edge_weight: OptTensor = None
    ) -> ConvCall:
        return self._ask_normalized(x, edge_index, edge_weight)

    def forward(self, x: Tensor, x_0: Tensor, edge_index: Adj | Graph, edge_weight: OptTensor = None) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.GCN2Conv.forward`."""
        call = self._call(x, x_0, edge_index, edge_weight)
        if call.reasons:
            out: Tensor = self._fall_back(call, x, edge_weight, before=(x_0,))
            return out
        x = self._aggregate(self._normalized(call, x), x) * (1 - self.alpha)
        x_0 = self.alpha * x_0[: x.size(0)]
        beta, weight2 = self.beta, self.weight2
        if weight2 is None:
            out = x + x_0
            return torch.addmm(out, out, self.weight1, beta=1.0 - beta, alpha=beta)
        out = torch.addmm(x, x, self.weight1, beta=1.0 - beta, alpha=beta)
        return out + torch.addmm(x_0, x_0, weight2, beta=1.0 - beta, alpha=beta)
