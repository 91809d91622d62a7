"""Drop-in for PyG's GATv2Conv on the fused GATv2 attention."""

from typing import Any

from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor, PairTensor

from pyg_dfgnn.nn.gate import Call, FusedConv, adjacency_features, methods_of
from pyg_dfgnn.nn.projection import attend
from pyg_dfgnn.ops.attention.functional import gatv2_attention


class GATv2Conv(FusedConv, conv.GATv2Conv):
    """PyG's `GATv2Conv` with one fused kernel per direction: same arguments, parameters, results and gradients.

    `x'_i = sum_j softmax_j(<a, leaky_relu(W_l x_j + W_r x_i + W_e e_ij)>) W_l x_j`

    PyG's `l` is the source and `r` the target.

    Source: Brody et al., "How Attentive are Graph Attention Networks?", 2022.
    """

    propagate_type = {"x": PairTensor, "alpha": Tensor}
    edge_updater_type = {"x": PairTensor, "edge_attr": OptTensor}
    _upstream_methods = methods_of(conv.GATv2Conv)

    def _call(
        self,
        x: Tensor | PairTensor,
        edge_index: Adj,
        edge_attr: OptTensor = None,
        return_attention_weights: bool | None = None,
    ) -> Call:
        """The gate's view of a forward call with these arguments."""
        nodes = (x, x) if isinstance(x, Tensor) else (x[0], x[1])
        reasons = []
        if nodes[0] is None or nodes[1] is None:
            reasons.append("x is missing on one side")
        lin_edge = self.lin_edge
        if lin_edge is None and (edge_attr is not None or adjacency_features(edge_index) is not None):
            reasons.append("edge features without edge_dim")
        return self._gate(
            "gatv2",
            nodes,
            edge_index,
            edge_attr,
            heads=self.heads,
            channels=self.out_channels,
            lin_edge=lin_edge,
            dropout=self.dropout,
            self_loops=self.add_self_loops,
            weights=bool(return_attention_weights),
            reasons=reasons,
        )

    def forward(
        self,
        x: Tensor | PairTensor,
        edge_index: Adj,
        edge_attr: OptTensor = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """PyG's forward; see `torch_geometric.nn.GATv2Conv.forward`."""
        call = self._call(x, edge_index, edge_attr, return_attention_weights)
        if call.reasons:
            self._report(call.reasons)
            return super().forward(x, edge_index, edge_attr, return_attention_weights)

        x_l, x_r = (x, x) if isinstance(x, Tensor) else x
        edges, edge_attr, adjacency = self._edges(call, self.fill_value, self.edge_dim)
        layers, heads = self._modules, self.heads
        inputs: Any
        if x_r is not x_l:
            inputs = [(x_l, (layers["lin_l"],)), (x_r, (layers["lin_r"],))]
        else:
            inputs = [(x_l, (layers["lin_l"],) if self.share_weights else (layers["lin_l"], layers["lin_r"]))]
        attended, alpha, _ = attend(
            "gatv2",
            gatv2_attention,
            edges,
            heads,
            inputs,
            self.att,
            edge=None if edge_attr is None else self.lin_edge(edge_attr).view(-1, heads, self.out_channels),
            return_weights=call.weights,
            negative_slope=float(self.negative_slope),
            dropout_p=float(self.dropout) if self.training else 0.0,
            concat=self.concat,
        )
        dtype = attended.dtype if alpha is None else alpha.dtype
        return self._finish(attended, alpha, dtype, self._residual(x_r), adjacency)

    def _residual(self, x: Tensor) -> Tensor | None:
        # Always after the attention, so that a call that is repeated saves tensors and draws numbers in the same order.
        res = self.res
        return None if res is None else res(x)
