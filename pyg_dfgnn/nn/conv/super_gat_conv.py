"""Drop-in for PyG's SuperGATConv on the fused attention."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor
from torch_geometric.utils import add_self_loops, remove_self_loops

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.attention import AttentionConv
from pyg_dfgnn.nn.conv_call import ConvCall, edges_in_flow, form_of
from pyg_dfgnn.nn.gate import finalize_dtype, methods_of, promoted_dtype
from pyg_dfgnn.ops.attention.functional import supergat_attention
from pyg_dfgnn.ops.attention.terms import attention_terms


class SuperGATConv(AttentionConv, conv.SuperGATConv):
    r"""PyG's `SuperGATConv` whose attention is one fused kernel per direction: same arguments, parameters, results and
    gradients. The logits of the self-supervised task, of sampled edges, are PyG's own.

    .. math:: S_{ij} = \mathrm{leaky\_relu}(\langle a, [W x_i, W x_j] \rangle \, \sigma(\langle W x_i, W x_j \rangle))

    for the attention "MX", and :math:`\mathrm{leaky\_relu}(\langle W x_i, W x_j \rangle / \sqrt{d})` for "SD".

    Source: Kim and Oh, "How to Find Your Friendly Neighborhood: Graph Attention Design with Self-Supervision", 2021.
    """

    propagate_type = {"x": Tensor}
    _upstream_methods = methods_of(conv.SuperGATConv)

    def _problem_fields(self, x: Tensor | None = None) -> tuple[str, int, int]:
        return "supergat_sd" if self.att_l is None else "supergat_mx", self.heads, self.out_channels

    def _call(
        self, x: Tensor, edge_index: Adj | Graph, neg_edge_index: OptTensor = None, batch: OptTensor = None
    ) -> ConvCall:
        form, reasons = form_of(edge_index), []
        if form not in ("tensor", "Graph"):
            reasons.append(f"edge_index is a {form}")
        if type(self).get_attention is not conv.SuperGATConv.get_attention:
            reasons.append("'get_attention' is overridden")
        return self._gate(
            self._problem_fields(),
            (x, x),
            edge_index,
            dropout=self.dropout,
            self_loops=self.add_self_loops,
            reasons=reasons,
        )

    def forward(
        self, x: Tensor, edge_index: Adj | Graph, neg_edge_index: OptTensor = None, batch: OptTensor = None
    ) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.SuperGATConv.forward`."""
        call = self._call(x, edge_index, neg_edge_index, batch)
        if call.reasons:
            out: Tensor = self._fall_back(call, x, neg_edge_index, batch)
            return out
        graph, _, _ = self._edges(call)
        h = self.lin(x).view(-1, self.heads, self.out_channels)
        source, target, other = None, None, h.dtype
        if self.att_l is not None:
            source, target = attention_terms(h, self.att_l, self.att_r)
            other = self.att_l.dtype
        dtype = promoted_dtype(h.dtype, other, h.is_cuda)
        out = supergat_attention(
            graph,
            h,
            h,
            source,
            target,
            scale=self.out_channels**-0.5,
            negative_slope=float(self.negative_slope),
            dropout_p=float(self.dropout) if self.training else 0.0,
            concat=self.concat,
        )
        if self.training:
            self._sample(h, call, neg_edge_index, batch)
        out = finalize_dtype(out, dtype, not self.concat)
        return out if self.bias is None else out + self.bias

    def _sample(self, h: Tensor, call: ConvCall, neg_edge_index: OptTensor, batch: OptTensor) -> None:
        """Set what `get_attention_loss` reads: logits of sampled edges and of edges that are not there."""
        edge_index: Any = edges_in_flow(call.edge_index, self.flow) if call.form == "Graph" else call.edge_index
        if self.add_self_loops:
            edge_index, _ = remove_self_loops(edge_index)
            edge_index, _ = add_self_loops(edge_index, num_nodes=h.size(0))
        positive = self.positive_sampling(edge_index)
        if neg_edge_index is None:
            neg_edge_index = self.negative_sampling(edge_index, h.size(0), batch)
        logits = [
            self.get_attention(edges[1], h[edges[1]], h[edges[0]], h.size(0), return_logits=True)
            for edges in (positive, neg_edge_index)
        ]
        self.att_x = torch.cat(logits)
        self.att_y = self.att_x.new_zeros(self.att_x.size(0))
        self.att_y[: positive.size(1)] = 1.0
