"""Drop-ins for PyG's GINConv and GINEConv on the fused aggregation."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptPairTensor, OptTensor, Size

from pyg_dfgnn.dispatch.segment import holds_layer
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn.conv.aggregation import AggregationConv, MessageInputs, ProblemFields
from pyg_dfgnn.nn.conv_call import ConvCall, adjacency_features, num_edges
from pyg_dfgnn.nn.gate import methods_of
from pyg_dfgnn.nn.projection import is_plain_linear


class GINConv(AggregationConv, conv.GINConv):
    """PyG's `GINConv` with one fused kernel per direction: same arguments, parameters, results and gradients.

    `x'_i = nn((1 + eps) x_i + aggr_j x_j)`

    Source: Xu et al., "How Powerful are Graph Neural Networks?", 2019.
    """

    propagate_type = {"x": OptPairTensor}
    _upstream_methods = methods_of(conv.GINConv)

    def _call(self, x: Tensor | OptPairTensor, edge_index: Adj | Graph, size: Size = None) -> ConvCall:
        return self._check_support(x, edge_index, size=size, weighted=None)

    def forward(self, x: Tensor | OptPairTensor, edge_index: Adj | Graph, size: Size = None) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.GINConv.forward`."""
        out, is_output = self._reduced(x, edge_index, size)
        if is_output:
            return out  # type: ignore[no-any-return]
        x_dst = x if isinstance(x, Tensor) else x[1]
        out = out if x_dst is None else torch.addcmul(out, x_dst, 1 + self.eps)
        return self.nn(out)


class GINEConv(AggregationConv, conv.GINEConv):
    """PyG's `GINEConv` with one fused kernel per direction: same arguments, parameters, results and gradients.

    `x'_i = nn((1 + eps) x_i + aggr_j relu(x_j + W e_ij + b))`

    Where an edge has few features, the kernel maps them itself: no tensor has a row per edge as wide as `x`.

    Source: Hu et al., "Strategies for Pre-training Graph Neural Networks", 2020.
    """

    propagate_type = {"x": OptPairTensor, "edge_attr": OptTensor}
    _upstream_methods = methods_of(conv.GINEConv)
    _message = "relu_add"

    def _problem_fields(self, x: Any = None, edge: Tensor | None = None) -> ProblemFields:
        message, names, channels, *_ = super()._problem_fields(x, edge)
        lin = self.lin
        if isinstance(x, Tensor) and edge is not None and lin is not None and is_plain_linear(lin):
            dtype, numbers = torch.promote_types(x.dtype, edge.dtype), len(range(edge.size(1)))
            question = "relu_linear", names, channels, False, numbers
            if lin.bias is not None and holds_layer(self._problem_type(*question, dtype, x.device)):
                return question
        return message, names, channels, False, 0

    def _call(
        self,
        x: Tensor | OptPairTensor,
        edge_index: Adj | Graph,
        edge_attr: OptTensor = None,
        size: Size = None,
    ) -> ConvCall:
        attr = adjacency_features(edge_index) if edge_attr is None else edge_attr
        reasons: tuple[str, ...] = ()
        source = x if isinstance(x, Tensor) else x[0]
        if attr is None or attr.dim() != 2 or attr.size(0) != num_edges(edge_index):
            attr, reasons = None, ("edge_attr is no matrix with a row per edge",)
        elif self.lin is None and isinstance(source, Tensor) and source.size(-1) != attr.size(-1):
            attr, reasons = None, ("edge_attr has another width than x",)
        elif edge_attr is None:
            reasons = ("edge features in a sparse adjacency",)
        return self._check_support(x, edge_index, attr, size=size, weighted=False, reasons=reasons)

    def _message_inputs(self, call: ConvCall) -> MessageInputs:
        graph, _, _ = self._edges(call)
        operands: dict[str, Any] = {"edge": call.edge_attr}
        if (message := call.problem[0]) == "relu_linear":
            operands |= {"lin_weight": self.lin.weight.t(), "lin_bias": self.lin.bias}
        elif self.lin is not None:
            operands["edge"] = self.lin(call.edge_attr)
        return MessageInputs(graph, message=message, vectors=operands)

    def forward(
        self,
        x: Tensor | OptPairTensor,
        edge_index: Adj | Graph,
        edge_attr: OptTensor = None,
        size: Size = None,
    ) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.GINEConv.forward`."""
        out, is_output = self._reduced(x, edge_index, size, edge_attr=edge_attr)
        if is_output:
            return out  # type: ignore[no-any-return]
        x_dst = x if isinstance(x, Tensor) else x[1]
        out = out if x_dst is None else torch.addcmul(out, x_dst, 1 + self.eps)
        return self.nn(out)
