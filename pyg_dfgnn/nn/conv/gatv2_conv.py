"""Drop-in for PyG's GATv2Conv on the fused GATv2 attention."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor, PairTensor

from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.nn.dense.linear import attend, project, project_one
from pyg_dfgnn.nn.gate import Call, FusedConv, adjacency_features, methods_of, weights_dtype
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
        if x_r is x_l and edge_attr is None and not call.weights:
            attended = self._attend(edges, x_l)
            if attended is not None:
                return self._finish(attended, None, attended.dtype, self._residual(x_r), adjacency)
        own, att, shared = self._modules, self.att, self.share_weights and x_r is x_l
        if x_r is x_l and not shared:
            h_src, h_dst = project(x_l, self.heads, own["lin_l"], own["lin_r"])
        else:
            h_src = project_one(x_l, self.heads, own["lin_l"])
            h_dst = h_src if shared else project_one(x_r, self.heads, own["lin_r"])
        edge = None if edge_attr is None else self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
        result = gatv2_attention(edges, h_src, h_dst, att, edge=edge, return_weights=call.weights, **self._options())
        attended, alpha = result if call.weights else (result, None)
        return self._finish(attended, alpha, weights_dtype(h_src, att), self._residual(x_r), adjacency)

    def _options(self) -> dict[str, Any]:
        return {
            "negative_slope": float(self.negative_slope),
            "dropout_p": float(self.dropout) if self.training else 0.0,
            "concat": self.concat,
        }

    def _residual(self, x: Tensor) -> Tensor | None:
        # Always after the attention, so that a call that is repeated saves tensors and draws numbers in the same order.
        res = self.res
        return None if res is None else res(x)

    def _attend(self, edges: Graph | EdgeSet, x: Tensor) -> Tensor | None:
        """The attention of one node set with two projections, None if not at once."""
        att, own = self.att, self._modules
        if self.share_weights:
            return None
        # Autocast casts x.
        if att.dtype is not x.dtype and not torch.is_autocast_enabled(x.device.type):
            return None
        layers = own["lin_l"], own["lin_r"]
        found = attend(edges, "gatv2", x, self.heads, *layers, parameter=att, **self._options())
        return None if found is None else found[0]
