"""Drop-in for PyG's HGTConv on a relational program."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu
from torch_geometric.nn import conv
from torch_geometric.typing import EdgeType, NodeType

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir.layers import Layer
from pyg_dfgnn.nn.conv.joint import JointConv
from pyg_dfgnn.nn.dense.hetero_linear import HETERO_LINEAR
from pyg_dfgnn.nn.edges import Call
from pyg_dfgnn.nn.gate import is_plain_layer, methods_of
from pyg_dfgnn.ops.relational import RowSet


class HGTConv(JointConv, conv.HGTConv):
    """PyG's `HGTConv` on one graph of all types: same arguments, parameters, results and gradients.

    `x'_i = a W_out gelu(sum_j softmax_j(mu_r <q_i, k_j A_r> / sqrt(C)) v_j M_r) + (1 - a) x_i`

    Edge types may come in any order; PyG's class assumes the order of the metadata.

    Source: Hu et al., "Heterogeneous Graph Transformer", 2020.
    """

    propagate_type = {"k": Tensor, "q": Tensor, "v": Tensor, "edge_attr": Tensor}
    _upstream_methods = methods_of(conv.HGTConv)

    def _call(self, x_dict: dict[NodeType, Tensor], edge_index_dict: dict[EdgeType, Any]) -> Call:
        plain = all(is_plain_layer(layer, HETERO_LINEAR) for layer in (self.k_rel, self.v_rel))
        reasons = [] if plain else ["k_rel or v_rel is another layer than PyG's"]
        types = list(self.kqv_lin.lins)
        return self._ask_joint(x_dict, edge_index_dict, types, self.edge_types, self.k_rel.weight, reasons)

    def _program(
        self, call: Call, graph: Graph | RowSet, x_dict: dict[NodeType, Tensor], *_: Any
    ) -> tuple[Layer, dict[str, Tensor]]:
        heads, channels = self.heads, self.out_channels // self.heads
        kqv = self.kqv_lin(x_dict)
        projected = [kqv[name].tensor_split(3, dim=1) for name in call.edge_index.sizes]
        k, q, v = (torch.cat(rows).view(-1, heads, channels) for rows in zip(*projected, strict=True))
        key, value = (
            layer.weight.view(heads, -1, channels, channels).transpose(0, 1) for layer in (self.k_rel, self.v_rel)
        )
        scale = torch.cat([self.p_rel["__".join(edge_type)] for edge_type in self.edge_types])
        return ("hgt_attention",), {"k": k, "q": q, "v": v, "key": key, "value": value, "scale": scale}

    def forward(
        self, x_dict: dict[NodeType, Tensor], edge_index_dict: dict[EdgeType, Any]
    ) -> dict[NodeType, Tensor | None]:
        """PyG's forward, also on dicts of `Graph`; see `torch_geometric.nn.HGTConv.forward`."""
        call = self._call(x_dict, edge_index_dict)
        if call.reasons:
            results: dict[NodeType, Tensor | None] = self._fall_back(call, x_dict)
            return results
        graph = self._graph(call)
        out = self._run(call, graph, *self._program(call, graph, x_dict))["out"]
        sizes = call.edge_index.sizes
        received: dict[NodeType, Tensor | None] = {
            name: gelu(rows)
            for name, rows in zip(sizes, out.split(list(sizes.values())), strict=True)
            if name in self.dst_node_types
        }
        mapped = self.out_lin(received)
        for name in received:
            x, out = x_dict[name], mapped[name]
            if out.size(-1) == x.size(-1):
                share = self.skip[name].sigmoid()
                out = share * out + (1 - share) * x
            received[name] = out
        return received
