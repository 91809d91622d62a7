"""Drop-in for PyG's SSGConv on the fused aggregation."""

from torch import Tensor
from torch_geometric.nn import conv

from pyg_dfgnn.nn.conv.aggregation import MessageInputs
from pyg_dfgnn.nn.conv.normalized import LinearHopsConv
from pyg_dfgnn.nn.gate import methods_of


class SSGConv(LinearHopsConv, conv.SSGConv):
    """PyG's `SSGConv` with fused kernels: same arguments, parameters, results and gradients.

    `x' = (alpha x + (1 - alpha) / K sum_k P^k x) W` over k = 1 to K with the normalised adjacency `P`

    Source: Zhu & Koniusz, "Simple Spectral Graph Convolution", 2021.
    """

    _upstream_methods = methods_of(conv.SSGConv)
    _kept = "_cached_h"

    def _hops(self, sent: MessageInputs, x: Tensor) -> Tensor:
        h = x * self.alpha
        for _ in range(self.K):
            x = self._aggregate(sent, x)
            h = h + (1 - self.alpha) / self.K * x
        if self.cached:
            self._cached_h = h
        return h
