"""Drop-in for PyG's SSGConv on the fused aggregation."""

from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.normalized import NormalizedConv
from pyg_dfgnn.nn.gate import methods_of


class SSGConv(NormalizedConv, conv.SSGConv):
    """PyG's `SSGConv` with fused kernels: same arguments, parameters, results and gradients.

    `x' = (alpha x + (1 - alpha) / K sum_k P^k x) W` over k = 1 to K with the normalised adjacency `P`

    Source: Zhu & Koniusz, "Simple Spectral Graph Convolution", 2021.
    """

    propagate_type = {"x": Tensor, "edge_weight": OptTensor}
    _upstream_methods = methods_of(conv.SSGConv)
    _cached_h: Tensor | None

    def forward(self, x: Tensor, edge_index: Adj | Graph, edge_weight: OptTensor = None) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.SSGConv.forward`."""
        cached: Tensor | None = self._cached_h
        if cached is not None:
            return self.lin(cached.detach())
        call = self._call(x, edge_index, edge_weight)
        if call.reasons:
            out: Tensor = self._fall_back(call, x, edge_weight)
            return out
        sent = self._normalized(call, x)
        h = x * self.alpha
        for _ in range(self.K):
            x = self._aggregate(sent, x)
            h = h + (1 - self.alpha) / self.K * x
        if self.cached:
            self._cached_h = h
        return self.lin(h)
