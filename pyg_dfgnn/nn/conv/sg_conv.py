"""Drop-in for PyG's SGConv on the fused aggregation."""

from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.normalized import NormalizedConv
from pyg_dfgnn.nn.gate import methods_of


class SGConv(NormalizedConv, conv.SGConv):
    """PyG's `SGConv` with fused kernels: same arguments, parameters, results and gradients.

    `x' = P^K x W` with the normalised adjacency `P`

    Source: Wu et al., "Simplifying Graph Convolutional Networks", 2019.
    """

    propagate_type = {"x": Tensor, "edge_weight": OptTensor}
    _upstream_methods = methods_of(conv.SGConv)
    _cached_x: Tensor | None

    def forward(self, x: Tensor, edge_index: Adj | Graph, edge_weight: OptTensor = None) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.SGConv.forward`."""
        cached: Tensor | None = self._cached_x
        if cached is not None:
            return self.lin(cached.detach())
        call = self._call(x, edge_index, edge_weight)
        if call.reasons:
            out: Tensor = self._fall_back(call, x, edge_weight)
            return out
        sent = self._normalized(call, x)
        for _ in range(self.K):
            x = self._aggregate(sent, x)
            if self.cached:
                self._cached_x = x
        return self.lin(x)
