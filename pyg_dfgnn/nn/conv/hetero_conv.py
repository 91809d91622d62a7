"""PyG's HeteroConv with the sums of many relations in one gather, and one product for each type of targets."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import conv

from pyg_dfgnn.frontend.derived import EdgeDerived
from pyg_dfgnn.nn.conv.graph_conv import GraphConv
from pyg_dfgnn.nn.conv.sage_conv import SAGEConv
from pyg_dfgnn.nn.dense.hetero_linear import LINEAR
from pyg_dfgnn.nn.gate import has_hooks, is_plain_layer, lacks_kernels, module_reasons, statistics_of
from pyg_dfgnn.ops.eager import is_eager
from pyg_dfgnn.ops.visits import MEASURED_NUMBERS
from pyg_dfgnn.settings import current

_LEAST_RELATIONS = 5
"""Relations from which one gather costs the host less: on a CPU five took .97 of the time one by one, twelve .73."""
_MOST_NUMBERS = 1 << 24
"""Numbers of all sources from which a copy of them takes longer than what the host saves."""

Relation = tuple[str, str, str]
Options = tuple[bool, int, int]
"""Whether messages are averaged, and the widths of sources and results."""


class HeteroConv(conv.HeteroConv):
    r"""PyG's `HeteroConv`: same arguments, parameters, results and gradients.

    .. math::
        x'_i = \sum_r W_r \operatorname{aggr}_{j \in N_r(i)} x_j + V_r x_i
             = [a_{i1}, a_{i2}, \ldots, x_i] \, [W_1, W_2, \ldots, \textstyle\sum_r V_r]^T

    Five or more relations of `SAGEConv` or `GraphConv` with sums or means, whose results are added up, are one gather
    and one scatter for all of them, and one product for each type of targets. All others run one by one.
    """

    def forward(self, *args_dict: Any, **kwargs_dict: Any) -> dict[str, Tensor]:
        """PyG's forward; see `torch_geometric.nn.HeteroConv.forward`."""
        groups = {} if kwargs_dict or len(args_dict) != 2 else self._groups(*args_dict)
        if not groups:
            alone: dict[str, Tensor] = super().forward(*args_dict, **kwargs_dict)
            return alone
        x_dict, edge_index_dict = args_dict
        joined = {relation for group in groups.values() for relation in group}
        rest = {relation: edges for relation, edges in edge_index_dict.items() if relation not in joined}
        found = [super().forward(x_dict, rest)]
        found += [self._joined(options, group, x_dict, edge_index_dict) for options, group in groups.items()]
        out_dict: dict[str, Tensor] = {}
        for relation in self.convs.keys():
            parts = [each[relation[-1]] for each in found if relation[-1] in each]
            if relation in edge_index_dict and relation[-1] not in out_dict:
                out_dict[relation[-1]] = sum(parts[1:], parts[0])
        return out_dict

    def _groups(
        self, x_dict: Mapping[str, Tensor], edge_index_dict: Mapping[Relation, Tensor]
    ) -> dict[Options, list[Relation]]:
        """Return the relations that are computed together."""
        if self.aggr != "sum" or torch.compiler.is_compiling() or not is_eager() or current().deterministic:
            return {}
        groups: dict[Options, list[Relation]] = {}
        for relation, layer in self.convs.items():
            edges, x, to = edge_index_dict.get(relation), x_dict.get(relation[0]), x_dict.get(relation[-1])
            if type(edges) is not Tensor or not _is_matrix(x) or not _is_matrix(to) or lacks_kernels(x):  # type: ignore[arg-type]
                continue
            options = _options(layer, x, to)  # type: ignore[arg-type]
            if options is not None and edges.dim() == 2 and edges.dtype is torch.int64:
                groups.setdefault(options, []).append(relation)
        return {
            options: group
            for options, group in groups.items()
            if len(group) >= _LEAST_RELATIONS and _is_small(group, x_dict, edge_index_dict)
        }

    def _joined(
        self,
        options: Options,
        group: Sequence[Relation],
        x_dict: Mapping[str, Tensor],
        edge_index_dict: Mapping[Relation, Tensor],
    ) -> dict[str, Tensor]:
        """Return what relations with equal options give to each type, by one gather of all."""
        averages, width, _ = options
        sources = list(dict.fromkeys(relation[0] for relation in group))
        targets: dict[str, list[Relation]] = {}
        for relation in group:
            targets.setdefault(relation[-1], []).append(relation)
        firsts = dict(zip(sources, accumulate((x_dict[name].size(0) for name in sources), initial=0)))
        counts = [x_dict[name].size(0) * len(relations) for name, relations in targets.items()]
        begins = dict(zip(targets, accumulate(counts, initial=0)))
        # The sums of a target follow each other, by relation: a row of what its product takes.
        numbers = [
            number
            for name, _, target in group
            for number in (
                firsts[name],
                len(targets[target]),
                begins[target] + targets[target].index((name, _, target)),
            )
        ]
        row, col = _edges(*(edge_index_dict[relation] for relation in group), *numbers)
        x = torch.cat([x_dict[name] for name in sources]) if len(sources) > 1 else x_dict[sources[0]]
        sums = x.new_zeros(sum(counts), width).index_add(0, col, x.index_select(0, row))
        if averages:
            edges_of = x.new_zeros(sum(counts)).index_add(0, col, x.new_ones(1).expand(col.size(0)))
            sums = sums / edges_of.clamp(min=1).view(-1, 1)
        outs = {}
        for (name, relations), rows in zip(targets.items(), sums.split(counts), strict=True):
            layers = [_layers(self.convs[relation]) for relation in relations]
            weights, inputs = [neighbours.weight for neighbours, _ in layers], [rows.view(-1, width * len(relations))]
            roots = [root.weight for _, root in layers if root is not None]
            if roots:
                weights.append(torch.stack(roots).sum(0) if len(roots) > 1 else roots[0])
                inputs.append(x_dict[name])
            biases = [layer.bias for both in layers for layer in both if layer is not None and layer.bias is not None]
            bias = None if not biases else torch.stack(biases).sum(0) if len(biases) > 1 else biases[0]
            outs[name] = F.linear(torch.cat(inputs, dim=1), torch.cat(weights, dim=1), bias)
        return outs


def _is_matrix(x: Any) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.dim() == 2 and x.layout is torch.strided


def _layers(layer: Any) -> tuple[Any, Any]:
    """Return the linear layers of a conv, for its neighbours and for the node itself."""
    if isinstance(layer, SAGEConv):
        return layer.lin_l, layer.lin_r if layer.root_weight else None
    return layer.lin_rel, layer.lin_root


def _options(layer: Any, x: Tensor, to: Tensor) -> Options | None:
    """Return what relations must agree about to be computed together; None for a conv that is not."""
    if type(layer) not in (SAGEConv, GraphConv) or has_hooks(layer) or "forward" in layer.__dict__:
        return None
    if module_reasons(layer, False) or layer.flow != "source_to_target":
        return None
    if isinstance(layer, SAGEConv) and (layer.project or layer.normalize):
        return None
    statistics, layers = statistics_of(layer._modules["aggr_module"]), [each for each in _layers(layer) if each]
    if statistics not in (("sum",), ("mean",)) or not all(is_plain_layer(each, LINEAR) for each in layers):
        return None
    dtypes = {x.dtype, to.dtype, *(each.weight.dtype for each in layers)}
    fits = layers[0].weight.size(1) == x.size(1) and layers[-1].weight.size(1) == (to if len(layers) > 1 else x).size(1)
    if len(dtypes) > 1 or not fits or x.device != to.device:
        return None
    return statistics == ("mean",), x.size(1), layers[0].weight.size(0)


def _is_small(
    group: Sequence[Relation], x_dict: Mapping[str, Tensor], edge_index_dict: Mapping[Relation, Tensor]
) -> bool:
    """Return whether the host, and not the device, limits relations that run one by one."""
    sources, width = {relation[0] for relation in group}, x_dict[group[0][0]].size(1)
    edges = sum(edge_index_dict[relation].size(1) for relation in group)
    return sum(x_dict[name].numel() for name in sources) < _MOST_NUMBERS and edges * width < MEASURED_NUMBERS


def _joined_edges(*args: Any) -> Sequence[Tensor]:
    """Return the edges of relations behind each other, as rows of all sources and of all sums.

    Args:
        args: The edges of each relation, and for each the first source, the number of sums of a target, and the first
            sum.
    """
    count = len(args) // 4
    edges, numbers = args[:count], args[count:]
    columns = [numbers[0::3], numbers[1::3], numbers[2::3], [each.size(1) for each in edges]]
    device = edges[0].device
    table = torch.tensor(columns, dtype=torch.int64)
    # From pinned memory the host waits for no copy.
    table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
    places = table[:3].repeat_interleave(table[3], dim=1, output_size=sum(columns[3]))
    row, col = torch.cat(edges, dim=1)
    return row + places[0], torch.addcmul(places[2], col, places[1])


_edges = EdgeDerived(_joined_edges)
"""Keeps what is made of edges that stay, for all layers of a model."""
