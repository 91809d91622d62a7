"""Drop-ins for PyG's RGCNConv and FastRGCNConv on relational programs."""

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.ir import R, S, U, V
from pyg_dfgnn.ir.layers import Layer
from pyg_dfgnn.nn.conv.relational import FEW_RELATIONS, EdgeRows, RelationalConv
from pyg_dfgnn.nn.conv_call import ConvCall
from pyg_dfgnn.nn.gate import finalize_dtype, methods_of, statistics_of
from pyg_dfgnn.ops.relational import index_space_of
from pyg_dfgnn.ops.visits import run_left

AGGREGATIONS = ("mean", "sum", "max")
Nodes: TypeAlias = Tensor | tuple[Tensor | None, Tensor] | None


class RelationalGraphConv(RelationalConv):
    """Base class of both convs: `x'_i = W_root x_i + b + sum_r aggr_{j in N_r(i)} W_r x_j`."""

    def _call(self, x: Nodes, edge_index: Adj | Graph, edge_type: OptTensor = None) -> ConvCall:
        x_src, x_dst = x if isinstance(x, tuple) else (x, x)
        reasons = []
        is_embedded = x_src is None or not x_src.is_floating_point()
        if x_dst is not None and x_dst.is_floating_point() == is_embedded:
            reasons.append("x is features on one side and node indices on the other")
        elif is_embedded and torch.compiler.is_compiling():
            reasons.append("node indices for x while compiling")
        elif is_embedded and self.num_blocks is not None:
            reasons.append("num_blocks with node indices for x")
        rows = self._rows(x_src)
        nodes = rows, rows if x_dst is x_src else self._rows(x_dst)
        return self._check_support(nodes, edge_index, edge_type, self.weight, reasons, one_way=True)

    def _rows(self, x: OptTensor) -> Tensor:
        """Return nodes as the gate takes them, a matrix."""
        if x is None:
            return self.weight.new_empty(self.in_channels_l, 0)
        return x if x.is_floating_point() or x.dim() != 1 else x.unsqueeze(1)

    def _storage_dtype(self, x: Tensor) -> torch.dtype:
        return super()._storage_dtype(x if x.is_floating_point() else self.weight)

    def _program(self, call: ConvCall, graph: EdgeRows, x: Nodes, *_: Any) -> tuple[Layer, dict[str, Tensor]]:
        x_src = x[0] if isinstance(x, tuple) else x
        (aggr,) = statistics_of(self.aggr_module)
        is_embedded = x_src is None or not x_src.is_floating_point()
        weight = self.weight
        if self.num_bases is not None:
            # Products with [K, N]: of nodes with each base, or of pairs with weights that are made first. While
            # torch.compile traces, the number of pairs is not known.
            if isinstance(graph, Graph) and not is_embedded and aggr == "mean":
                sizes = index_space_of(graph).sizes
                if sizes[S] < sizes[R] + sizes[V] / self.num_bases:
                    return ("rgcn_bases",), {"x": x_src, "basis": weight, "comp": self.comp}
            weight = (self.comp @ weight.flatten(1)).view(-1, *weight.shape[1:])
        if not is_embedded:
            return (f"rgcn_{aggr}",), {"x": x_src, "weight": weight}
        assert isinstance(graph, Graph)
        rows = index_space_of(graph)
        return ("rgcn_rows", aggr), {"z": weight[rows.index(U, R), self._number(x_src, rows.index(U, S))]}

    def _is_left(self, edge_index: Any) -> bool:
        """Return whether PyG's code takes a call in less time, whatever the features."""
        return False

    def _width_of_pairs(self) -> int:
        return max(self.in_channels_l, self.out_channels)  # type: ignore[no-any-return]

    def _fits_pairs(self, nodes: Any, edge_index: Any, edge_type: OptTensor) -> bool:
        # Without features rows of the weights stand for the nodes.
        return super()._fits_pairs(nodes, edge_index, edge_type) and nodes[0].size(1) > 0

    def _number(self, x_src: OptTensor, node: Tensor) -> Tensor:
        """Return which row of W_r stands for W_r x of these sources."""
        return node if x_src is None else x_src[node]

    def forward(self, x: Nodes, edge_index: Adj | Graph, edge_type: OptTensor = None) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.RGCNConv.forward`."""
        if self._is_left(edge_index):
            return run_left(super().forward, x, edge_index, edge_type)  # type: ignore[no-any-return]
        call = self._call(x, edge_index, edge_type)
        if call.reasons:
            out: Tensor = self._fall_back(call, x, self._types_for_pyg(call, edge_type))
            return out
        graph = self._graph(call)
        out = self._run(call, graph, *self._program(call, graph, x))["out"]
        root = self.root
        if root is not None:
            x_dst = x[1] if isinstance(x, tuple) else x
            if x_dst is None:
                x_dst = torch.arange(self.in_channels_l, device=root.device)
            out = out + (x_dst @ root if x_dst.is_floating_point() else root[x_dst])
        return out if self.bias is None else out + self.bias


class RGCNConv(RelationalGraphConv, conv.RGCNConv):
    """PyG's `RGCNConv` as one program in place of a loop over relations: same arguments, parameters and results.

    `x'_i = W_root x_i + b + sum_r aggr_{j in N_r(i)} W_r x_j`

    Source: Schlichtkrull et al., "Modeling Relational Data with Graph Convolutional Networks", 2018.
    """

    propagate_type = {"x": Tensor, "edge_type_ptr": OptTensor}
    _upstream_methods = methods_of(conv.RGCNConv)
    _loop_width = "in_channels_l"
    _fused_statistics = frozenset(AGGREGATIONS)

    def _is_left(self, edge_index: Any) -> bool:
        return self._is_one_of_few(edge_index)

    def _numbers_per_edge(self) -> int:
        # PyG's loop gathers and weights what a source sends.
        return 2 * self.in_channels_l  # type: ignore[no-any-return]

    def _are_few(self, *args: Any) -> bool:
        return self.num_relations <= FEW_RELATIONS and super()._are_few(*args)

    def _run(self, *args: Any) -> dict[str, Tensor]:
        # PyG adds the relations to zeros of the default dtype.
        return {name: finalize_dtype(x, torch.get_default_dtype(), False) for name, x in super()._run(*args).items()}


class FastRGCNConv(RelationalGraphConv, conv.FastRGCNConv):
    """PyG's `FastRGCNConv` without a weight per edge: same arguments, parameters, results and gradients.

    `x'_i = W_root x_i + b + sum_r aggr_{j in N_r(i)} W_r x_j`; as in PyG, node indices for `x` choose rows of the root
    weight only, and messages read the rows of the nodes' own numbers.

    Source: Schlichtkrull et al., "Modeling Relational Data with Graph Convolutional Networks", 2018.
    """

    propagate_type = {"x": Tensor, "edge_type": OptTensor}
    _upstream_methods = methods_of(conv.FastRGCNConv)
    _fused_statistics = frozenset({"sum", "mean"})
    _forms = (*RelationalConv._forms, "torch.sparse")

    def _numbers_per_edge(self) -> int:
        # PyG gathers the weight of each edge, or its blocks, and counts the relations of means in a row for each.
        weight = self.in_channels_l * self.out_channels // (self.num_blocks or 1)
        # On an H200 it takes longer than operators on pairs for many edges, and less for few.
        return 6 * weight + (3 * self.num_relations if self.aggr == "mean" else 0)  # type: ignore[no-any-return]

    def _number(self, x_src: OptTensor, node: Tensor) -> Tensor:
        return node
