"""Drop-in for PyG's RGATConv on a relational program."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor, Size

from pyg_dfgnn.errors import check_shape
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir.layers import Layer
from pyg_dfgnn.nn.conv.aggregation import is_matrix, values_of
from pyg_dfgnn.nn.conv.relational import FEW_RELATIONS, EdgeRows, RelationalConv
from pyg_dfgnn.nn.conv_call import ConvCall, edges_in_flow, form_of, num_edges, with_weights
from pyg_dfgnn.nn.gate import methods_of
from pyg_dfgnn.nn.projection import is_plain_linear
from pyg_dfgnn.nn.relational_program import kept_by_dropout


class RGATConv(RelationalConv, conv.RGATConv):
    """PyG's `RGATConv` without a weight per edge: same arguments, parameters, results and gradients.

    `x'_i = sum_j softmax(leaky_relu(W_r x_i Q + W_r x_j K)) W_r x_j`, or with products of queries and keys; the softmax
    is taken within or across relations.

    Source: Busbridge et al., "Relational Graph Attention Networks", 2019.
    """

    propagate_type = {"x": Tensor, "edge_type": OptTensor, "edge_attr": OptTensor}
    _upstream_methods = methods_of(conv.RGATConv)
    _forms = (*RelationalConv._forms, "torch.sparse")
    _are_values_types = False
    _is_fused = True

    def reset_parameters(self) -> None:
        """Reset the parameters as PyG does, and `l2`, which PyG leaves without values, to 1 / out_channels."""
        super().reset_parameters()
        torch.nn.init.constant_(self.l2, 1 / self.out_channels)

    def _call(
        self,
        x: Tensor,
        edge_index: Adj | Graph,
        edge_type: OptTensor = None,
        edge_attr: OptTensor = None,
        size: Size = None,
        return_attention_weights: bool | None = None,
    ) -> ConvCall:
        reasons = [] if self.mod is None else [f"mod is {self.mod!r}"]
        if self.dim != 1:
            reasons.append(f"dim is {self.dim}")
        if edge_attr is not None and (self.lin_edge is None or not is_plain_linear(self.lin_edge)):
            reasons.append("edge_attr with another edge layer than PyG's")
        form = form_of(edge_index)
        if edge_attr is None and is_matrix(form) and (form == "SparseTensor" or self.lin_edge is None):
            values = values_of(edge_index)
            if values is not None and (form == "SparseTensor" or values.dim() > 1):
                reasons.append(f"the values of a {form} are edge features")
        weight = self.weight if self.num_bases is None else self.basis
        return self._check_support(
            (x, x),
            edge_index,
            edge_type,
            weight,
            reasons,
            edge_attr=edge_attr,
            size=size,
            lin_edge=self.lin_edge,
            dropout=self.dropout,
            weights=isinstance(return_attention_weights, bool),
            one_way=True,
        )

    def _numbers_per_edge(self) -> int:
        # PyG gathers the weight of each edge.
        return self.in_channels * self.heads * self.out_channels  # type: ignore[no-any-return]

    def _width_of_pairs(self) -> int:
        return max(self.in_channels, self.heads * self.out_channels)  # type: ignore[no-any-return]

    def _loops(self) -> bool:
        # PyG's softmax within relations is one.
        return self.attention_mechanism == "within-relation"  # type: ignore[no-any-return]

    def _are_few(self, *args: Any) -> bool:
        is_short = not self._loops() or self.num_relations <= FEW_RELATIONS
        return is_short and super()._are_few(*args)

    def _program(
        self, call: ConvCall, graph: EdgeRows, x: Tensor, *_: Any, **__: Any
    ) -> tuple[Layer, dict[str, Tensor]]:
        weight = self.weight if self.num_bases is None else torch.einsum("rb,bkn->rkn", self.att, self.basis)
        inputs = {"x": x, "xd": x, "weight": weight, "q": self.q, "k": self.k}
        edge_attr = call.edge_attr
        if edge_attr is not None:
            edge_attr = edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr
            width = self.lin_edge.in_channels
            check_shape("edge_attr", edge_attr, (num_edges(call.edge_index), width), f"[E, edge_dim={width}]")
            # One column per head: folding it first avoids a tensor [E, H * C].
            inputs["edge"] = F.linear(edge_attr, self.e.t() @ self.lin_edge.weight)
        if self.training and self.dropout > 0:
            inputs["keep"] = kept_by_dropout(self.dropout, (graph.num_edges, self.heads), x)
        heads, slope = self._integer(self.heads, "heads"), self._static_number(self, "negative_slope")
        return ("rgat", heads, self.attention_mode, self.attention_mechanism, slope), inputs

    def forward(
        self,
        x: Tensor,
        edge_index: Adj | Graph,
        edge_type: OptTensor = None,
        edge_attr: OptTensor = None,
        size: Size = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.RGATConv.forward`."""
        call = self._call(x, edge_index, edge_type, edge_attr, size, return_attention_weights)
        if call.reasons:
            return self._fall_back(
                call, x, self._types_for_pyg(call, edge_type), edge_attr, size, return_attention_weights
            )
        graph = self._graph(call)
        results = self._run(call, graph, *self._program(call, graph, x))
        out = results["out"]
        if not self.concat:
            out = out.view(-1, self.heads, self.out_channels).mean(dim=1)
        out = out if self.bias is None else out + self.bias
        if not call.weights:
            return out
        adjacency = edges_in_flow(edge_index, self.flow) if isinstance(edge_index, Graph) else edge_index
        return with_weights(out, adjacency, results["alpha"])

    def _outputs(self, call: ConvCall) -> Sequence[str] | None:
        return None if call.weights else ("out",)
