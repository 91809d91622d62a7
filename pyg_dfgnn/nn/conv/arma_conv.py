"""Drop-in for PyG's ARMAConv on the fused aggregation."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.normalized import NormalizedConv
from pyg_dfgnn.nn.conv_call import ConvCall, form_of
from pyg_dfgnn.nn.gate import is_multiple, methods_of


class ARMAConv(NormalizedConv, conv.ARMAConv):
    """PyG's `ARMAConv` with fused kernels: same arguments, parameters, results and gradients.

    `x' = 1 / K sum_k h_k`, `h_k <- act(P h_k W_k + x V_k + b_k)` T times from `x`, with the normalised adjacency `P`

    The stacks lie side by side in one row per node: one gather serves all of them.

    Source: Bianchi et al., "Graph Neural Networks with Convolutional ARMA Filters", 2021.
    """

    propagate_type = {"x": Tensor, "edge_weight": OptTensor}
    _upstream_methods = methods_of(conv.ARMAConv)
    _is_projected = True
    _channels = "_width"
    _hop_count = "num_layers"
    _follows_pyg = False

    @property
    def _width(self) -> int:
        return int(self.num_stacks * self.out_channels)

    def _call(self, x: Tensor, edge_index: Adj | Graph, edge_weight: OptTensor = None) -> ConvCall:
        reasons = []
        if is_multiple(self.aggr_module):
            reasons.append("several aggregations of stacks that lie side by side")
        if self.num_layers < 1:
            reasons.append(f"there is no layer (num_layers is {self.num_layers})")
        if not 0 <= self.dropout <= 1:
            reasons.append(f"dropout needs a probability (got {self.dropout})")
        if form_of(edge_index) == "torch.sparse":
            reasons.append("PyG's ARMAConv has no product of torch's sparse tensors with its stacks")
        return self._ask_normalized(x, edge_index, edge_weight, *reasons)

    def forward(self, x: Tensor, edge_index: Adj | Graph, edge_weight: OptTensor = None) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.ARMAConv.forward`."""
        call = self._call(x, edge_index, edge_weight)
        if call.reasons:
            out: Tensor = self._fall_back(call, x, edge_weight)
            return out
        sent = self._normalized(call, x)
        drops = self.training and self.dropout > 0
        root: Tensor | None = None
        out = _product(x, self.init_weight)
        for t in range(self.num_layers):
            place = 0 if self.shared_weights else t
            if t > 0:
                out = self._next(out, self.weight[0 if self.shared_weights else t - 1])
            if root is None or drops or not self.shared_weights:
                bias = None if self.bias is None else self.bias[place].flatten()
                root = _product(F.dropout(x, p=self.dropout) if drops else x, self.root_weight[place], bias)
            # As PyG's, whose first dimension is that of the stacks: the activation may read any of them.
            out = (self._aggregate(sent, out) + root).view(-1, self.num_stacks, self.out_channels).transpose(0, 1)
            if self.act is not None:
                out = self.act(out.contiguous())
        # A result of its own, which may be edited.
        return out.squeeze(-3).clone() if out.size(-3) == 1 else out.mean(dim=-3)

    def _next(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return what each matrix of a layer [K, F, C] makes of its stack of x [K, N, F], as [N, K * C]."""
        if self.num_stacks == 1 == x.size(0):
            return _product(x[0], weight)
        return (x @ weight).transpose(0, 1).flatten(1)


def _product(x: Tensor, matrices: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what matrices [K, F, C] make of x [N, F] side by side, [N, K * C], plus a bias [K * C]."""
    weight = matrices.transpose(1, 2).flatten(0, 1)
    if bias is None or (bias.dtype is x.dtype and not torch.is_autocast_enabled(x.device.type)):
        return F.linear(x, weight, bias)
    return F.linear(x, weight) + bias
