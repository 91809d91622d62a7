"""Drop-in for PyG's SGConv on the fused aggregation."""

from torch import Tensor
from torch_geometric.nn import conv

from pyg_dfgnn.nn.conv.aggregation import MessageInputs
from pyg_dfgnn.nn.conv.normalized import LinearHopsConv
from pyg_dfgnn.nn.gate import methods_of


class SGConv(LinearHopsConv, conv.SGConv):
    """PyG's `SGConv` with fused kernels: same arguments, parameters, results and gradients.

    `x' = P^K x W` with the normalised adjacency `P`

    Source: Wu et al., "Simplifying Graph Convolutional Networks", 2019.
    """

    _upstream_methods = methods_of(conv.SGConv)
    _kept = "_cached_x"

    def _hops(self, sent: MessageInputs, x: Tensor) -> Tensor:
        for _ in range(self.K):
            x = self._aggregate(sent, x)
            if self.cached:
                self._cached_x = x
        return x
