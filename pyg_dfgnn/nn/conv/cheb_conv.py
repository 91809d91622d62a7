"""Drop-in for PyG's ChebConv on the fused aggregation."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import conv
from torch_geometric.typing import Adj, OptTensor

from pyg_dfgnn.graph import Graph
from pyg_dfgnn.nn import conv_call
from pyg_dfgnn.nn.conv.aggregation import AggregationConv, MessageInputs, ProblemFields, is_matrix
from pyg_dfgnn.nn.conv_call import ConvCall
from pyg_dfgnn.nn.gate import methods_of, statistics_of
from pyg_dfgnn.ops.segment import inverse_root_degree
from pyg_dfgnn.ops.visits import run_left


class ChebConv(AggregationConv, conv.ChebConv):
    """PyG's `ChebConv` with fused kernels: same arguments, parameters, results and gradients.

    `x' = sum_k T_k W_k` with `T_0 = x`, `T_1 = L x`, `T_k = 2 L T_(k-1) - T_(k-2)` and the scaled Laplacian `L`

    Without edge weights the symmetric Laplacian of a graph without self-loops is `1 - 2 / lambda_max` times the
    identity plus factors of nodes, so that no weight of an edge is made.

    Source: Defferrard et al., "Convolutional Neural Networks on Graphs with Fast Localized Spectral Filtering", 2016.
    """

    propagate_type = {"x": Tensor, "norm": Tensor}
    _upstream_methods = methods_of(conv.ChebConv)
    _makes_edges = True
    _factor = "norm"

    def _problem_fields(self, x: Any = None, edge: Tensor | None = None) -> ProblemFields:
        message, names, channels, *_ = super()._problem_fields(x, edge)
        by_node = self._is_by_node(edge)
        return message if by_node else "weight", names, channels, by_node, 0

    def _is_by_node(self, edge: Tensor | None) -> bool:
        """Return whether factors of nodes will do on a graph without self-loops, so that no weights are made."""
        return edge is None and self.normalization == "sym" and statistics_of(self.aggr_module) == ("sum",)

    def _call(
        self,
        x: Tensor,
        edge_index: Adj | Graph,
        edge_weight: OptTensor = None,
        batch: OptTensor = None,
        lambda_max: Any = None,
    ) -> ConvCall:
        reasons = []
        if is_matrix(conv_call.form_of(edge_index)):
            reasons.append("a sparse adjacency")
        if torch.compiler.is_compiling():
            reasons.append("the Laplacian while compiling")
        return self._check_support((x, x), edge_index, edge_weight, self_loops=True, reasons=tuple(reasons))

    def forward(
        self,
        x: Tensor,
        edge_index: Adj | Graph,
        edge_weight: OptTensor = None,
        batch: OptTensor = None,
        lambda_max: Any = None,
    ) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.ChebConv.forward`."""
        if self._is_left(x, edge_index, edge_weight):
            if not self._takes_operators(edge_index, x, x):
                left: Tensor = run_left(super().forward, x, edge_index, edge_weight, batch, lambda_max)
                return left
            options = x.size(-2), edge_weight, self.normalization, lambda_max
            sent, factor, rest = MessageInputs(*self.__norm__(edge_index, *options, x.dtype, batch)), 1.0, 0.0
        else:
            call = self._call(x, edge_index, edge_weight, batch, lambda_max)
            if call.reasons:
                out: Tensor = self._fall_back(call, x, edge_weight, batch, lambda_max)
                return out
            sent, factor, rest = self._laplacian(call, x, batch, lambda_max)

        def multiply(features: Tensor) -> Tensor:
            product = self._aggregate(sent, features)
            product = product if factor == 1.0 else product * factor
            return product + rest * features if rest else product

        first, *others = self.lins
        out, before, last = first(x), x, x
        for place, lin in enumerate(others):
            term = multiply(last)
            term = term if place == 0 else 2.0 * term - before
            out, before, last = out + lin(term), last, term
        return out if self.bias is None else out + self.bias

    def _as_run(
        self,
        problem: Any,
        call: ConvCall,
        x: Tensor,
        edge_index: Adj | Graph,
        edge_weight: OptTensor = None,
        batch: OptTensor = None,
        lambda_max: Any = None,
    ) -> tuple[Any, ConvCall]:
        return self._as_sent(problem, call, self._laplacian(call, x, batch, lambda_max)[0])

    def _laplacian(
        self, call: ConvCall, x: Tensor, batch: OptTensor, lambda_max: Any
    ) -> tuple[MessageInputs, float, float]:
        """Return what travels along the edges of a call without reasons, and the factors of its sum and of the node.

        Raises:
            ValueError: The edges change, as those of batches in a captured step do.
        """
        graph, _, _ = self._edges(call.replace(self_loops=False), measured=True)
        assert isinstance(graph, Graph)
        if graph.is_static:
            need = "edges that stay as they are, since the layer looks for self-loops among them"
            raise ValueError(f"'edge_index' needs {need} (got those of batches in a captured step)")
        # Without edge weights the largest entry, which PyG takes for half of lambda_max, is 1.
        largest = 2.0 if lambda_max is None else lambda_max
        is_number = isinstance(largest, (int, float)) and largest != 0
        if self._is_by_node(call.edge_attr) and is_number and not graph.has_loops:
            # PyG's degrees are those of row 0.
            domain = "sources" if self.flow == "source_to_target" else "targets"
            factor = 2.0 / largest
            return MessageInputs(graph, scale=inverse_root_degree(graph, domain), dtype=x.dtype), -factor, factor - 1.0
        weight = None if call.edge_attr is None else self._weight(call)
        edge_index, options = self._plain(call), (self.normalization, lambda_max)
        _, norm = self.__norm__(edge_index, x.size(0), weight, *options, dtype=x.dtype, batch=batch)
        graph, _, _ = self._edges(call, measured=True)
        if graph is call.edge_index:
            # The weights are in PyG's order, which has the self-loops last.
            graph = Graph.resolve(graph.edge_index, graph.num_src, graph.num_dst, True, False)
        return MessageInputs(graph, norm, dtype=norm.dtype), 1.0, 0.0
