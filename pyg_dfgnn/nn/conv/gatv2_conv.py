"""Drop-in for PyG's GATv2Conv on the fused GATv2 attention."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor, PairTensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.attention import AttentionConv, asks_for_weights
from pyg_dfgnn.nn.conv_call import ConvCall, adjacency_features, with_weights
from pyg_dfgnn.nn.gate import finalize_dtype, methods_of, promoted_dtype
from pyg_dfgnn.nn.projection import project
from pyg_dfgnn.ops.attention.functional import gatv2_attention


class GATv2Conv(AttentionConv, conv.GATv2Conv):
    """PyG's `GATv2Conv` with one fused kernel per direction: same arguments, parameters, results and gradients.

    `x'_i = sum_j softmax_j(<a, leaky_relu(W_l x_j + W_r x_i + W_e e_ij)>) W_l x_j`

    PyG's `l` is the source and `r` the target.

    Source: Brody et al., "How Attentive are Graph Attention Networks?", 2022.
    """

    propagate_type = {"x": PairTensor, "alpha": Tensor}
    edge_updater_type = {"x": PairTensor, "edge_attr": OptTensor}
    _upstream_methods = methods_of(conv.GATv2Conv)

    def _problem_fields(self, x: Tensor | None = None) -> tuple[str, int, int]:
        return "gatv2", self.heads, self.out_channels

    def _call(
        self,
        x: Tensor | PairTensor,
        edge_index: Adj | Graph,
        edge_attr: OptTensor = None,
        return_attention_weights: bool | None = None,
    ) -> ConvCall:
        nodes = (x, x) if isinstance(x, Tensor) else (x[0], x[1])
        reasons = []
        if nodes[0] is None or nodes[1] is None:
            reasons.append("x is missing on one side")
        lin_edge = self.lin_edge
        if lin_edge is None and (edge_attr is not None or adjacency_features(edge_index) is not None):
            reasons.append("edge features without edge_dim")
        return self._gate(
            self._problem_fields(),
            nodes,
            edge_index,
            edge_attr,
            lin_edge=lin_edge,
            dropout=self.dropout,
            self_loops=self.add_self_loops,
            weights=asks_for_weights(return_attention_weights),
            one_way=True,
            reasons=reasons,
        )

    def forward(
        self,
        x: Tensor | PairTensor,
        edge_index: Adj | Graph,
        edge_attr: OptTensor = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.GATv2Conv.forward`."""
        call = self._call(x, edge_index, edge_attr, return_attention_weights)
        if call.reasons:
            return self._fall_back(call, x, edge_attr, return_attention_weights)

        x_l, x_r = (x, x) if isinstance(x, Tensor) else x
        graph, edge_attr, adjacency = self._edges(call, self.fill_value, self.edge_dim)
        layers, heads = self._modules, self.heads
        if x_r is not x_l:
            source, target = layers["lin_l"](x_l), layers["lin_r"](x_r)
        elif self.share_weights:
            source = target = layers["lin_l"](x_l)
        else:
            source, target = project(x_l, layers["lin_l"], layers["lin_r"])
        att = self.att
        dtype = promoted_dtype(source.dtype, att.dtype, source.is_cuda)
        out = gatv2_attention(
            graph,
            source,
            target,
            att,
            edge=None if edge_attr is None else self.lin_edge(edge_attr).view(-1, heads, self.out_channels),
            negative_slope=float(self.negative_slope),
            dropout_p=float(self.dropout) if self.training else 0.0,
            return_weights=call.weights,
            concat=self.concat,
            heads=heads,
            exact=dtype is torch.float32,
        )
        out, alpha = out if call.weights else (out, None)
        out = finalize_dtype(out, dtype, not self.concat)
        # After the attention, so that a call that is repeated saves tensors and draws numbers in the same order.
        res, bias = self.res, self.bias
        out = out if res is None else out + res(x_r)
        out = out if bias is None else out + bias
        return out if alpha is None else with_weights(out, adjacency, alpha.to(dtype))
