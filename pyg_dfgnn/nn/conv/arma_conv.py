"""Drop-in for PyG's ARMAConv on the fused aggregation."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor

from pyg_dfgnn.dispatch.gemm import MAX_LAYERS
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.normalized import NormalizedConv
from pyg_dfgnn.nn.edges import Call, form_of
from pyg_dfgnn.nn.gate import is_multiple, methods_of
from pyg_dfgnn.ops import gemm
from pyg_dfgnn.ops.eager import is_eager, is_plain


class ARMAConv(NormalizedConv, conv.ARMAConv):
    """PyG's `ARMAConv` with fused kernels: same arguments, parameters, results and gradients.

    `x' = 1 / K sum_k h_k`, `h_k <- act(P h_k W_k + x V_k + b_k)` T times from `x`, with the normalised adjacency `P`

    The stacks lie side by side in one row per node: one gather serves all of them. Without dropout the products with
    `x` of all layers are joined.

    Source: Bianchi et al., "Graph Neural Networks with Convolutional ARMA Filters", 2021.
    """

    propagate_type = {"x": Tensor, "edge_weight": OptTensor}
    _upstream_methods = methods_of(conv.ARMAConv)
    _is_projected = True
    _channels = "_width"

    @property
    def _width(self) -> int:
        return int(self.num_stacks * self.out_channels)

    def _call(self, x: Tensor, edge_index: Adj | Graph, edge_weight: OptTensor = None) -> Call:
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
        places = range(1 if self.shared_weights else self.num_layers)
        roots: Sequence[Tensor] = ()
        if drops:
            (out,) = _products(x, [self.init_weight])
        else:
            matrices = [self.init_weight, *(self.root_weight[place] for place in places)]
            out, *roots = _products(x, matrices, [None, *map(self._bias, places)])
        for t in range(self.num_layers):
            place = 0 if self.shared_weights else t
            if t > 0:
                out = self._next(out, self.weight[0 if self.shared_weights else t - 1])
            if drops:
                dropped = F.dropout(x, p=self.dropout)
                (root,) = _products(dropped, [self.root_weight[place]], [self._bias(place)])
            else:
                root = roots[place]
            # As PyG's, whose first dimension is that of the stacks: the activation may read any of them.
            out = (self._aggregate(sent, out) + root).unflatten(1, (self.num_stacks, -1)).transpose(0, 1)
            if self.act is not None:
                out = self.act(out.contiguous())
        # A result of its own, which may be edited.
        return out.squeeze(-3).clone() if out.size(-3) == 1 else out.mean(dim=-3)

    def _bias(self, place: int) -> Tensor | None:
        return None if self.bias is None else self.bias[place].flatten()

    def _next(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return what each matrix of a layer [K, F, C] makes of its stack of x [K, N, F], as [N, K * C]."""
        if self.num_stacks == 1 == x.size(0):
            return _products(x[0], [weight])[0]
        return (x @ weight).transpose(0, 1).flatten(1)


def _products(x: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> Sequence[Tensor]:
    """Return what linear maps of one shape make of x [N, F]; those of plain tensors are under one node of autograd.

    Args:
        x: Shape [N, F].
        matrices: Each [K, F, C].
        biases: Each [K * C], or None.

    Returns:
        A tensor [N, K * C] of each map.
    """
    weights = [matrix.transpose(1, 2).flatten(0, 1).contiguous() for matrix in matrices]
    added = list(biases or [None] * len(weights))
    alike = all(weight.dtype is x.dtype and weight.shape == weights[0].shape for weight in weights)
    if not alike or not is_eager() or not is_plain(x) or torch.is_autocast_enabled(x.device.type):
        results = [F.linear(x, weight) for weight in weights]
        return [row if bias is None else row + bias for row, bias in zip(results, added, strict=True)]
    given = next((bias for bias in added if bias is not None), None)
    shifts = [] if given is None else [torch.zeros_like(given) if bias is None else bias for bias in added]
    return [
        row
        for start in range(0, len(weights), MAX_LAYERS)
        for row in gemm.project(x, weights[start : start + MAX_LAYERS], shifts[start : start + MAX_LAYERS], twice=True)
    ]
