"""Drop-in for PyG's APPNP on the fused aggregation."""

import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.aggregation import is_matrix
from pyg_dfgnn.nn.conv.normalized import NormalizedConv
from pyg_dfgnn.nn.conv_call import ConvCall, form_of
from pyg_dfgnn.nn.gate import methods_of


class APPNP(NormalizedConv, conv.APPNP):
    """PyG's `APPNP` with fused kernels: same arguments, parameters, results and gradients.

    `x <- (1 - alpha) P x + alpha h`, `K` times, with the normalised adjacency `P` and the input `h`

    Source: Gasteiger et al., "Predict then Propagate", 2019.
    """

    propagate_type = {"x": Tensor, "edge_weight": OptTensor}
    _upstream_methods = methods_of(conv.APPNP)
    _keeps_edges = True

    def _call(self, x: Tensor, edge_index: Adj | Graph, edge_weight: OptTensor = None) -> ConvCall:
        reasons = []
        if self._drops:
            if is_matrix(form_of(edge_index)):
                reasons.append("dropout of the values of a sparse adjacency")
            elif edge_weight is None and not self.normalize:
                reasons.append("dropout without edge weights")
        return self._ask_normalized(x, edge_index, edge_weight, *reasons)

    def forward(self, x: Tensor, edge_index: Adj | Graph, edge_weight: OptTensor = None) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.APPNP.forward`."""
        call = self._call(x, edge_index, edge_weight)
        if call.reasons:
            out: Tensor = self._fall_back(call, x, edge_weight)
            return out
        sent, out = self._normalized(call, x), x
        for _ in range(self.K):
            if self._drops:
                assert sent.weight is not None
                sent = sent._replace(weight=F.dropout(sent.weight, p=self.dropout))
            out = self._aggregate(sent, out) * (1 - self.alpha) + self.alpha * x
        return out

    @property
    def _drops(self) -> bool:  # type: ignore[override]
        return self.dropout > 0 and self.training
