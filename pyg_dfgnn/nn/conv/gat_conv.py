"""Drop-in for PyG's GATConv on the fused additive attention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptPairTensor, OptTensor, Size

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.attention import AttentionConv, asks_for_weights
from pyg_dfgnn.nn.conv_call import ConvCall, with_weights
from pyg_dfgnn.nn.gate import finalize_dtype, methods_of, promoted_dtype
from pyg_dfgnn.nn.projection import is_plain_linear
from pyg_dfgnn.ops.attention.functional import add_attention
from pyg_dfgnn.ops.attention.terms import attention_terms


class GATConv(AttentionConv, conv.GATConv):
    """PyG's `GATConv` with one fused kernel per direction: same arguments, parameters, results and gradients.

    `x'_i = sum_j softmax_j(leaky_relu(<a_src, W x_j> + <a_dst, W x_i> + <a_edge, W_e e_ij>)) W x_j`

    Source: Velickovic et al., "Graph Attention Networks", 2018.
    """

    propagate_type = {"x": OptPairTensor, "alpha": Tensor}
    edge_updater_type = {"alpha": OptPairTensor, "edge_attr": OptTensor}
    _upstream_methods = methods_of(conv.GATConv)

    def _problem_fields(self, x: Tensor | None = None) -> tuple[str, int, int]:
        return "add", self.heads, self.out_channels

    def _call(
        self,
        x: Tensor | OptPairTensor,
        edge_index: Adj | Graph,
        edge_attr: OptTensor = None,
        size: Size = None,
        return_attention_weights: bool | None = None,
    ) -> ConvCall:
        nodes = (x, x) if isinstance(x, Tensor) else tuple(x)
        reasons = [] if nodes[0] is not None else ["x is missing on the side that sends"]
        return self._gate(
            self._problem_fields(),
            nodes,
            edge_index,
            edge_attr,
            size=size,
            lin_edge=self.lin_edge,
            dropout=self.dropout,
            self_loops=self.add_self_loops,
            weights=asks_for_weights(return_attention_weights),
            one_way=True,
            reasons=reasons,
        )

    def forward(
        self,
        x: Tensor | OptPairTensor,
        edge_index: Adj | Graph,
        edge_attr: OptTensor = None,
        size: Size = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.GATConv.forward`."""
        call = self._call(x, edge_index, edge_attr, size, return_attention_weights)
        if call.reasons:
            return self._fall_back(call, x, edge_attr, size=size, return_attention_weights=return_attention_weights)

        x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
        # Every read of a module or parameter is a search for it.
        res, att_src, att_dst, lin = self.res, self.att_src, self.att_dst, self._modules.get("lin")
        res = None if res is None or x_dst is None else res(x_dst)
        lin_src, lin_dst = (lin, lin) if lin is not None else (self.lin_src, self.lin_dst)
        h_src = lin_src(x_src).view(-1, self.heads, self.out_channels)
        shared = x_dst is x_src and lin_dst is lin_src
        alpha_src, alpha_dst = attention_terms(h_src, att_src, att_dst if shared else None)
        if not shared and x_dst is not None:
            h_dst = lin_dst(x_dst).view(-1, self.heads, self.out_channels)
            alpha_dst, _ = attention_terms(h_dst, att_dst)

        graph, edge_attr, adjacency = self._edges(call, self.fill_value, self.edge_dim)
        out = add_attention(
            graph,
            h_src,
            alpha_src,
            alpha_dst,
            alpha_edge=None if edge_attr is None else self._edge_logits(edge_attr),
            negative_slope=float(self.negative_slope),
            dropout_p=float(self.dropout) if self.training else 0.0,
            return_weights=call.weights,
            concat=self.concat,
        )
        out, alpha = out if call.weights else (out, None)
        dtype = promoted_dtype(h_src.dtype, att_src.dtype, h_src.is_cuda)
        out = finalize_dtype(out, dtype, not self.concat)
        bias = self.bias
        out = out if res is None else out + res
        out = out if bias is None else out + bias
        return out if alpha is None else with_weights(out, adjacency, alpha.to(dtype))

    def _edge_logits(self, edge_attr: Tensor) -> Tensor:
        """Return `<a_edge, W_e e_ij>` of every edge, shape [E, H]."""
        lin = self.lin_edge
        if is_plain_linear(lin) and lin.bias is None and not torch.is_autocast_enabled(edge_attr.device.type):
            # W_e^T a_edge has one row per head: folding it first avoids a tensor [E, H, C].
            weight = lin.weight.view(self.heads, self.out_channels, -1)
            return F.linear(edge_attr, (weight * self.att_edge.view(self.heads, self.out_channels, 1)).sum(dim=1))
        return (lin(edge_attr).view(-1, self.heads, self.out_channels) * self.att_edge).sum(dim=-1)
