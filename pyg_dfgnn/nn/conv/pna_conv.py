"""Drop-in for PyG's PNAConv on one gather of all statistics of all towers."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import aggr, conv
from torch_geometric.typing import Adj, OptTensor, SparseTensor

from pyg_dfgnn.dispatch.segment import max_channels
from pyg_dfgnn.graph import EdgeSet, Graph
from pyg_dfgnn.graph.ends import Part
from pyg_dfgnn.nn.aggr.scaler import factors_of
from pyg_dfgnn.nn.conv.aggregation import AggregationConv, ProblemFields
from pyg_dfgnn.nn.conv_call import ConvCall, adjacency_features
from pyg_dfgnn.nn.gate import FusedConv, edges_lack_kernels, methods_of, statistics_of
from pyg_dfgnn.nn.projection import is_plain_linear
from pyg_dfgnn.ops.segment import aggregate, of_degrees
from pyg_dfgnn.ops.visits import run_left


class PNAConv(AggregationConv, conv.PNAConv):
    r"""PyG's `PNAConv` with one fused kernel per direction: same arguments, parameters, results and gradients.

    The layer in front of the aggregation is linear in both ends of an edge. With :math:`c_i = W_1 x_i` and
    :math:`h_j = W_2 x_j + b`, the statistics of :math:`c_i + h_j + W_3 e_{ij}` are those of :math:`h_j + W_3 e_{ij}`,
    shifted by :math:`c_i`, which variances do not see; no message is ever stored. The scalers, which multiply rows,
    follow the first layer behind the aggregation instead of preceding it.

    PyG's path shares the gradient of a maximum or minimum with an initial 0 where the message is exactly 0; this one
    does so where :math:`h_j + W_3 e_{ij}` is.

    Source: Corso et al., "Principal Neighbourhood Aggregation for Graph Nets", 2020.
    """

    propagate_type = {"x": Tensor, "edge_attr": OptTensor}
    _upstream_methods = methods_of(conv.PNAConv)
    _scaler = aggr.DegreeScalerAggregation
    # A product of shifted messages is no shifted product.
    _fused_statistics = AggregationConv._fused_statistics - {"mul"}
    _node_dim = 0
    _is_projected = True
    # Both ends side by side, their product, and what the statistics make of it.
    _writes = 6

    @staticmethod
    def _suits(layer: conv.PNAConv) -> bool:
        # Messages of several layers are not linear in both ends.
        return len(layer.pre_nns[0]) == 1

    def _problem_fields(self, x: Any = None, edge: Tensor | None = None, *_: Any) -> ProblemFields:
        message = "copy" if self.edge_dim is None else "add"
        return message, statistics_of(self.aggr_module.aggr), self.towers * self.F_in, False, 0

    def _standing_reasons(self, like: Tensor | None = None) -> list[str]:
        return [*self._layer_reasons(), *super()._standing_reasons(like)]

    def _layer_reasons(self) -> list[str]:
        """Return what the layers around the aggregation have against the fused forward."""
        if len(self.pre_nns[0]) > 1:
            return ["pre_layers is more than 1: messages are not linear in both ends"]
        layers = [*(nn[0] for nn in self.pre_nns), *(nn[0] for nn in self.post_nns)]
        if self.edge_dim is not None:
            layers.append(self.edge_encoder)
        return [] if all(map(is_plain_linear, layers)) else ["a layer is no plain linear layer"]

    def _call(self, x: Tensor, edge_index: Adj | Graph, edge_attr: OptTensor = None) -> ConvCall:
        reasons, values = self._layer_reasons(), adjacency_features(edge_index)
        if values is None and isinstance(edge_index, SparseTensor) and edge_index.has_value():
            reasons.append("a SparseTensor with one value per edge")
        if (edge_attr is None and values is None) != (self.edge_dim is None):
            reasons.append("edge_dim without edge features, or edge features without edge_dim")
        lin_edge = None if self.edge_dim is None else self.edge_encoder
        options: dict[str, Any] = {"lin_edge": lin_edge, "reasons": reasons}
        if self._is_part(edge_index):
            return self._ask_part(self._problem_fields(), x, edge_index, edge_attr, **options)
        return self._gate(self._problem_fields(), (x, x), edge_index, edge_attr, **options)

    def _is_left(self, x: Any, edge_index: Any, edge: Tensor | None = None) -> bool:
        # PyG launches so much for several towers, or for edges, that kernels take less time if one takes whole rows.
        is_long = self.towers > 1 or self.edge_dim is not None
        if is_long and not torch.compiler.is_compiling() and not edges_lack_kernels(edge_index):
            if self.towers * self.F_in <= max_channels(statistics_of(self.aggr_module.aggr)):
                return False
        return super()._is_left(x, edge_index, edge)

    def forward(self, x: Tensor, edge_index: Adj | Graph, edge_attr: OptTensor = None) -> Tensor:
        """PyG's forward, also on a `Graph`; see `torch_geometric.nn.PNAConv.forward`."""
        if self._is_left(x, edge_index):
            left: Tensor = run_left(super().forward, x, edge_index, edge_attr)
            return left
        call = self._call(x, edge_index, edge_attr)
        if call.reasons:
            out: Tensor = self._fall_back(call, x, edge_attr)
            return out
        graph, edge_attr, _ = FusedConv._edges(self, call, edge_dim=self.edge_dim)
        rows = x.view(-1, self.towers if self.divide_input else 1, self.F_in)
        out = self._statistics(graph, rows, edge_attr, call.part)
        factors = factors_of(self.aggr_module, graph).to(out.dtype)
        out = _scaled_layers([nn[0] for nn in self.post_nns], rows, out, factors)
        further = [nn[1:] for nn in self.post_nns]
        if len(further[0]):
            out = torch.stack([layers(out[:, tower]) for tower, layers in enumerate(further)], dim=1)
        return self.lin(out.flatten(1))

    def _statistics(self, graph: Graph | EdgeSet, rows: Tensor, edge_attr: Tensor | None, part: Part | None) -> Tensor:
        """Return the statistics of the messages, [N, towers, S * F_in].

        Args:
            graph: The edges.
            rows: Features, [N, towers or 1, F_in].
            edge_attr: Features of the edges, [E, edge_dim].
            part: The part of a partitioned graph that the edges are those of.
        """
        weights = torch.stack([nn[0].weight for nn in self.pre_nns])
        to_target, to_source, *to_edge = weights.split(int(self.F_in), dim=2)
        bias = torch.cat([nn[0].bias for nn in self.pre_nns])
        edge = None
        if edge_attr is not None:
            encoder = self.edge_encoder
            edge = F.linear(
                edge_attr, (to_edge[0] @ encoder.weight).flatten(0, 1), (to_edge[0] @ encoder.bias).flatten()
            )
        # The bias comes before the statistics, so that nodes of zeros do not send zeros.
        names = statistics_of(self.aggr_module.aggr)
        sent, message = _products(rows, to_source, bias), "copy" if edge is None else "add"
        sent = sent if part is None else part.exchange(sent)
        out = aggregate(graph, sent, names, message=message, edge=edge)

        def shifts(degrees: Tensor) -> Tensor:
            own = {"sum": degrees, "var": torch.zeros_like(degrees), "std": torch.zeros_like(degrees)}
            return torch.stack([own.get(name, degrees.clamp(max=1)) for name in names], dim=1)

        shift = of_degrees(graph, f"shifts {names}", "targets", shifts).to(out.dtype)
        out = torch.addcmul(out, shift.unsqueeze(2), _products(rows, to_target).to(out.dtype).unsqueeze(1))
        return out.view(-1, len(names), self.towers, self.F_in).transpose(1, 2).flatten(2)


def _products(rows: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows [N, T or 1, F] times the weight [T, F', F] of each tower, plus a bias [T * F'], side by side."""
    if rows.size(1) == 1:
        return F.linear(rows[:, 0], weights.flatten(0, 1), bias)
    products = torch.bmm(rows.transpose(0, 1), weights.transpose(1, 2)).transpose(0, 1).flatten(1)
    return products if bias is None else products + bias.to(products.dtype)


def _scaled_layers(layers: Sequence[Any], rows: Tensor, stats: Tensor, factors: Tensor) -> Tensor:
    r"""Return what the linear layer of each tower makes of features and the scaled statistics, [N, T, O].

    .. math:: W [x, s_1 a, s_2 a, ...] + b = W_0 x + b + s_1 W_1 a + s_2 W_2 a + ...

    Args:
        layers: The layers.
        rows: Features :math:`x`, [N, T or 1, F].
        stats: Statistics :math:`a`, [N, T, S * F].
        factors: What each scaler multiplies by, [N, K].
    """
    weights, biases = torch.stack([layer.weight for layer in layers]), [layer.bias for layer in layers]
    bias = None if any(each is None for each in biases) else torch.cat(biases)
    towers, outputs, width = weights.shape
    to_x, to_stats = weights.split([rows.size(2), width - rows.size(2)], dim=2)
    count = factors.size(1)
    by_factor = to_stats.reshape(towers, outputs, count, -1).transpose(1, 2).flatten(1, 2)
    parts = _products(stats, by_factor).view(-1, towers, count, outputs)
    return _products(rows, to_x, bias).view(-1, towers, outputs) + (parts * factors.view(-1, 1, count, 1)).sum(dim=2)
