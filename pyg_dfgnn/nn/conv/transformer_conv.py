"""Drop-in for PyG's TransformerConv on the fused dot-product attention."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor, PairTensor, SparseTensor

from pyg_dfgnn.dispatch.attention.family import shares_edge_rows
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.attention import AttentionConv
from pyg_dfgnn.nn.conv_call import ConvCall, adjacency_features
from pyg_dfgnn.nn.gate import finalize_dtype, methods_of, promoted_dtype
from pyg_dfgnn.nn.projection import is_plain_linear, project
from pyg_dfgnn.ops.attention.functional import dot_attention
from pyg_dfgnn.statements.scores import DOT


class TransformerConv(AttentionConv, conv.TransformerConv):
    """PyG's `TransformerConv` with one fused kernel per direction: same arguments, parameters, results and gradients.

    `x'_i = W_1 x_i + sum_j softmax_j(<W_3 x_i, W_4 x_j + W_6 e_ij> / sqrt(C)) (W_2 x_j + W_6 e_ij)`

    Source: Shi et al., "Masked Label Prediction", 2021.
    """

    propagate_type = {"query": Tensor, "key": Tensor, "value": Tensor, "edge_attr": OptTensor}
    _upstream_methods = methods_of(conv.TransformerConv)

    def _problem_fields(self, x: Tensor | None = None) -> tuple[str, int, int]:
        return "dot", self.heads, self.out_channels

    def _call(
        self,
        x: Tensor | PairTensor,
        edge_index: Adj | Graph,
        edge_attr: OptTensor = None,
        return_attention_weights: bool | None = None,
    ) -> ConvCall:
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
        call = self._gate(
            self._problem_fields(),
            (source, target) if self.flow == "source_to_target" else (target, source),
            edge_index,
            edge_attr,
            lin_edge=lin_edge,
            dropout=self.dropout,
            weights=weights,
            reasons=reasons,
        )
        if call.edge_attr is not None and self._shares_edge_rows(call.edge_attr):
            # Neither TF32 nor dout_dlogit.
            call = call.replace(problem=(*call.problem, False, False, lin_edge.in_channels))
        return call

    def _shares_edge_rows(self, edge_attr: Tensor) -> bool:
        """Return whether the op takes the edge features as they are, with the matrix of `lin_edge`."""
        layer = self.lin_edge
        if not is_plain_linear(layer) or layer.bias is not None:
            return False
        weight = layer.weight
        is_cast = torch.is_autocast_enabled(edge_attr.device.type)
        return (is_cast or edge_attr.dtype is weight.dtype) and shares_edge_rows(
            DOT, self.heads, self.out_channels, weight.size(1)
        )

    def _edge_terms(self, edge_attr: Tensor) -> dict[str, Tensor]:
        """Return the arguments of the op for edge features [E, edge_dim]."""
        if self._shares_edge_rows(edge_attr):
            # Cast as autocast does for a linear layer.
            return {"edge_attr": edge_attr.to(self._storage_dtype(edge_attr)), "edge_weight": self.lin_edge.weight}
        return {"edge": self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)}

    def forward(
        self,
        x: Tensor | PairTensor,
        edge_index: Adj | Graph,
        edge_attr: OptTensor = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.TransformerConv.forward`."""
        call = self._call(x, edge_index, edge_attr, return_attention_weights)
        if call.reasons:
            return self._fall_back(call, x, edge_attr, return_attention_weights)

        x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
        graph, edge_attr, adjacency = self._edges(call, edge_dim=self.edge_dim)
        layers, heads, channels = self._modules, self.heads, self.out_channels
        skip: Sequence[Tensor] = ()
        if x_src is x_dst:
            projections = layers["lin_query"], layers["lin_key"], layers["lin_value"]
            # The skip connection has the shape of the others unless heads are averaged.
            skips = (layers["lin_skip"],) if self.root_weight and self.concat else ()
            query, key, value, *skip = project(x_src, *projections, *skips)
        else:
            query = layers["lin_query"](x_dst)
            key, value = project(x_src, layers["lin_key"], layers["lin_value"])
        attended = dot_attention(
            graph,
            query,
            key,
            value,
            scale=channels**-0.5,
            dropout_p=float(self.dropout) if self.training else 0.0,
            return_weights=call.weights,
            concat=self.concat,
            heads=heads,
            **({} if edge_attr is None else self._edge_terms(edge_attr)),
        )
        attended, alpha = attended if call.weights else (attended, None)
        dtype = promoted_dtype(query.dtype, key.dtype, query.is_cuda)
        attended = finalize_dtype(attended, dtype, not self.concat)
        out = self._add_skip(x_dst, attended, *skip)
        if alpha is None:
            return out
        alpha = alpha.to(dtype)
        if isinstance(adjacency, SparseTensor):
            return out, adjacency.set_value(alpha, layout="coo")
        return out, (adjacency, alpha)

    def _add_skip(self, x: Tensor, out: Tensor, x_r: Tensor | None = None) -> Tensor:
        """Return the attention plus the skip connection `x_r`, by default that of the targets x."""
        if not self.root_weight:
            return out
        if x_r is None:
            x_r = self.lin_skip(x)
        if self.lin_beta is None:
            return out + x_r
        beta = self.lin_beta(torch.cat([out, x_r, out - x_r], dim=-1)).sigmoid()
        return beta * x_r + (1 - beta) * out
