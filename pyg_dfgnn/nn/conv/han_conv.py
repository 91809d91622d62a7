"""Drop-in for PyG's HANConv on relational programs."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import EdgeType, NodeType, OptTensor, PairTensor

from pyg_dfgnn.graph import Graph, compact_rows
from pyg_dfgnn.ir.layers import Layer
from pyg_dfgnn.nn.conv.hetero import JointConv
from pyg_dfgnn.nn.conv.relational import EdgeRows
from pyg_dfgnn.nn.conv_call import ConvCall
from pyg_dfgnn.nn.dense import TorchLinear
from pyg_dfgnn.nn.gate import finalize_dtype, is_plain_layer, methods_of, promoted_dtype
from pyg_dfgnn.nn.relational_program import kept_by_dropout


class HANConv(JointConv, conv.HANConv):
    """PyG's `HANConv` on one graph of all types: same arguments, parameters, results and gradients.

    `z_{r,i} = relu(sum_j softmax_j(leaky_relu(<a_r, h_j> + <b_r, h_i>)) h_j)` for each edge type r, and
    `x'_i = sum_r softmax_r(mean_k <q, tanh(W z_{r,k} + b)>) z_{r,i}`.

    Source: Wang et al., "Heterogeneous Graph Attention Network", 2019.
    """

    propagate_type = {"x": PairTensor, "alpha": PairTensor}
    _upstream_methods = methods_of(conv.HANConv)
    _few_relations = 12

    def _call(
        self,
        x_dict: dict[NodeType, Tensor],
        edge_index_dict: dict[EdgeType, Any],
        return_semantic_attention_weights: bool = False,
    ) -> ConvCall:
        plain = is_plain_layer(self.k_lin, (torch.nn.Linear, TorchLinear)) and self.k_lin.bias is not None
        reasons = [] if plain else ["k_lin is another layer than PyG's"]
        unknown = [name for name in x_dict if name not in self.proj]
        reasons += [f"x_dict has {', '.join(unknown)} without parameters"] if unknown else []
        if torch.compiler.is_compiling():
            reasons.append("the numbers of targets of each relation while compiling")
        # In PyG's order of the results.
        types = list(x_dict)
        return self._ask_joint(x_dict, edge_index_dict, types, self.metadata[1], self.k_lin.weight, reasons)

    def _program(
        self, call: ConvCall, graph: EdgeRows, x_dict: dict[NodeType, Tensor], *_: Any, **__: Any
    ) -> tuple[Layer, dict[str, Tensor]]:
        heads = self.heads
        rows = torch.cat([self.proj[name](x_dict[name]) for name in call.edge_index.sizes])
        nodes = rows.view(-1, heads, self.out_channels // heads)
        names = ["__".join(edge_type) for edge_type in self.metadata[1]]
        source, target = (torch.cat([parts[name] for name in names]) for parts in (self.lin_src, self.lin_dst))
        inputs = {"x": nodes, "xd": nodes, "source": source, "target": target}
        if self.training and self.dropout > 0:
            inputs["keep"] = kept_by_dropout(self.dropout, (graph.num_edges, heads), nodes)
        return ("han_nodes", self._static_number(self, "negative_slope")), inputs

    def forward(
        self,
        x_dict: dict[NodeType, Tensor],
        edge_index_dict: dict[EdgeType, Any],
        return_semantic_attention_weights: bool = False,
    ) -> Any:
        """PyG's forward, also on dicts of `Graph`; see `torch_geometric.nn.HANConv.forward`."""
        call = self._call(x_dict, edge_index_dict, return_semantic_attention_weights)
        if call.reasons:
            return self._fall_back(call, x_dict, return_semantic_attention_weights)
        graph, sizes = self._graph(call), call.edge_index.sizes
        assert isinstance(graph, Graph)
        z = self._run(call, graph, *self._program(call, graph, x_dict))["out"]
        share = self._shares(call, graph, z)
        out = self._run(call, graph, ("han_mean",), {"z": z, "share": share})["out"]
        out = finalize_dtype(out, promoted_dtype(call.problem[0], self.q.dtype, out.is_cuda), False)
        received = {edge_type[-1] for edge_type in edge_index_dict}
        parts = zip(sizes, out.split(list(sizes.values())), strict=True)
        out_dict = {name: rows if name in received else None for name, rows in parts}
        if not return_semantic_attention_weights:
            return out_dict
        numbers = call.edge_index.relations
        weights: dict[NodeType, OptTensor] = dict.fromkeys(sizes)
        for name in (name for name in received if sizes[name]):
            relations = [numbers[edge_type] for edge_type in edge_index_dict if edge_type[-1] == name]
            weights[name] = share[torch.tensor(relations, device=share.device)]
        return out_dict, weights

    def _shares(self, call: ConvCall, graph: Graph, z: Tensor) -> Tensor:
        """Return the semantic attention: the share of each relation in what its targets receive, [R]."""
        weight, bias, q = self.k_lin.weight.t(), self.k_lin.bias, self.q[0]
        scores = self._run(call, graph, ("han_scores",), {"z": z, "weight": weight, "bias": bias, "q": q})["out"]
        edge_index, relations, sizes = call.edge_index[:3]
        names = list(sizes)
        # Type of the targets of each relation; -1 where the call has no such edges.
        targets = tuple(names.index(edge_type[-1]) if edge_type in edge_index else -1 for edge_type in relations)

        def build() -> tuple[Tensor, Tensor, Tensor]:
            count = torch.tensor([list(sizes.values())[t] if t >= 0 else 0 for t in targets])
            groups = torch.tensor([[t == group for t in targets] for group in sorted({*targets} - {-1})])
            pairs = compact_rows(graph, "target_relations").rowptr.diff()
            count = count.to(graph.device)
            return (count - pairs).float(), count.clamp(min=1).float(), groups.to(graph.device)

        missing, count, groups = graph.derived(("semantic", targets), build)
        # Targets without edges of a relation have zeros for z.
        scores = (scores + missing * (q * bias.tanh()).sum(dim=0, keepdim=True)) / count
        shares = torch.softmax(scores.masked_fill(~groups, -torch.inf), dim=1)
        return shares.masked_fill(~groups, 0).sum(dim=0)
