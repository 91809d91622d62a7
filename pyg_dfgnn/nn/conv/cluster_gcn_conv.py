"""Drop-in for PyG's ClusterGCNConv on the fused aggregation."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.aggregation import AggregationConv, ProblemFields, is_matrix
from pyg_dfgnn.nn.conv_call import ConvCall, form_of
from pyg_dfgnn.nn.gate import methods_of, statistics_of
from pyg_dfgnn.ops.segment import aggregate, inverse_root_degree
from pyg_dfgnn.ops.visits import run_left


class ClusterGCNConv(AggregationConv, conv.ClusterGCNConv):
    r"""PyG's `ClusterGCNConv` with one fused kernel per direction: same arguments, parameters, results and gradients.

    `x'_i = W_1 (mean_j x_j + lambda / d_i x_i) + W_2 x_i` over the neighbours and the node itself, `d_i` in number

    No weight of an edge is made, and the host waits for the device on the first call of a graph alone.

    Source: Chiang et al., "Cluster-GCN", 2019.
    """

    propagate_type = {"x": Tensor, "edge_weight": Tensor}
    _upstream_methods = methods_of(conv.ClusterGCNConv)
    _makes_edges = True

    def _problem_fields(self, x: Any = None, edge: Tensor | None = None) -> ProblemFields:
        message, _, channels, scaled, edge_channels = super()._problem_fields(x, edge)
        return message, ("mean",), channels, scaled, edge_channels

    def _call(self, x: Tensor, edge_index: Adj | Graph) -> ConvCall:
        reasons = []
        if statistics_of(self.aggr_module) != ("sum",):
            reasons.append(f"the aggregation needs to be a sum (got {self.aggr!r})")
        if self.flow != "source_to_target":
            reasons.append("degrees are of sources in this flow")
        if is_matrix(form_of(edge_index)):
            reasons.append("a sparse adjacency")
        if not self.add_self_loops:
            reasons.append("PyG takes the self-loops that edges have for one per node")
        if isinstance(self.diag_lambda, Tensor):
            reasons.append("diag_lambda is a tensor")
        if not isinstance(x, Tensor):
            reasons.append("x is no tensor")
        if self._is_part(edge_index):
            return self._ask_part(self._problem_fields(x), x, edge_index, self_loops=True, reasons=reasons)
        return self._check_support(x, edge_index, self_loops=True, reasons=tuple(reasons))

    def forward(self, x: Tensor, edge_index: Adj | Graph) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.ClusterGCNConv.forward`."""
        if self._is_left(x, edge_index):
            left: Tensor = run_left(super().forward, x, edge_index)
            return left
        call = self._call(x, edge_index)
        if call.reasons:
            out: Tensor = self._fall_back(call, x)
            return out
        graph, _, _ = self._edges(call)
        # In the dtype of x: with PyG's weights, of the default one, the linear layer refuses all others.
        out = aggregate(graph, x if call.part is None else call.part.exchange(x), "mean")
        if self.diag_lambda:
            inverse_degree = inverse_root_degree(graph).square().to(out.dtype)
            out = torch.addcmul(out, x, inverse_degree.view(-1, 1), value=self.diag_lambda)
        return self.lin_out(out) + self.lin_root(x)
