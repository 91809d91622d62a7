"""Drop-in for PyG's TransformerConv on the fused dot-product attention."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor, PairTensor, SparseTensor

from pyg_dfgnn.nn.fused import Call, FusedConv, adjacency_features, methods_of, weights_dtype
from pyg_dfgnn.nn.projection import attend, project
from pyg_dfgnn.ops.attention import dot_attention


class TransformerConv(FusedConv, conv.TransformerConv):
    """PyG's `TransformerConv` with one fused kernel per direction: same arguments, parameters, results and gradients.

    `x'_i = W_1 x_i + sum_j softmax_j(<W_3 x_i, W_4 x_j + W_6 e_ij> / sqrt(C)) (W_2 x_j + W_6 e_ij)`

    Source: Shi et al., "Masked Label Prediction", 2021.
    """

    propagate_type = {"query": Tensor, "key": Tensor, "value": Tensor, "edge_attr": OptTensor}
    _upstream_methods = methods_of(conv.TransformerConv)

    def _call(
        self,
        x: Tensor | PairTensor,
        edge_index: Adj,
        edge_attr: OptTensor = None,
        return_attention_weights: bool | None = None,
    ) -> Call:
        """The gate's view of a forward call with these arguments."""
        source, target = (x, x) if isinstance(x, Tensor) else (x[0], x[1])
        # A flag of any value asks for the weights, as in PyG.
        weights = isinstance(return_attention_weights, bool)
        reasons = []
        if source is None or target is None:
            reasons.append("x is missing on one side")
        if weights and self.training and self.dropout > 0.0:
            reasons.append("attention weights before dropout are asked for in training")
        lin_edge = self.lin_edge
        if (lin_edge is None) != (edge_attr is None and adjacency_features(edge_index) is None):
            reasons.append("edge_dim without edge features, or edge features without edge_dim")
        return self._gate(
            "dot",
            (source, target) if self.flow == "source_to_target" else (target, source),
            edge_index,
            edge_attr,
            heads=self.heads,
            channels=self.out_channels,
            lin_edge=lin_edge,
            dropout=self.dropout,
            weights=weights,
            reasons=reasons,
        )

    def forward(
        self,
        x: Tensor | PairTensor,
        edge_index: Adj,
        edge_attr: OptTensor = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """PyG's forward; see `torch_geometric.nn.TransformerConv.forward`."""
        call = self._call(x, edge_index, edge_attr, return_attention_weights)
        if call.reasons:
            self._report(call.reasons)
            return super().forward(x, edge_index, edge_attr, return_attention_weights)

        x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
        edges, edge_attr, adjacency = self._edges(call, edge_dim=self.edge_dim)
        options: dict[str, Any] = {"dropout_p": float(self.dropout) if self.training else 0.0, "concat": self.concat}
        layers, found = (), None
        if x_src is x_dst:
            # The skip connection has the shape of the others unless heads are averaged.
            skips = (self.lin_skip,) if self.root_weight and self.concat else ()
            own = self._modules
            layers = (own["lin_query"], own["lin_key"], own["lin_value"], *skips)
            if edge_attr is None and not call.weights:
                scale = self.out_channels**-0.5
                found = attend(edges, "dot", x_src, self.heads, *layers, scale=scale, **options)
        if found is not None:
            (out, *skip), alpha = found, None
            out = self._settle(out, out.dtype)
        else:
            if layers:
                query, key, value, *skip = project(x_src, self.heads, *layers)
                skip = [rows.flatten(1) for rows in skip]
            else:
                projected, skip = (self.lin_query(x_dst), self.lin_key(x_src), self.lin_value(x_src)), []
                query, key, value = (rows.view(-1, self.heads, self.out_channels) for rows in projected)
            edge = None if edge_attr is None else self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
            result = dot_attention(edges, query, key, value, edge=edge, return_weights=call.weights, **options)
            attended, alpha = result if call.weights else (result, None)
            dtype = weights_dtype(query, key)
            out = self._settle(attended, dtype)
        if self.root_weight:
            x_r = skip[0] if skip else self.lin_skip(x_dst)
            if self.lin_beta is not None:
                beta = self.lin_beta(torch.cat([out, x_r, out - x_r], dim=-1)).sigmoid()
                out = beta * x_r + (1 - beta) * out
            else:
                out = out + x_r
        if alpha is None:
            return out
        if isinstance(adjacency, SparseTensor):
            return out, adjacency.set_value(alpha.to(dtype), layout="coo")
        return out, (adjacency, alpha.to(dtype))
