"""Drop-in for PyG's ResGatedGraphConv on the fused aggregation."""

from torch import Tensor, nn
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor, PairTensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.aggregation import AggregationConv
from pyg_dfgnn.nn.conv_call import ConvCall, adjacency_features
from pyg_dfgnn.nn.gate import methods_of
from pyg_dfgnn.nn.projection import project
from pyg_dfgnn.ops.visits import run_left


class ResGatedGraphConv(AggregationConv, conv.ResGatedGraphConv):
    """PyG's `ResGatedGraphConv` with one fused kernel per direction: same arguments, parameters, results, gradients.

    `x'_i = W_1 x_i + sum_j sigmoid(W_3 x_i + W_4 x_j) * W_2 x_j`

    Source: Bresson and Laurent, "Residual Gated Graph ConvNets", 2017.
    """

    propagate_type = {"k": Tensor, "q": Tensor, "v": Tensor, "edge_attr": OptTensor}
    _upstream_methods = methods_of(conv.ResGatedGraphConv)
    _message = "gate"
    _writes = 3
    _is_projected = True
    _channels = "out_channels"
    _fused_statistics = frozenset({"sum", "mean"})

    @staticmethod
    def _suits(layer: conv.ResGatedGraphConv) -> bool:
        return layer.edge_dim is None and type(layer.act) is nn.Sigmoid

    def _call(self, x: Tensor | PairTensor, edge_index: Adj | Graph, edge_attr: OptTensor = None) -> ConvCall:
        reasons = []
        if not isinstance(x, Tensor) and (x[0] is None or x[1] is None):
            reasons.append("x is missing on one side")
        if type(self.act) is not nn.Sigmoid:
            reasons.append(f"act is {self.act}, fused is the sigmoid")
        features = adjacency_features(edge_index) if edge_attr is None else edge_attr
        if self.edge_dim is not None or features is not None:
            reasons.append("edge features")
        return self._check_support(x, edge_index, weighted=False, by_role=True, reasons=tuple(reasons))

    def forward(self, x: Tensor | PairTensor, edge_index: Adj | Graph, edge_attr: OptTensor = None) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.ResGatedGraphConv.forward`."""
        if self._is_left(x, edge_index):
            left: Tensor = run_left(super().forward, x, edge_index, edge_attr)
            return left
        call = self._call(x, edge_index, edge_attr)
        if call.reasons:
            out: Tensor = self._fall_back(call, x, edge_attr)
            return out
        x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
        if x_src is x_dst:
            target, key, value = project(x_src, self.lin_key, self.lin_query, self.lin_value)
        else:
            key, value = project(x_src, self.lin_query, self.lin_value)
            target = self.lin_key(x_dst)
        out = self._aggregate(self._message_inputs(call), value, key=key, target=target)
        if self.root_weight:
            out = out + self.lin_skip(x_dst)
        return out if self.bias is None else out + self.bias
