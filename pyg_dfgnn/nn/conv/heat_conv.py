"""Drop-in for PyG's HEATConv on a relational program."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Embedding
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor

from pyg_dfgnn.errors import check_shape
from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir.layers import Layer
from pyg_dfgnn.nn.conv.relational import EdgeRows, RelationalConv
from pyg_dfgnn.nn.conv_call import ConvCall, num_edges
from pyg_dfgnn.nn.dense.hetero_linear import FEW_TYPES, HETERO_LINEAR, typed_rows
from pyg_dfgnn.nn.gate import edges_lack_kernels, finalize_dtype, is_plain_layer, methods_of, promoted_dtype
from pyg_dfgnn.nn.projection import is_plain_linear
from pyg_dfgnn.nn.relational_program import kept_by_dropout, run


class HEATConv(RelationalConv, conv.HEATConv):
    """PyG's `HEATConv` without a vector per edge but the edge's own: same arguments, parameters, results and gradients.

    `x'_i = h_i + sum_j softmax_j(leaky_relu(a [h_i, h_j, e_r, f_ij])) W [h_j, f_ij]` with `h_j = W_{t(j)} x_j`

    Source: Mo et al., "Heterogeneous Edge-Enhanced Graph Attention Network", 2021.
    """

    propagate_type = {"x": Tensor, "edge_type_emb": Tensor, "edge_attr": OptTensor}
    _upstream_methods = methods_of(conv.HEATConv)
    _forms = (*RelationalConv._forms, "torch.sparse")
    _are_values_types = False

    def _call(
        self, x: Tensor, edge_index: Adj | Graph, node_type: Tensor, edge_type: Tensor, edge_attr: OptTensor = None
    ) -> ConvCall:
        reasons = [] if edge_attr is not None else ["edge_attr is missing"]
        lacks_kernels = edges_lack_kernels(edge_index)
        if not lacks_kernels and not all(map(is_plain_linear, (self.att, self.lin))):
            reasons.append("att or lin is another layer than PyG's")
        if not lacks_kernels and not is_plain_layer(self.hetero_lin, HETERO_LINEAR):
            reasons.append("hetero_lin is another layer than PyG's, or has no weight before the first call")
        if type(self.edge_type_emb) is not Embedding or self.edge_type_emb.max_norm is not None:
            reasons.append("edge_type_emb is another layer than PyG's")
        if node_type.dim() != 1 or node_type.dtype not in (torch.int64, torch.int32):
            reasons.append(f"node_type is no int64 or int32 vector ({node_type.dtype}, {list(node_type.shape)})")
        call = self._check_support(
            (x, x), edge_index, edge_type, self.att.weight, reasons, dropout=self.dropout, one_way=True
        )
        return call.replace(edge_attr=edge_attr)

    def _numbers_per_edge(self) -> int:
        # PyG joins both ends with the features of the edge for the scores and maps each message.
        joined, sent = (layer.weight.size(1) for layer in (self.att, self.lin))
        return joined + sent + (self.heads + 4) * self.out_channels  # type: ignore[no-any-return]

    def _are_few(self, *args: Any) -> bool:
        # PyG's maps of node types are a loop over them.
        return self.hetero_lin.num_types <= FEW_TYPES and super()._are_few(*args)

    def _count_relations(self) -> int:
        return self.edge_type_emb.num_embeddings

    def _nodes(self, x: Tensor, node_type: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the nodes mapped by the weights of their types."""
        return run(("hetero_linear",), *typed_rows(self.hetero_lin, x, node_type, "node_type"), dtype)["out"]

    def _program(
        self, call: ConvCall, graph: EdgeRows, x: Tensor, edge_index: Any, node_type: Tensor, *_: Any
    ) -> tuple[Layer, dict[str, Tensor]]:
        return self._attention(call, graph, self._nodes(x, node_type, call.problem[0]), self._edge(call))

    def _edge(self, call: ConvCall) -> Tensor:
        """Return the embedded features of the edges, [E, F]."""
        assert call.edge_attr is not None
        check_shape("edge_attr", call.edge_attr, (num_edges(call.edge_index), "D"), "[E, edge_dim]")
        return F.leaky_relu(self.edge_attr_emb(call.edge_attr), self.negative_slope)

    def _attention(
        self, call: ConvCall, graph: EdgeRows, nodes: Tensor, edge: Tensor
    ) -> tuple[Layer, dict[str, Tensor]]:
        sizes = [self.out_channels, self.out_channels, self.edge_type_emb.embedding_dim, edge.size(1)]
        target, source, relation, attr = self.att.weight.split(sizes, dim=1)
        types = F.linear(F.leaky_relu(self.edge_type_emb.weight, self.negative_slope), relation)
        inputs = {"x": nodes, "xd": nodes, "on_edge": F.linear(edge, attr), "source": source.t(), "target": target.t()}
        inputs["types"] = types
        if self.training and self.dropout > 0:
            inputs["keep"] = kept_by_dropout(self.dropout, (graph.num_edges, self.heads), nodes)
        return ("heat_nodes", self._static_number(self, "negative_slope")), inputs

    def forward(
        self, x: Tensor, edge_index: Adj | Graph, node_type: Tensor, edge_type: Tensor, edge_attr: OptTensor = None
    ) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.HEATConv.forward`."""
        call = self._call(x, edge_index, node_type, edge_type, edge_attr)
        if call.reasons:
            result: Tensor = self._fall_back(call, x, node_type, self._types_for_pyg(call, edge_type), edge_attr)
            return result
        graph, nodes, edge = self._graph(call), self._nodes(x, node_type, call.problem[0]), self._edge(call)
        attended = self._run(call, graph, *self._attention(call, graph, nodes, edge))
        # Messages are mapped after they are summed, their bias with the sum of the weights.
        edge = torch.cat([edge, edge.new_ones(edge.size(0), 1)], dim=1).unsqueeze(1).expand(-1, self.heads, -1)
        summed = self._run(call, graph, ("heat_edges",), {"alpha": attended["alpha"], "edge": edge})["out"]
        summed, total = summed[..., :-1], summed[..., -1:]
        out = F.linear(torch.cat([attended["out"], summed], dim=-1), self.lin.weight)
        out = out if self.lin.bias is None else out + total * self.lin.bias
        if not self.concat:
            out = out.mean(dim=1)
            out = out + nodes if self.root_weight else out
        else:
            out = out + nodes.unsqueeze(1) if self.root_weight else out
            out = out.reshape(-1, self.heads * self.out_channels)
        # Autocast leaves PyG's layer of node types in the dtype of x.
        dtype = call.problem[0]
        return finalize_dtype(out, promoted_dtype(dtype, x.dtype if self.root_weight else dtype, x.is_cuda), False)
